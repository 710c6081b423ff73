"""What the decode kernel's machine code says, for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import re
import struct
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from headfold.kernels.quantise import dequantise

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

HEAD_DIMS = [64, 72, 80, 96, 112, 128, 160, 256]
CACHE_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"]


def everything():
    """All builds: chips, head_dims, groups, cache dtypes that the chip has, contiguous and pages of 16 and 64."""
    for capability, head_dim, group_size, dtype, page_size in itertools.product(
        (80, 90), HEAD_DIMS, (1, 4, 8), CACHE_DTYPES, (None, 16, 64)
    ):
        if (capability, dtype) != (80, "float8_e4m3fn"):
            yield capability, head_dim, group_size, {"cache_dtype": dtype, "page_size": page_size}


def chosen():
    """About 60 of them: each head_dim with each dtype once, the other choices in turn; and what the rest leaves out."""
    turns = itertools.cycle([(90, 4, 16), (80, 8, None), (90, 1, 64), (80, 1, 16), (90, 8, None), (80, 4, 64)])
    for dtype, head_dim in itertools.product(CACHE_DTYPES, HEAD_DIMS):
        capability, group_size, page_size = next(turns)
        if dtype == "float8_e4m3fn":
            capability = 90
        yield capability, head_dim, group_size, {"cache_dtype": dtype, "page_size": page_size}
    for capability, group_size, page_size in itertools.product((80, 90), (1, 8), (16, 64)):
        yield capability, 128, group_size, {"cache_dtype": "bfloat16", "page_size": page_size}
    for dtype in ("int8", "int4", "float8_e4m3fn"):
        yield 90, 128, 4, {"cache_dtype": dtype, "key_scales": "channel"}
    yield 90, 128, 4, {"q_dtype": "float16", "cache_dtype": "float16", "page_size": 16}
    yield 90, 128, 16, {"cache_dtype": "bfloat16", "page_size": 16}
    yield 90, 128, 16, {"cache_dtype": "int8", "page_size": 24}
    yield 90, 128, 4, {"cache_dtype": "bfloat16", "page_size": 16, "window": True}
    yield 90, 64, 1, {"q_dtype": "float32", "cache_dtype": "float32"}


def check(builds) -> None:
    """All of them, in two processes; and every failure together."""
    from headfold.kernels.compiled import compile_decode
    from headfold.kernels.decode import _PROGRAMS_PER_SM
    from headfold.kernels.dtypes import num_bits

    wrong = []
    # Not multiprocessing.Pool, which waits forever for the task of a worker that was killed.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        compiling = [pool.submit(compile_decode, *arguments, **options) for *arguments, options in builds]
        for found in (future.result() for future in compiling):
            faults = []
            if found.num_spills:
                faults.append(f"{found.num_spills} spills")
            if found.copy_bits != found.widest_copy_bits:
                faults.append(f"copies of {found.copy_bits} bits, {found.widest_copy_bits} are possible")
            if found.tiles_in_flight < 2:
                faults.append(f"{found.tiles_in_flight} tiles in flight")
            if found.bytes_in_flight_per_sm < 48 * 1024:
                faults.append(f"{found.bytes_in_flight_per_sm} bytes in flight per SM")
            if not found.num_matrix_instructions and found.q_dtype != "float32":
                faults.append("no matrix instructions")
            if found.programs_per_sm < _PROGRAMS_PER_SM[f"sm_{found.capability}"][num_bits(found.cache_dtype)] - 1:
                faults.append(f"{found.programs_per_sm} programs per SM, the split cost model counts on more")
            if faults:
                wrong.append(f"{found}: {', '.join(faults)}")
    assert not wrong, "\n".join(wrong)


def test_wide_loads_no_spills_deep_pipeline_matrix_instructions():
    check(list(chosen()))


@pytest.mark.slow
def test_the_full_table():
    check(list(everything()))


def test_a_page_id_read_in_its_own_iteration_would_be_noticed(monkeypatch):
    """The check can fail: with two stages there is one tile in flight."""
    import dataclasses

    from headfold.kernels import compiled, decode

    tile_for = decode.tile_for
    monkeypatch.setattr(decode, "tile_for", lambda *a: dataclasses.replace(tile_for(*a), num_stages=2))
    assert compiled.compile_decode(90, 64, 4).tiles_in_flight == 1


def run_ptx(asm: str, word: int) -> list[int]:
    """A few lines of PTX on one 32-bit input; the outputs in order. Enough for decode.py's conversions."""
    num_outputs = max(int(n) for n in re.findall(r"\$(\d+)", asm))
    values: dict[str, int] = {f"${num_outputs}": word}
    halves = struct.Struct("<2e")

    def read(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0)

    for line in asm.strip("{} \n").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        if name == "mov.b32" and rest.startswith("{"):
            low, high = re.findall(r"\w+", rest[: rest.index("}")])
            source = read(rest.split("}")[1].strip(", "))
            values[low], values[high] = source & 0xFFFF, source >> 16
            continue
        target, *operands = [part.strip() for part in rest.split(",")]
        x = [read(operand) for operand in operands]
        if name == "mov.b32":
            values[target] = x[0]
        elif name == "xor.b32":
            values[target] = x[0] ^ x[1]
        elif name == "and.b32":
            values[target] = x[0] & x[1]
        elif name == "shr.u32":
            values[target] = x[0] >> x[1]
        elif name == "prmt.b32":
            pool = [(x[0] >> 8 * i) & 255 for i in range(4)] + [(x[1] >> 8 * i) & 255 for i in range(4)]
            selected = [(x[2] >> 4 * i) & 15 for i in range(4)]
            assert all(s < 8 for s in selected)  # the upper bit would replicate the sign
            values[target] = sum(pool[s] << 8 * i for i, s in enumerate(selected))
        elif name == "sub.f16x2":
            a, b = (halves.unpack(struct.pack("<I", v)) for v in x)
            values[target] = struct.unpack("<I", halves.pack(a[0] - b[0], a[1] - b[1]))[0]
        elif name == "cvt.rn.f16x2.e4m3x2":
            stored = torch.tensor([x[0] & 255, x[0] >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
            values[target] = struct.unpack("<I", halves.pack(*stored.float().tolist()))[0]
        else:
            raise AssertionError(f"{name} is not known here")
    return [values[f"${i}"] for i in range(num_outputs)]


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e5m2", "float8_e4m3fn", "int4"])
def test_conversions_in_ptx(cache_dtype):
    """Every byte in every place, against what torch reads. The interpreter cannot run these lines."""
    from headfold.kernels import decode

    asm = {
        "int8": decode._INT8_TO_FP16,
        "int4": decode._INT4_TO_FP16,
        "float8_e5m2": decode._E5M2_TO_FP16,
        "float8_e4m3fn": decode._E4M3_TO_FP16,
    }[cache_dtype].value
    for first in range(0, 256, 4):
        data = [(first + 67 * i) % 256 for i in range(4)]
        outputs = run_ptx(asm, sum(byte << 8 * i for i, byte in enumerate(data)))
        found = torch.tensor([v for word in outputs for v in struct.unpack("<2e", struct.pack("<I", word))])
        stored = torch.tensor(data, dtype=torch.uint8)
        if cache_dtype == "int4":
            # First the low values of the four bytes, then the high ones, as rows of two halves are packed.
            expected = dequantise(stored[None], None, "int4")[0]
        else:
            expected = stored.view(getattr(torch, cache_dtype)).float()
        assert torch.equal(found.nan_to_num(nan=7e4), expected.nan_to_num(nan=7e4))


COUNT_COMPILATIONS = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from headfold.kernels import decode

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
driver.set_active(Driver())
compiled = []
class Compiled:
    launch_metadata = staticmethod(lambda *a: None)
    run = staticmethod(lambda *a: None)
    function = packed_metadata = None
def do_compile(self, key, signature, *rest):
    compiled.append((self.fn.__name__, key))
    self.device_caches[0][0][key] = Compiled()
    return Compiled()
triton.runtime.jit.JITFunction._do_compile = do_compile
decode._device = lambda device: ("sm_90", 132)

def call(length, batch, **options):
    q = torch.zeros(batch, 8, 64, dtype=torch.float16)
    cache = torch.zeros(batch, length, 2, 64, dtype=torch.float16)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    decode.gqa_decode_triton(q, cache, cache.clone(), lengths, 0.125, **options)

pages = dict(block_table=torch.zeros(16, 8, dtype=torch.int32))
for batch in (1, 3, 16):
    for length in (1, 2, 64, 100_000 // batch):
        call(length, batch)
        call(length, batch, window=7)
        call(length, batch, window=16)
after_warm_up = len(compiled)
assert after_warm_up >= 2, compiled
for batch in (1, 3, 16):
    for length in range(1, 65):
        call(length, batch)
        call(length, batch, window=length)
assert len(compiled) == after_warm_up, compiled[after_warm_up:]
print(after_warm_up, "compilations")
"""


def test_d14_d15_the_number_of_compilations_is_constant():
    """Over lengths 1 to 64 (each a cache of its own size) and batches 1, 3 and 16, after a warm-up.

    Triton's own cache is asked, with a driver and a compiler that do nothing. Since nothing is tuned or compiled after
    the first call of a kind, nothing is during graph capture either.
    """
    import os
    import subprocess
    import sys

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", COUNT_COMPILATIONS], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
