"""What the decode kernel becomes on a GPU that is not here: compiled offline, then read back from the machine code.

Needs Triton (its wheel brings ptxas and cuobjdump) and no GPU. It says nothing about time; it says whether the loads
are as wide as they can be, whether anything spills, how many bytes are on their way at once, and whether matrix
instructions are used: what must hold before a decode kernel can reach the memory's speed.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .dtypes import cache_dtype_name, is_quantised, num_bits
from .quantise import stored_head_dim

if TYPE_CHECKING:
    from .decode import Tile

_TRITON_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int4": "u8",
}
# Shared memory of an SM and what each program takes beside its own; registers of an SM and their granularity.
_SHARED_BYTES = {80: 164 * 1024, 86: 100 * 1024, 90: 228 * 1024}
_SHARED_RESERVED = 1024
_REGISTERS = 65536
_REGISTER_STEP = 8
# What an H200 needs on its way to cover its memory's latency is about half of this.
_LEAST_BYTES_IN_FLIGHT = 48 * 1024

HEAD_DIMS = (64, 72, 80, 96, 112, 128, 160, 256)


@dataclass(frozen=True)
class DecodeBuild:
    """One build of `_attend` and what its machine code says."""

    capability: int  # 80, 90: compute capability x 10
    head_dim: int
    group_size: int
    q_dtype: str
    cache_dtype: str
    page_size: int | None
    key_scales: str | None
    window: bool
    block_n: int
    num_warps: int
    num_stages: int
    registers: int  # per thread
    num_spills: int  # loads and stores of local memory
    shared_bytes: int  # per program
    copy_bits: int  # of the narrowest asynchronous copy of K or V
    num_matrix_instructions: int
    tiles_in_flight: int  # tiles of K and V asked for before the first is used
    programs_per_sm: int
    planned_programs_per_sm: int  # what the split cost model counts on
    loop_instructions: int  # of one warp, per tile of keys

    @property
    def widest_copy_bits(self) -> int:
        """The widest copy that rows of this size allow: 128 bits where they are a multiple of 16 bytes."""
        return 8 * math.gcd(16, self.head_dim * num_bits(self.cache_dtype) // 8)

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes of K and V that one SM has asked for and not used yet, padding not counted."""
        tile_bytes = 2 * self.block_n * self.head_dim * num_bits(self.cache_dtype) // 8
        return self.programs_per_sm * self.tiles_in_flight * tile_bytes

    @property
    def faults(self) -> list[str]:
        """What is not as it must be for a kernel that is to reach the memory's speed; empty for a sound build."""
        found = []
        if self.num_spills:
            found.append(f"{self.num_spills} spills")
        if self.copy_bits != self.widest_copy_bits:
            found.append(f"copies of {self.copy_bits} bits, {self.widest_copy_bits} are possible")
        if self.tiles_in_flight < 2:
            found.append(f"{self.tiles_in_flight} tiles in flight")
        if self.bytes_in_flight_per_sm < _LEAST_BYTES_IN_FLIGHT:
            found.append(f"{self.bytes_in_flight_per_sm / 1024:.0f} KB in flight per SM")
        if not self.num_matrix_instructions and self.cache_dtype != "float32":  # which they have no full precision for
            found.append("no matrix instructions")
        if self.programs_per_sm < self.planned_programs_per_sm - 1:
            found.append(f"{self.programs_per_sm} programs per SM, {self.planned_programs_per_sm} are counted on")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For a table: the fields, and what follows from them."""
        return asdict(self) | {
            "widest_copy_bits": self.widest_copy_bits,
            "bytes_in_flight_per_sm": self.bytes_in_flight_per_sm,
            "faults": self.faults,
        }


def table_builds() -> Iterator[dict[str, Any]]:
    """Arguments of `compile_decode` for all builds that a table should have, bfloat16 over every cache dtype first.

    sm_80 and sm_90, all head_dims, groups of 1, 4 and 8, contiguous and pages of 16 and 64. Then some of the rest:
    scales of K per channel, a sliding window, float16, and float32 over every cache dtype.
    """
    quantised = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")
    more: dict[str, Any]
    for q_dtype, cache_dtypes, groups, page_sizes, more in (
        ("bfloat16", ("bfloat16", *quantised), (1, 4, 8), (None, 16, 64), {}),
        ("bfloat16", quantised, (8,), (16,), {"key_scales": "channel"}),
        ("bfloat16", ("bfloat16", *quantised), (8,), (16,), {"window": True}),
        ("float16", ("float16",), (1, 8), (None, 16), {}),
        ("float32", ("float32", *quantised), (1, 8), (None, 16), {}),
    ):
        for capability, head_dim, group_size, cache_dtype, page_size in itertools.product(
            (80, 90), HEAD_DIMS, groups, cache_dtypes, page_sizes
        ):
            if (capability, cache_dtype) != (80, "float8_e4m3fn"):  # which that chip does not have
                yield {
                    "capability": capability,
                    "head_dim": head_dim,
                    "group_size": group_size,
                    "q_dtype": q_dtype,
                    "cache_dtype": cache_dtype,
                    "page_size": page_size,
                    **more,
                }


def build_tile(
    capability: int,
    head_dim: int,
    group_size: int,
    *,
    cache_dtype: str = "bfloat16",
    q_dtype: str = "bfloat16",
    **_: Any,
) -> Tile:
    """The tile with which `compile_decode` builds."""
    from . import decode

    return decode.tile_for(f"sm_{capability}", head_dim, group_size, getattr(torch, q_dtype), cache_dtype)


def compile_decode(
    capability: int,
    head_dim: int,
    group_size: int,
    *,
    cache_dtype: str = "bfloat16",
    q_dtype: str = "bfloat16",
    page_size: int | None = None,
    key_scales: str | None = None,
    window: bool = False,
) -> DecodeBuild:
    """Compiles `_attend` for a compute capability (80, 86, 90) as `gqa_decode` launches it, splits chosen at run
    time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import decode

    cache_dtype = cache_dtype_name(cache_dtype)
    quantised = is_quantised(cache_dtype)
    if quantised and key_scales is None:
        key_scales = "token"
    dtype = getattr(torch, q_dtype)
    tile = build_tile(capability, head_dim, group_size, cache_dtype=cache_dtype, q_dtype=q_dtype)
    operand = decode.dot_dtype(dtype, cache_dtype)
    element_bytes = max(num_bits(cache_dtype) // 8, 1)

    values: dict[str, Any] = {
        "seq_starts_ptr": None,
        "sinks_ptr": None,
        "softcap": None,
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": group_size,
        "PAGE_SIZE": page_size or 1,
        "STRIDE_UNIT": math.gcd(16 // element_bytes, stored_head_dim(cache_dtype, head_dim)),
        "SAME_STRIDES": True,
        "IS_QUANTISED": quantised,
        "IS_INT4": cache_dtype == "int4",
        "K_SCALE_PER_CHANNEL": key_scales == "channel",
        "DOT_DTYPE": decode.TRITON_DTYPES[operand],
        "USE_PTX": True,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": tile.block_d,
        "MAX_SPLITS": decode.MAX_NUM_SPLITS,
    }
    if not quantised:
        values |= {"k_scale_ptr": None, "v_scale_ptr": None}
    if page_size is None:
        values["block_table_ptr"] = None
    if not window:
        values["window"] = None
    q_type, cache_type = "*" + _TRITON_NAMES[q_dtype], "*" + _TRITON_NAMES[cache_dtype]
    types = {"q_ptr": q_type, "out_ptr": q_type, "k_ptr": cache_type, "v_ptr": cache_type, "softmax_scale": "fp32"}
    for name in ("seq_lens_ptr", "block_table_ptr", "num_splits_ptr"):
        types[name] = "*i32"
    signature = {}
    for name in decode._attend.arg_names:
        default = "*fp32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in values else types.get(name, default)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if name.endswith("_ptr") and kind != "constexpr"
    }
    kernel = triton.compile(
        ASTSource(decode._attend, signature, values, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True},
    )
    registers, sass = _disassemble(kernel.asm["cubin"])
    return DecodeBuild(
        capability=capability,
        head_dim=head_dim,
        group_size=group_size,
        q_dtype=q_dtype,
        cache_dtype=cache_dtype,
        page_size=page_size,
        key_scales=key_scales,
        window=window,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        registers=registers,
        shared_bytes=kernel.metadata.shared,
        programs_per_sm=_programs_per_sm(capability, registers, kernel.metadata.shared, 32 * tile.num_warps),
        planned_programs_per_sm=tile.programs_per_sm,
        **_read_sass(sass, num_scale_copies=0 if not quantised else 1 if key_scales == "channel" else 2),
    )


def _disassemble(cubin: bytes) -> tuple[int, str]:
    """Registers per thread, and the machine code as text."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+)", usage)
    assert found, usage
    return int(found[1]), sass


def _programs_per_sm(capability: int, registers: int, shared_bytes: int, num_threads: int) -> int:
    registers_each = -(-registers // _REGISTER_STEP) * _REGISTER_STEP * num_threads
    return min(_REGISTERS // registers_each, _SHARED_BYTES[capability] // (shared_bytes + _SHARED_RESERVED))


def _read_sass(sass: str, num_scale_copies: int) -> dict[str, int]:
    """Counts over the machine code: spills, copies from global to shared memory, matrix instructions, the main loop."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    names = [(at, re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]) for at, text in code]

    # The main loop is the longest stretch that ends in a jump back to its start and copies K and V.
    loops = []
    for (at, text), (_, name) in zip(code, names, strict=True):
        target = re.search(r"0x([0-9a-f]+)", text) if name.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            body = [n for a, n in names if int(target[1], 16) <= a <= at]
            if any(n.startswith("LDGSTS") for n in body):
                loops.append(body)
    assert loops, "no loop copies asynchronously"
    loop = max(loops, key=len)

    def copies(part: list[str]) -> Counter[int]:
        widths: Counter[int] = Counter()
        for name in part:
            if name.startswith("LDGSTS"):
                widths[next((int(w) for w in name.split(".") if w in ("64", "128")), 32)] += 1
        # One copy of 32 bits per tensor of scales.
        widths[32] -= min(num_scale_copies, widths[32])
        return +widths

    in_loop = copies(loop)
    # A tensor of scales is copied once per tile ahead too; K and V decide.
    width = min(in_loop)
    everywhere = copies([name for _, name in names])
    return {
        "num_spills": sum(name.startswith(("LDL", "STL")) for _, name in names),
        "copy_bits": width,
        "num_matrix_instructions": sum(
            name.startswith(("HMMA", "HGMMA", "IMMA", "QMMA", "QGMMA")) for _, name in names
        ),
        "tiles_in_flight": everywhere[width] // in_loop[width] - 1,
        "loop_instructions": len(loop),
    }
