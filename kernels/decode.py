"""Decode attention over a KV cache in Triton: split keys, shared KV heads, one pass over the cache.

Two kernels. `_attend` runs on a grid (B, G x head blocks, splits): the query heads of a group are the rows of one tile
against the keys of their one KV head, so K and V are read once per group, and MHA, GQA and MQA are the same kernel.
With more than one split `_combine` merges the splits' outputs by their log-sum-exp (Flash-Decoding, Dao et al. 2023;
the softmax is the online one of FlashAttention, arXiv 2205.14135). Importing this module needs Triton.

Shape letters: B sequences, S slots, N keys of a tile, H query heads, G KV heads, M query heads of a tile, D head_dim.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .arguments import MAX_NUM_SPLITS, decode_shape
from .dtypes import is_quantised, num_bits
from .quantise import stored_head_dim

# The split cost model, in tiles: what a program costs beside its tiles, and what one more split costs when merging.
PROGRAM_OVERHEAD = tl.constexpr(10.0)
MERGE_OVERHEAD = tl.constexpr(0.2)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))
# float16 ends at 2^16: operands that are known to be at most 1 are multiplied by 2^14, and lose 14 bits less below it.
_FP16_SHIFT = tl.constexpr(14)


@triton.jit
def _key_range(seq_lens_ptr, seq_starts_ptr, index, mask, window, capacity):
    """First key and end of the keys that sequence `index` attends to; (0, 0) if there are none."""
    end = tl.minimum(tl.load(seq_lens_ptr + index, mask=mask, other=0), capacity)
    start = tl.maximum(end - window, 0) if window is not None else end * 0
    if seq_starts_ptr is not None:
        start = tl.maximum(start, tl.load(seq_starts_ptr + index, mask=mask, other=0))
    is_empty = start >= end
    return tl.where(is_empty, 0, start), tl.where(is_empty, 0, end)


@triton.jit
def _tiles_per_split(
    seq_lens_ptr,
    seq_starts_ptr,
    window,
    capacity,
    batch_size,
    programs_at_once,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Tiles of keys that one program should take, the same for the whole batch, by a search over the cost model

        waves x (tiles per split + PROGRAM_OVERHEAD) + MERGE_OVERHEAD x splits

    for every number of splits of the longest sequence that the grid has room for.
    """
    CHUNK: tl.constexpr = 1024 // MAX_SPLITS  # sequences at a time: (CHUNK, MAX_SPLITS) values live in registers
    longest = 0
    for first in range(0, batch_size, CHUNK):
        b = first + tl.arange(0, CHUNK)
        start, end = _key_range(seq_lens_ptr, seq_starts_ptr, b, b < batch_size, window, capacity)
        longest = tl.maximum(longest, tl.max(tl.cdiv(end, BLOCK_N) - start // BLOCK_N, 0))
    splits = 1 + tl.arange(0, MAX_SPLITS)
    tiles = tl.maximum(tl.cdiv(longest, splits), 1)
    programs = tl.zeros([MAX_SPLITS], tl.int32)
    for first in range(0, batch_size, CHUNK):
        b = first + tl.arange(0, CHUNK)
        start, end = _key_range(seq_lens_ptr, seq_starts_ptr, b, b < batch_size, window, capacity)
        num_tiles = tl.cdiv(end, BLOCK_N) - start // BLOCK_N
        programs += tl.sum(tl.cdiv(num_tiles[:, None], tiles[None, :]), 0)
    waves = tl.cdiv(programs * tl.num_programs(1), programs_at_once)
    cost = waves.to(tl.float32) * (tiles.to(tl.float32) + PROGRAM_OVERHEAD) + MERGE_OVERHEAD * splits.to(tl.float32)
    cost = tl.where(splits <= tl.num_programs(2), cost, _INF)
    best = tl.argmin(cost, 0) + 1
    return tl.maximum(tl.cdiv(longest, best), 1)


@triton.jit
def _page_of(block_table_ptr, tile, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of a tile's keys: one id where a tile lies in one page, else one per key; 0 for keys not attended to."""
    if PAGE_SIZE % BLOCK_N == 0:
        first = tile * BLOCK_N
        return tl.load(block_table_ptr + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(block_table_ptr + position // PAGE_SIZE, mask=(position >= start) & (position < end), other=0)


# Stored bytes to float16, four at a time, in PTX: Triton's own conversions go element by element. A byte in the low
# bits of 0x6400 is the float16 1024 + byte, exactly; e5m2 is the upper half of a float16.
_INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 u, a, b, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 a, u, 0x64646464, 0x4140;
    prmt.b32 b, u, 0x64646464, 0x4342;
    sub.f16x2 $0, a, bias;
    sub.f16x2 $1, b, bias;
}""")
_INT4_TO_FP16 = tl.constexpr("""{
    .reg .b32 u, a, b, c, d, bias;
    mov.b32 bias, 0x64086408;
    and.b32 u, $4, 0x0F0F0F0F;
    prmt.b32 a, u, 0x64646464, 0x4140;
    prmt.b32 b, u, 0x64646464, 0x4342;
    shr.u32 u, $4, 4;
    and.b32 u, u, 0x0F0F0F0F;
    prmt.b32 c, u, 0x64646464, 0x4140;
    prmt.b32 d, u, 0x64646464, 0x4342;
    sub.f16x2 $0, a, bias;
    sub.f16x2 $1, b, bias;
    sub.f16x2 $2, c, bias;
    sub.f16x2 $3, d, bias;
}""")
_E5M2_TO_FP16 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
}""")
_E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")


@triton.jit
def _widen(x, DOT_DTYPE: tl.constexpr, USE_PTX: tl.constexpr, IS_PURE: tl.constexpr):
    """Stored values in the dtype that they are multiplied in.

    Conversions that are not pure stay where they are written. That is wanted of V: the compiler would move a pure one
    behind the transposition through shared memory, which then goes byte by byte and halves the width of V's loads.
    """
    if USE_PTX and DOT_DTYPE.primitive_bitwidth == 16 and x.dtype.primitive_bitwidth == 8:
        if x.dtype == tl.int8:
            asm: tl.constexpr = _INT8_TO_FP16
        elif x.dtype == tl.float8e5:
            asm: tl.constexpr = _E5M2_TO_FP16  # type: ignore[no-redef]
        else:
            asm: tl.constexpr = _E4M3_TO_FP16  # type: ignore[no-redef]
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=tl.float16, is_pure=IS_PURE, pack=4)
    else:
        return x.to(DOT_DTYPE)


@triton.jit
def _unpack(x, DOT_DTYPE: tl.constexpr, USE_PTX: tl.constexpr, IS_PURE: tl.constexpr):
    """The first and the second half of rows of int4, in the dtype that they are multiplied in."""
    if USE_PTX and DOT_DTYPE.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16, "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=IS_PURE, pack=4
        )
    else:
        return ((x & 15).to(tl.int8) - 8).to(DOT_DTYPE), ((x >> 4).to(tl.int8) - 8).to(DOT_DTYPE)


@triton.jit
def _dot(x, y, acc, SPLIT: tl.constexpr):
    """acc + x @ y, in y's dtype. With SPLIT that is float16 and x, of float32, is taken as a sum of two of them.

    What the second leaves of x is below 2^-25, or 2^-22 of x itself, on matrix instructions of float16.
    """
    high = x.to(y.dtype)
    acc = tl.dot(high, y, acc, input_precision="ieee")
    if SPLIT:
        acc = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, acc, input_precision="ieee")
    return acc


@triton.jit
def _key_ptrs(
    ptr, row, slot, stride_row, stride_slot, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, PER_KEY: tl.constexpr
):
    """Pointers (N) to the keys of a tile. `row` and `slot` are those of its first key, or with PER_KEY of every key.

    Strides are in units of UNIT elements. Offsets are 64 bits wide up to the tile, where caches grow beyond 2^31
    elements, and 32 within it, which costs half the address arithmetic.
    """
    ptr += (row.to(tl.int64) * stride_row + slot.to(tl.int64) * stride_slot) * UNIT
    if not PER_KEY:
        ptr += tl.arange(0, BLOCK_N) * stride_slot * UNIT
    return ptr


@triton.jit
def _tanh(x):
    """1 - 2 / (exp(2 x) + 1), which saturates where exp overflows; near 0, where that cancels, a polynomial."""
    square = x * x
    small = ((1.57394409e-2 * square - 5.23025580e-2) * square + 1.33152077e-1) * square - 3.33327681e-1
    return tl.where(tl.abs(x) < 0.55, x + x * square * small, 1 - 2 / (tl.exp2(x * (2 * _LOG2_E)) + 1))


@triton.jit
def _finish(total, max_2, sinks_ptr, h, mask):
    """What to multiply the accumulated output with, and the natural-log LSE, sink included.

    `total` is the softmax's denominator relative to 2 ** max_2. Where no key was attended to, both are 0 and -inf.
    """
    has_keys = total > 0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h, mask=mask, other=0.0).to(tl.float32) * _LOG2_E
        new_max = tl.where(has_keys, tl.maximum(max_2, sink), 0.0)
        rescale = tl.exp2(max_2 - new_max)
        total = tl.where(has_keys, total * rescale + tl.exp2(sink - new_max), 0.0)
        max_2 = tl.where(has_keys, new_max, max_2)
    else:
        rescale = tl.where(has_keys, 1.0, 0.0)
    weight = tl.where(has_keys, rescale / total, 0.0)
    return weight, (max_2 + tl.log2(total)) * _LN_2


# Alignment is told by STRIDE_UNIT alone: were these specialised on, every new length or batch could compile anew.
_PLAIN_INTEGERS = [
    *(
        "window",
        "capacity",
        "batch_size",
        "fixed_splits",
        "programs_at_once",
        "q_stride_b",
        "q_stride_h",
        "table_stride",
    ),
    *(f"{x}_stride_{axis}" for x in ("k", "v", "k_scale", "v_scale") for axis in ("row", "slot", "head")),
]


@triton.jit(do_not_specialize=_PLAIN_INTEGERS)
def _attend(
    q_ptr,  # (B, H, D)
    k_ptr,  # (B, S, G, D) or (num_pages, page_size, G, D); int4: D / 2 bytes
    v_ptr,
    k_scale_ptr,  # per token (B, S, G) or (num_pages, page_size, G), per channel (G, D), or None
    v_scale_ptr,  # per token, or None
    seq_lens_ptr,  # (B)
    seq_starts_ptr,  # (B) or None
    block_table_ptr,  # (B, max_pages), or None: contiguous
    sinks_ptr,  # (H) or None
    out_ptr,  # (B, H, D)
    lse_ptr,  # (B, H)
    partial_ptr,  # (B, H, splits, D) float32
    partial_lse_ptr,  # (B, H, splits) float32, base 2
    num_splits_ptr,  # (B): how many splits of a sequence were used
    softmax_scale,
    softcap,  # or None
    window,  # or None
    capacity: tl.int32,
    batch_size: tl.int32,
    fixed_splits: tl.int32,  # 0: chosen here
    programs_at_once: tl.int32,
    q_stride_b: tl.int32,
    q_stride_h: tl.int32,
    # Of K and V in units of STRIDE_UNIT elements, so that the compiler knows how far rows are aligned.
    k_stride_row: tl.int32,
    k_stride_slot: tl.int32,
    k_stride_head: tl.int32,
    v_stride_row: tl.int32,
    v_stride_slot: tl.int32,
    v_stride_head: tl.int32,
    k_scale_stride_row: tl.int32,
    k_scale_stride_slot: tl.int32,
    k_scale_stride_head: tl.int32,
    v_scale_stride_row: tl.int32,
    v_scale_stride_slot: tl.int32,
    v_scale_stride_head: tl.int32,
    table_stride: tl.int32,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    SAME_STRIDES: tl.constexpr,  # of K and V: their address arithmetic is then done once
    IS_QUANTISED: tl.constexpr,
    IS_INT4: tl.constexpr,
    K_SCALE_PER_CHANNEL: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    USE_PTX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # of a stored row: half of the head for int4
    MAX_SPLITS: tl.constexpr,
):
    b = tl.program_id(0)
    split = tl.program_id(2)
    HEAD_BLOCKS: tl.constexpr = (GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    g = tl.program_id(1) // HEAD_BLOCKS
    num_heads = tl.num_programs(1) // HEAD_BLOCKS * GROUP_SIZE

    start, end = _key_range(seq_lens_ptr, seq_starts_ptr, b, True, window, capacity)
    # Tiles lie on multiples of BLOCK_N also when a window starts in between: then a tile never straddles more pages
    # than it must. What lies before the start is masked, which reads no bytes.
    first_tile = start // BLOCK_N
    num_tiles = tl.cdiv(end, BLOCK_N) - first_tile
    num_splits = 1
    if MAX_SPLITS > 1:
        if fixed_splits == 0:
            tiles = _tiles_per_split(
                seq_lens_ptr, seq_starts_ptr, window, capacity, batch_size, programs_at_once, BLOCK_N, MAX_SPLITS
            )
        else:
            tiles = tl.maximum(tl.cdiv(num_tiles, fixed_splits), 1)
        num_splits = tl.cdiv(num_tiles, tiles)
        if (split == 0) & (tl.program_id(1) == 0):
            tl.store(num_splits_ptr + b, num_splits)
        first_tile += split * tiles
        num_tiles = tl.minimum(num_tiles - split * tiles, tiles)
    if (num_tiles <= 0) & (split > 0):
        return

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    row = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_M + m
    h = g * GROUP_SIZE + row
    mask_m = row < GROUP_SIZE
    STORED_D: tl.constexpr = HEAD_DIM // 2 if IS_INT4 else HEAD_DIM
    mask_d = d < STORED_D

    # Queries. Over a quantised cache, whose values are multiplied in float16, each is divided by a power of two, which
    # is exact, and which keeps float32 and bfloat16, and a scale per channel of K that has gone into it, in range.
    q_ptrs = q_ptr + b.to(tl.int64) * q_stride_b + h[:, None] * q_stride_h + d[None, :]
    mask_q = mask_m[:, None] & mask_d[None, :]
    q = tl.load(q_ptrs, mask=mask_q, other=0.0)
    SPLIT: tl.constexpr = IS_QUANTISED and q.dtype == tl.float32
    if IS_INT4:
        q_high = tl.load(q_ptrs + STORED_D, mask=mask_q, other=0.0)
    if K_SCALE_PER_CHANNEL:
        channel_ptrs = k_scale_ptr + g * HEAD_DIM + d
        q = q.to(tl.float32) * tl.load(channel_ptrs, mask=mask_d, other=0.0)[None, :]
        if IS_INT4:
            q_high = q_high.to(tl.float32) * tl.load(channel_ptrs + STORED_D, mask=mask_d, other=0.0)[None, :]
    # Logits are kept in base 2: exp(x) = exp2(x log2 e). A cap comes first.
    logit_scale = tl.full([BLOCK_M], softmax_scale * (_LOG2_E if softcap is None else 1 / softcap), tl.float32)
    if IS_QUANTISED:
        q = q.to(tl.float32)
        largest = tl.max(tl.abs(q), 1)
        if IS_INT4:
            q_high = q_high.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(q_high), 1))
        power = tl.where(largest > 0, tl.exp2(tl.ceil(tl.log2(largest)) - _FP16_SHIFT), 1.0)
        q /= power[:, None]
        if IS_INT4:
            q_high /= power[:, None]
        logit_scale *= power

    if SAME_STRIDES:
        v_stride_row, v_stride_slot, v_stride_head = k_stride_row, k_stride_slot, k_stride_head
    k_ptr += g.to(tl.int64) * k_stride_head * STRIDE_UNIT
    v_ptr += g.to(tl.int64) * v_stride_head * STRIDE_UNIT
    HAS_K_SCALE: tl.constexpr = k_scale_ptr is not None and not K_SCALE_PER_CHANNEL
    if HAS_K_SCALE:
        k_scale_ptr += g.to(tl.int64) * k_scale_stride_head
    if v_scale_ptr is not None:
        v_scale_ptr += g.to(tl.int64) * v_scale_stride_head
    PER_KEY: tl.constexpr = block_table_ptr is not None and PAGE_SIZE % BLOCK_N != 0  # a tile lies in several pages
    if block_table_ptr is not None:
        block_table_ptr += b.to(tl.int64) * table_stride
        page = _page_of(block_table_ptr, first_tile, start, end, PAGE_SIZE, BLOCK_N)

    # What probabilities are relative to: the running maximum of the logits, base 2, less what makes them as large as
    # float16 can hold. Small ones count: an attention sink may leave thousands of keys a share that they have together.
    SHIFT: tl.constexpr = _FP16_SHIFT if DOT_DTYPE == tl.float16 else 0  # noqa: SIM300
    max_2 = tl.full([BLOCK_M], -_INF, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    unit = tl.zeros([BLOCK_M], tl.float32)  # with a scale of V: what acc is a multiple of
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if IS_INT4:
        acc_high = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for tile in range(first_tile, first_tile + num_tiles):
        position = tile * BLOCK_N + n
        mask_n = position < end
        if window is not None or seq_starts_ptr is not None:
            mask_n = mask_n & (position >= start)
        mask_nd = mask_n[:, None] & mask_d[None, :]
        if block_table_ptr is None:
            cache_row = b
            slot = tile * BLOCK_N
        else:
            cache_row = page
            # Carried one iteration ahead: K and V addresses that wait for a load of their own iteration would leave the
            # software pipeline with one tile in flight, whatever its depth.
            page = _page_of(block_table_ptr, tile + 1, start, end, PAGE_SIZE, BLOCK_N)
            # The same slots in every tile where tiles hold whole pages.
            first = 0 if BLOCK_N % PAGE_SIZE == 0 else tile * BLOCK_N
            slot = (first + n if PER_KEY else first) % PAGE_SIZE

        k_ptrs = _key_ptrs(k_ptr, cache_row, slot, k_stride_row, k_stride_slot, BLOCK_N, STRIDE_UNIT, PER_KEY)
        v_ptrs = _key_ptrs(v_ptr, cache_row, slot, v_stride_row, v_stride_slot, BLOCK_N, STRIDE_UNIT, PER_KEY)
        k = tl.load(k_ptrs[:, None] + d[None, :], mask=mask_nd, other=0.0)
        v = tl.load(v_ptrs[:, None] + d[None, :], mask=mask_nd, other=0.0)

        if IS_INT4:
            k_low, k_high = _unpack(k, DOT_DTYPE, USE_PTX, True)
            logits = _dot(q, tl.trans(k_low), None, SPLIT)
            logits = _dot(q_high, tl.trans(k_high), logits, SPLIT)
        else:
            logits = _dot(q, tl.trans(_widen(k, DOT_DTYPE, USE_PTX, True)), None, SPLIT)
        if HAS_K_SCALE:
            ptrs = _key_ptrs(k_scale_ptr, cache_row, slot, k_scale_stride_row, k_scale_stride_slot, BLOCK_N, 1, PER_KEY)
            logits *= tl.load(ptrs, mask=mask_n, other=0.0)[None, :]
        logits *= logit_scale[:, None]
        if softcap is not None:
            logits = _tanh(logits) * (softcap * _LOG2_E)
        logits = tl.where(mask_n[None, :], logits, -_INF)

        new_max = tl.maximum(max_2, tl.max(logits, 1) - SHIFT)
        # With nothing but -inf so far, -inf - -inf would be NaN.
        subtracted = tl.where(new_max == -_INF, 0.0, new_max)
        p = tl.exp2(logits - subtracted[:, None])
        rescale = tl.exp2(max_2 - subtracted)
        max_2 = new_max
        total = total * rescale + tl.sum(p, 1)
        if v_scale_ptr is not None:
            # V's scales go into the probabilities. Their product has a range that float16 does not have, so that acc is
            # kept in units of the largest product so far.
            ptrs = _key_ptrs(v_scale_ptr, cache_row, slot, v_scale_stride_row, v_scale_stride_slot, BLOCK_N, 1, PER_KEY)
            p *= tl.load(ptrs, mask=mask_n, other=0.0)[None, :]
            unit *= rescale
            new_unit = tl.maximum(unit, tl.max(p, 1))
            inverse = tl.where(new_unit > 0, 1 / new_unit, 0.0)
            p *= (inverse * 2.0**SHIFT)[:, None]
            rescale = unit * inverse
            unit = new_unit
        acc *= rescale[:, None]
        if IS_INT4:
            acc_high *= rescale[:, None]
            v_low, v_high = _unpack(v, DOT_DTYPE, USE_PTX, False)
            acc = _dot(p, v_low, acc, SPLIT)
            acc_high = _dot(p, v_high, acc_high, SPLIT)
        else:
            acc = _dot(p, _widen(v, DOT_DTYPE, USE_PTX, False), acc, SPLIT)

    if v_scale_ptr is not None:
        unit *= 2.0**-SHIFT
        acc *= unit[:, None]
        if IS_INT4:
            acc_high *= unit[:, None]
    head = b.to(tl.int64) * num_heads + h
    if num_splits > 1:
        partial = head * tl.num_programs(2) + split
        tl.store(partial_lse_ptr + partial, max_2 + tl.log2(total), mask=mask_m)
        partial_ptrs = partial_ptr + partial[:, None] * HEAD_DIM + d[None, :]
        tl.store(partial_ptrs, acc / total[:, None], mask=mask_q)
        if IS_INT4:
            tl.store(partial_ptrs + STORED_D, acc_high / total[:, None], mask=mask_q)
    else:
        weight, lse = _finish(total, max_2, sinks_ptr, h, mask_m)
        tl.store(lse_ptr + head, lse, mask=mask_m)
        out_ptrs = out_ptr + head[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_ptrs, acc * weight[:, None], mask=mask_q)
        if IS_INT4:
            tl.store(out_ptrs + STORED_D, acc_high * weight[:, None], mask=mask_q)


@triton.jit(do_not_specialize=["grid_splits"])
def _combine(
    partial_ptr,  # (B, H, splits, D) float32
    partial_lse_ptr,  # (B, H, splits) float32, base 2
    num_splits_ptr,  # (B)
    sinks_ptr,  # (H) or None
    out_ptr,  # (B, H, D)
    lse_ptr,  # (B, H)
    grid_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merges the splits of one sequence and query head: a mean of their outputs, weighted by exp(LSE)."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    num_splits = tl.load(num_splits_ptr + b)
    if num_splits <= 1:
        return
    head = b.to(tl.int64) * tl.num_programs(1) + h
    partial_ptr += head * grid_splits * HEAD_DIM
    partial_lse_ptr += head * grid_splits
    s = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    mask_d = d < HEAD_DIM

    max_2 = -_INF
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_SPLITS):
        mask_s = first + s < num_splits
        lse = tl.load(partial_lse_ptr + first + s, mask=mask_s, other=-_INF)
        partial_ptrs = partial_ptr + (first + s)[:, None] * HEAD_DIM + d[None, :]
        partial = tl.load(partial_ptrs, mask=mask_s[:, None] & mask_d[None, :], other=0.0)
        new_max = tl.maximum(max_2, tl.max(lse, 0))
        weight = tl.exp2(lse - new_max)
        rescale = tl.exp2(max_2 - new_max)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(partial * weight[:, None], 0)
        max_2 = new_max

    weight, lse = _finish(total, max_2, sinks_ptr, h, True)
    tl.store(lse_ptr + head, lse)
    tl.store(out_ptr + head * HEAD_DIM + d, acc * weight, mask=mask_d)


@dataclass(frozen=True)
class Tile:
    """How `_attend` is compiled for one class of devices, head_dim and cache dtype."""

    block_m: int  # query heads
    block_n: int  # keys
    block_d: int  # stored elements of a row, padded to a power of two
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that run on one SM at once, for the split cost model


# By bits of a stored element, as compiled.py finds them; the first that shared memory or registers forbid is not
# counted.
_PROGRAMS_PER_SM = {
    "sm_90": {32: 3, 16: 3, 8: 4, 4: 3},
    "sm_80": {32: 2, 16: 2, 8: 2, 4: 2},
    "sm_86": {32: 1, 16: 1, 8: 1, 4: 1},
}


def dot_dtype(q_dtype: torch.dtype, cache_dtype: str) -> torch.dtype:
    """The dtype that keys and values are multiplied in. float16 holds every quantised value exactly."""
    return torch.float16 if is_quantised(cache_dtype) else q_dtype


def tile_for(device_class: str, head_dim: int, group_size: int, q_dtype: torch.dtype, cache_dtype: str) -> Tile:
    """The tile of a device class (sm_80, sm_86, sm_90). Nothing is tried out at run time, so nothing stalls or differs.

    Three stages keep two tiles in flight: 64 KB of 16-bit K and V per program, 32 KB of 8 bits. Larger heads get fewer
    keys per tile rather than more warps.
    """
    bits = num_bits(cache_dtype)
    row_bytes = head_dim * bits // 8
    block_m = min(16, triton.next_power_of_2(group_size))
    block_d = max(16, triton.next_power_of_2(stored_head_dim(cache_dtype, head_dim)))
    block_n = min(128, (4096 if bits == 32 else 8192) // block_d)
    num_stages = 3
    if is_quantised(cache_dtype) and block_m in (2, 4, 8):
        # 8 rows take as many instructions as 4, and a few registers less: with 4 some builds spill. So do some with 8,
        # where the compiler makes do with the 128 registers of a fourth program on an SM; with 16 it settles for three.
        block_m = 16 if bits == 8 and head_dim in (80, 96, 112, 256) and device_class == "sm_90" else 8
    if row_bytes % 16:
        # Rows that are copied in smaller pieces take more registers, and padded ones more memory: fewer keys, but more
        # tiles ahead.
        block_n = min(64, block_n)
        if bits == 4:
            num_stages = 7
    elif bits == 4 and head_dim == 160 and device_class != "sm_90":
        block_n, num_stages = 32, 5  # likewise: its rows are padded to 128 bytes, and shared memory is smaller here
    if is_quantised(cache_dtype) and q_dtype == torch.float32:
        # Operands in two parts take more registers: half as many keys, twice as many tiles ahead.
        block_n, num_stages = block_n // 2, 2 * num_stages - 1
    return Tile(
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        num_warps=4,
        num_stages=num_stages,
        programs_per_sm=_PROGRAMS_PER_SM[device_class][bits],
    )


TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def is_interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: then the kernels run in numpy, on CPU tensors."""
    return not isinstance(_attend, triton.JITFunction)


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Device class and number of SMs."""
    if is_interpreted():
        return "sm_90", 4
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    device_class = "sm_80" if capability == (8, 0) else "sm_90" if capability in ((9, 0), (10, 0)) else "sm_86"
    return device_class, properties.multi_processor_count


def _stride_unit(*tensors: torch.Tensor) -> int:
    """The largest power of two of elements, at most 16 bytes, that divides every row's address and stride."""
    unit = 16 // tensors[0].element_size()
    for x in tensors:
        for stride in x.stride()[:-1]:
            unit = math.gcd(unit, stride)
        unit = math.gcd(unit, x.data_ptr() // x.element_size())
    return unit


@torch.library.custom_op("headfold::gqa_decode", mutates_args=())
def gqa_decode_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    seq_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernels on arguments that `gqa_decode` has checked; returns output and LSE."""
    shape = decode_shape(q, k_cache, block_table, k_scale)
    if max(q.stride()) * shape.num_heads >= 2**31:
        q = q.contiguous()  # the last token of a very long prompt: 32-bit offsets would not reach
    if window is not None:
        window = min(window, max(shape.capacity, 1))  # fits 32 bits, as the kernel counts keys
    device_class, num_sms = _device(q.device)
    tile = tile_for(device_class, shape.head_dim, shape.group_size, q.dtype, shape.cache_dtype)
    programs = shape.num_key_value_heads * triton.cdiv(shape.group_size, tile.block_m)
    programs_at_once = num_sms * tile.programs_per_sm
    if num_splits is None:
        # Room for two waves of programs; how many are used is decided on the device.
        grid_splits = triton.cdiv(2 * programs_at_once, max(shape.batch_size * programs, 1))
        longest = shape.capacity if window is None else min(shape.capacity, window + tile.block_n)
        grid_splits = max(min(grid_splits, triton.cdiv(longest, tile.block_n), MAX_NUM_SPLITS), 1)
    else:
        grid_splits = num_splits

    operand = dot_dtype(q.dtype, shape.cache_dtype)
    out_dtype = q.dtype
    if is_interpreted() and q.dtype == torch.bfloat16:
        # The interpreter multiplies bfloat16 as bit patterns, and truncates when it rounds to it.
        out_dtype = torch.float32
        operand = torch.float32 if operand == torch.bfloat16 else operand
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if shape.batch_size == 0:
        return out.to(q.dtype), lse
    partial = partial_lse = splits_used = None
    if grid_splits > 1:
        partial = torch.empty((*q.shape[:2], grid_splits, shape.head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((*q.shape[:2], grid_splits), dtype=torch.float32, device=q.device)
        splits_used = torch.empty(shape.batch_size, dtype=torch.int32, device=q.device)

    unit = _stride_unit(k_cache, v_cache)
    scale_strides: list[int] = []
    for scale in (k_scale, v_scale):
        scale_strides += (0, 0, 0) if scale is None or scale.dim() == 2 else scale.stride()
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        _attend[(shape.batch_size, programs, grid_splits)](
            q,
            k_cache,
            v_cache,
            k_scale.contiguous() if k_scale is not None and shape.key_scales == "channel" else k_scale,
            v_scale,
            seq_lens.contiguous(),
            None if seq_starts is None else seq_starts.contiguous(),
            block_table,
            None if sinks is None else sinks.contiguous(),
            out,
            lse,
            partial,
            partial_lse,
            splits_used,
            softmax_scale,
            softcap,
            window,
            shape.capacity,
            shape.batch_size,
            num_splits or 0,
            programs_at_once,
            *q.stride()[:2],
            *(stride // unit for stride in k_cache.stride()[:3]),
            *(stride // unit for stride in v_cache.stride()[:3]),
            *scale_strides,
            0 if block_table is None else block_table.stride(0),
            HEAD_DIM=shape.head_dim,
            GROUP_SIZE=shape.group_size,
            PAGE_SIZE=shape.page_size or 1,
            STRIDE_UNIT=unit,
            SAME_STRIDES=k_cache.stride() == v_cache.stride(),
            IS_QUANTISED=is_quantised(shape.cache_dtype),
            IS_INT4=shape.cache_dtype == "int4",
            K_SCALE_PER_CHANNEL=shape.key_scales == "channel",
            DOT_DTYPE=TRITON_DTYPES[operand],
            USE_PTX=not is_interpreted() and torch.version.hip is None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=tile.block_d,
            MAX_SPLITS=1 if grid_splits == 1 else 16 if grid_splits <= 16 else MAX_NUM_SPLITS,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if grid_splits > 1:
            _combine[(shape.batch_size, shape.num_heads)](
                partial,
                partial_lse,
                splits_used,
                None if sinks is None else sinks.contiguous(),
                out,
                lse,
                grid_splits,
                HEAD_DIM=shape.head_dim,
                BLOCK_D=triton.next_power_of_2(shape.head_dim),
                BLOCK_SPLITS=16,
            )
    return out.to(q.dtype), lse


@gqa_decode_triton.register_fake
def _(q, *_args, **_options):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)
