"""What the decode kernel's machine code says, for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import re
import struct
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from headfold.kernels.compiled import HEAD_DIMS, DecodeBuild, table_builds
from headfold.kernels.quantise import QUANTISED_MAX, dequantise

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

KEPT = Path(__file__).resolve().parents[2] / "docs" / "results" / "kernels_compiled.json"


def chosen():
    """About 60 builds: each head_dim with each dtype once, the other choices in turn; and what the rest leaves out."""
    turns = itertools.cycle([(90, 4, 16), (80, 8, None), (90, 1, 64), (80, 1, 16), (90, 8, None), (80, 4, 64)])
    for dtype, head_dim in itertools.product(("bfloat16", *QUANTISED_MAX), HEAD_DIMS):
        capability, group_size, page_size = next(turns)
        if dtype == "float8_e4m3fn":
            capability = 90
        yield build(capability, head_dim, group_size, cache_dtype=dtype, page_size=page_size)
    for capability, group_size, page_size in itertools.product((80, 90), (1, 8), (16, 64)):
        yield build(capability, 128, group_size, page_size=page_size)
    for dtype in ("int8", "int4", "float8_e4m3fn"):
        yield build(90, 128, 8, cache_dtype=dtype, page_size=16, key_scales="channel")
        yield build(90, 128, 4, cache_dtype=dtype, page_size=16)
    yield build(90, 256, 4, cache_dtype="int8")
    yield build(90, 72, 1, cache_dtype="int4")
    yield build(80, 160, 4, cache_dtype="int4")
    yield build(90, 128, 8, q_dtype="float16", cache_dtype="float16", page_size=16)
    yield build(90, 128, 8, page_size=16, window=True)
    yield build(90, 80, 8, cache_dtype="int4", page_size=16, key_scales="channel")
    yield build(90, 64, 1, q_dtype="float32", cache_dtype="float32")
    yield build(90, 128, 8, q_dtype="float32", cache_dtype="int4", page_size=16)
    yield build(80, 72, 8, q_dtype="float32", cache_dtype="int4", page_size=16)
    yield build(80, 160, 8, q_dtype="float32", cache_dtype="float8_e5m2")
    yield build(90, 256, 4, q_dtype="float32", cache_dtype="int8", page_size=64)
    yield build(90, 128, 16, page_size=16)
    yield build(90, 128, 2, cache_dtype="int8", page_size=16)
    yield build(90, 128, 16, cache_dtype="int8", page_size=24)


def build(capability, head_dim, group_size, q_dtype="bfloat16", cache_dtype="bfloat16", page_size=None, **more):
    """As `table_builds` has them."""
    return {
        "capability": capability,
        "head_dim": head_dim,
        "group_size": group_size,
        "q_dtype": q_dtype,
        "cache_dtype": cache_dtype,
        "page_size": page_size,
        **more,
    }


def compile_all(builds):
    """In two processes."""
    from headfold.kernels.compiled import compile_decode

    # Not multiprocessing.Pool, which waits forever for the task of a worker that was killed.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        compiling = [pool.submit(compile_decode, **arguments) for arguments in builds]
        return [future.result() for future in compiling]


def kept_table():
    return json.loads(KEPT.read_text(encoding="utf-8"))


def test_wide_loads_no_spills_deep_pipeline_matrix_instructions():
    """And the table in docs/ says the same of the builds that are in it."""
    import triton

    builds = list(chosen())
    assert len(builds) >= 60
    found = compile_all(builds)
    assert [(build, build.faults) for build in found if build.faults] == []

    table = kept_table()
    if table["triton"] != triton.__version__:
        pytest.skip(f"the table was made by Triton {table['triton']}, this is {triton.__version__}")
    by_arguments = {key(record): record for record in table["builds"]}
    compared = 0
    for build_found in found:
        record = build_found.as_dict()
        if key(record) in by_arguments:
            assert by_arguments[key(record)] == {"fingerprint": by_arguments[key(record)]["fingerprint"]} | record
            compared += 1
    assert compared >= 50 or len(table["builds"]) < table["planned"]


def key(record):
    names = ("capability", "head_dim", "group_size", "q_dtype", "cache_dtype", "page_size", "key_scales", "window")
    return tuple(record[name] for name in names)


def test_the_table_is_whole_and_every_build_in_it_is_sound():
    builds = kept_table()["builds"]
    assert [record for record in builds if record["faults"]] == []
    if len(builds) < kept_table()["planned"]:
        pytest.skip(f"{len(builds)} of {kept_table()['planned']} builds: scripts/kernel_table.py makes the rest")
    assert len({key(record) for record in builds}) == len(builds) == len(list(table_builds()))


@pytest.mark.slow
def test_the_full_table():
    found = compile_all(list(table_builds()))
    assert [(build, build.faults) for build in found if build.faults] == []


def test_faults_are_named():
    sound = DecodeBuild(
        **{field.name: 0 for field in dataclasses.fields(DecodeBuild)}
        | {"capability": 90, "head_dim": 128, "q_dtype": "bfloat16", "cache_dtype": "bfloat16", "block_n": 64}
        | {"copy_bits": 128, "num_matrix_instructions": 8, "tiles_in_flight": 2, "programs_per_sm": 3}
        | {"planned_programs_per_sm": 3}
    )
    assert sound.faults == []
    for change, words in (
        ({"num_spills": 2}, "2 spills"),
        ({"copy_bits": 64}, "64 bits, 128 are possible"),
        ({"tiles_in_flight": 1}, "1 tiles in flight"),
        ({"programs_per_sm": 1, "block_n": 16}, "16 KB in flight"),
        ({"num_matrix_instructions": 0}, "no matrix instructions"),
        ({"programs_per_sm": 1}, "1 programs per SM, 3 are counted on"),
    ):
        assert words in "; ".join(dataclasses.replace(sound, **change).faults)


def test_a_page_id_read_in_its_own_iteration_would_be_noticed(monkeypatch):
    """The check can fail: with two stages there is one tile in flight."""
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
from headfold.kernels import append_kernel, decode
from torch.utils._python_dispatch import TorchDispatchMode

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

class NothingIsReadBack(TorchDispatchMode):
    # A value on the device that the host asks for would end a graph capture.
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "_to_copy", "is_nonzero")
        return function(*args, **(kwargs or {}))

def call(length, batch, cache_dtype=torch.float16, page_size=None, per_channel=False, **options):
    q = torch.zeros(batch, 8, 64, dtype=torch.float16)
    rows, slots = batch, length
    if page_size:
        options["block_table"] = torch.zeros(batch, -(-length // page_size), dtype=torch.int32)
        rows, slots = 300, page_size
    k, v = (torch.zeros(rows, slots, 2, 64, dtype=cache_dtype) for _ in range(2))
    scales = {}
    if cache_dtype == torch.int8:
        scales = dict(k_scale=torch.zeros(2, 64) if per_channel else torch.zeros(rows, slots, 2))
        scales |= dict(v_scale=torch.zeros(rows, slots, 2))
    lengths = torch.full((batch,), length, dtype=torch.int32)
    key = torch.zeros(batch, 1, 2, 64, dtype=torch.float16)
    with NothingIsReadBack():  # the operators' own code, which a mode does not see through them
        decode.gqa_decode_triton._init_fn(q, k, v, lengths, 0.125, **options, **scales)
        append_kernel.kv_append_triton._init_fn(
            k, v, key, key, lengths - 1, options.get("block_table"), scales.get("k_scale"), scales.get("v_scale")
        )

sinks, starts = torch.zeros(8), torch.zeros(16, dtype=torch.int32)
KINDS = {
    "plain": lambda length, batch: {},
    "window": lambda length, batch: dict(window=length),
    "a window beyond 32 bits": lambda length, batch: dict(window=2**31 + length),
    "pages": lambda length, batch: dict(page_size=16, softcap=30.0),
    "int8": lambda length, batch: dict(cache_dtype=torch.int8, seq_starts=starts[:batch]),
    "int8 pages": lambda length, batch: dict(cache_dtype=torch.int8, page_size=24, per_channel=True, sinks=sinks),
    "splits": lambda length, batch: dict(num_splits=1 + length % 16),
}
counts = {}
for kind, options in KINDS.items():
    for batch in (1, 3, 16):
        for length in (1, 2, 16, 64, 100_000 // batch):
            call(length, batch, **options(length, batch))
    after_warm_up = len(compiled)
    for batch in (1, 3, 16):
        for length in range(1, 65):
            call(length, batch, **options(length, batch))
    assert len(compiled) == after_warm_up, (kind, compiled[after_warm_up:])
    counts[kind] = after_warm_up
assert counts["a window beyond 32 bits"] == counts["window"], counts
assert {name for name, _ in compiled} == {"_attend", "_combine", "_append"}, compiled
"""


def test_d14_d15_the_number_of_compilations_is_constant():
    """Over lengths 1 to 64 (each a cache of its own size) and batches 1, 3 and 16, after a warm-up of each kind.

    Triton's own cache is asked, with a driver and a compiler that do nothing. Since nothing is tuned or compiled after
    the first call of a kind, nothing is during graph capture either; nor does the host wait for the device.
    """
    import os
    import subprocess
    import sys

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", COUNT_COMPILATIONS], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
