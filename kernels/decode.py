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

from .arguments import MAX_NUM_SPLITS, DecodeShape

# The split cost model, in tiles: what a program costs beside its tiles, and what one more split costs when merging.
PROGRAM_OVERHEAD = tl.constexpr(10.0)
MERGE_OVERHEAD = tl.constexpr(0.2)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))


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
    CHUNK: tl.constexpr = 2048 // MAX_SPLITS  # sequences at a time: (CHUNK, MAX_SPLITS) values live in registers
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
    """Pages of the keys of a tile: one id where a tile lies in one page, else one per key; 0 for keys not attended."""
    if PAGE_SIZE % BLOCK_N == 0:
        first = tile * BLOCK_N
        return tl.load(block_table_ptr + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(block_table_ptr + position // PAGE_SIZE, mask=(position >= start) & (position < end), other=0)


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


@triton.jit
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
    capacity,
    batch_size,
    fixed_splits,  # 0: chosen here
    programs_at_once,
    q_stride_b,
    q_stride_h,
    # In units of STRIDE_UNIT elements, so that the compiler knows how far rows are aligned.
    k_stride_row: tl.int64,
    k_stride_slot: tl.int64,
    k_stride_head: tl.int64,
    v_stride_row: tl.int64,
    v_stride_slot: tl.int64,
    v_stride_head: tl.int64,
    k_scale_stride_row: tl.int64,
    k_scale_stride_slot: tl.int64,
    k_scale_stride_head: tl.int64,
    v_scale_stride_row: tl.int64,
    v_scale_stride_slot: tl.int64,
    v_scale_stride_head: tl.int64,
    table_stride,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    IS_INT4: tl.constexpr,
    K_SCALE_PER_CHANNEL: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_IS_FP16: tl.constexpr,
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

    # Queries. A scale per channel of K goes into them, divided by its maximum so that 16 bits hold the product.
    q_ptrs = q_ptr + b.to(tl.int64) * q_stride_b + h[:, None] * q_stride_h + d[None, :]
    mask_q = mask_m[:, None] & mask_d[None, :]
    q = tl.load(q_ptrs, mask=mask_q, other=0.0)
    logit_scale = softmax_scale
    if IS_INT4:
        q_high = tl.load(q_ptrs + STORED_D, mask=mask_q, other=0.0)
    if K_SCALE_PER_CHANNEL:
        channel_ptrs = k_scale_ptr + g * HEAD_DIM + d
        channel = tl.load(channel_ptrs, mask=mask_d, other=0.0)
        largest = tl.max(channel, 0)
        if IS_INT4:
            channel_high = tl.load(channel_ptrs + STORED_D, mask=mask_d, other=0.0)
            largest = tl.maximum(largest, tl.max(channel_high, 0))
        inverse = tl.where(largest > 0, 1.0 / largest, 0.0)
        q = q.to(tl.float32) * (channel * inverse)[None, :]
        if IS_INT4:
            q_high = q_high.to(tl.float32) * (channel_high * inverse)[None, :]
        logit_scale *= largest
    q = q.to(DOT_DTYPE)
    if IS_INT4:
        q_high = q_high.to(DOT_DTYPE)

    k_ptr += g * k_stride_head * STRIDE_UNIT
    v_ptr += g * v_stride_head * STRIDE_UNIT
    if k_scale_ptr is not None and not K_SCALE_PER_CHANNEL:
        k_scale_ptr += g * k_scale_stride_head
    if v_scale_ptr is not None:
        v_scale_ptr += g * v_scale_stride_head

    if block_table_ptr is not None:
        block_table_ptr += b.to(tl.int64) * table_stride
        page = _page_of(block_table_ptr, first_tile, start, end, PAGE_SIZE, BLOCK_N)

    max_2 = tl.full([BLOCK_M], -_INF, tl.float32)  # running maximum, base 2
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if IS_INT4:
        acc_high = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for tile in range(first_tile, first_tile + num_tiles):
        position = tile * BLOCK_N + n
        mask_n = (position >= start) & (position < end)
        mask_nd = mask_n[:, None] & mask_d[None, :]
        if block_table_ptr is None:
            cache_row = b.to(tl.int64)
            slot = position
        else:
            cache_row = page.to(tl.int64)
            slot = position % PAGE_SIZE
            # Carried one iteration ahead: K and V addresses that wait for a load of their own iteration would leave the
            # software pipeline with one tile in flight, whatever its depth.
            page = _page_of(block_table_ptr, tile + 1, start, end, PAGE_SIZE, BLOCK_N)

        k_offset = (cache_row * k_stride_row + slot * k_stride_slot) * STRIDE_UNIT
        v_offset = (cache_row * v_stride_row + slot * v_stride_slot) * STRIDE_UNIT
        k = tl.load(k_ptr + k_offset[:, None] + d[None, :], mask=mask_nd, other=0.0)
        v = tl.load(v_ptr + v_offset[:, None] + d[None, :], mask=mask_nd, other=0.0)

        if IS_INT4:
            logits = tl.dot(q, tl.trans(((k & 15).to(tl.int8) - 8).to(DOT_DTYPE)), input_precision="ieee")
            logits = tl.dot(q_high, tl.trans(((k >> 4).to(tl.int8) - 8).to(DOT_DTYPE)), logits, input_precision="ieee")
        else:
            logits = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        if k_scale_ptr is not None and not K_SCALE_PER_CHANNEL:
            k_scale_offset = cache_row * k_scale_stride_row + slot * k_scale_stride_slot
            k_scale = tl.load(k_scale_ptr + k_scale_offset, mask=mask_n, other=0.0)
            logits *= k_scale[None, :]
        logits *= logit_scale
        if softcap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which saturates where exp overflows.
            logits = softcap * (1 - 2 / (tl.exp2(logits * (2 * _LOG2_E / softcap)) + 1))
        logits = tl.where(mask_n[None, :], logits * _LOG2_E, -_INF)

        new_max = tl.maximum(max_2, tl.max(logits, 1))
        # With nothing but -inf so far, -inf - -inf would be NaN.
        subtracted = tl.where(new_max == -_INF, 0.0, new_max)
        p = tl.exp2(logits - subtracted[:, None])
        rescale = tl.exp2(max_2 - subtracted)
        max_2 = new_max
        total = total * rescale + tl.sum(p, 1)
        acc *= rescale[:, None]
        if IS_INT4:
            acc_high *= rescale[:, None]

        if v_scale_ptr is not None:
            v_scale_offset = cache_row * v_scale_stride_row + slot * v_scale_stride_slot
            v_scale = tl.load(v_scale_ptr + v_scale_offset, mask=mask_n, other=0.0)
            # float16 does not have the range for the product of a probability and a scale: there V is scaled itself.
            if not DOT_IS_FP16:
                p *= v_scale[None, :]
        p = p.to(DOT_DTYPE)
        if IS_INT4:
            low = (v & 15).to(tl.int8) - 8
            high = (v >> 4).to(tl.int8) - 8
            if DOT_IS_FP16:
                low = low.to(tl.float32) * v_scale[:, None]
                high = high.to(tl.float32) * v_scale[:, None]
            acc = tl.dot(p, low.to(DOT_DTYPE), acc, input_precision="ieee")
            acc_high = tl.dot(p, high.to(DOT_DTYPE), acc_high, input_precision="ieee")
        else:
            if v_scale_ptr is not None and DOT_IS_FP16:
                v = v.to(tl.float32) * v_scale[:, None]
            acc = tl.dot(p, v.to(DOT_DTYPE), acc, input_precision="ieee")

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


@triton.jit
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

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that fit on one SM by registers and shared memory


def tile_for(device_class: str, head_dim: int, cache_dtype: str) -> Tile:
    return Tile(64, 4, 3, 3)


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: then the kernels run in numpy, on CPU tensors."""
    return type(_attend).__name__ == "InterpretedFunction"


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Device class and number of SMs."""
    if is_interpreted():
        return "sm_90", 4
    properties = torch.cuda.get_device_properties(device)
    return "sm_90" if properties.major >= 9 else "sm_80", properties.multi_processor_count


def _stride_unit(*tensors: torch.Tensor) -> int:
    """The largest power of two of elements, at most 16 bytes, that divides every row's address and stride."""
    unit = 16 // tensors[0].element_size()
    for x in tensors:
        for stride in x.stride()[:-1]:
            unit = math.gcd(unit, stride)
        unit = math.gcd(unit, x.data_ptr() // x.element_size())
    return unit


def launch(
    shape: DecodeShape,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None,
    block_table: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernels on checked arguments: output (B, H, D) in q's dtype and LSE (B, H) float32."""
    device_class, num_sms = _device(q.device)
    tile = tile_for(device_class, shape.head_dim, shape.cache_dtype)
    is_int4 = shape.cache_dtype == "int4"
    block_m = min(16, triton.next_power_of_2(shape.group_size))
    programs = shape.num_key_value_heads * triton.cdiv(shape.group_size, block_m)
    programs_at_once = num_sms * tile.programs_per_sm
    grid_splits = num_splits
    if grid_splits is None:
        # Room for two waves of programs; how many are used is decided on the device.
        grid_splits = triton.cdiv(2 * programs_at_once, max(shape.batch_size * programs, 1))
        longest = shape.capacity if window is None else min(shape.capacity, window + tile.block_n)
        grid_splits = max(min(grid_splits, triton.cdiv(longest, tile.block_n), MAX_NUM_SPLITS), 1)
    max_splits = 1 if grid_splits == 1 else 16 if grid_splits <= 16 else MAX_NUM_SPLITS

    # The interpreter multiplies bfloat16 as bit patterns and truncates when it stores it: there it works in float32.
    upcast = is_interpreted() and q.dtype == torch.bfloat16
    dot_dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[q.dtype]
    out = torch.empty(q.shape, dtype=torch.float32 if upcast else q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    partial = partial_lse = splits_used = None
    if grid_splits > 1:
        partial = torch.empty((*q.shape[:2], grid_splits, shape.head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((*q.shape[:2], grid_splits), dtype=torch.float32, device=q.device)
        splits_used = torch.empty(shape.batch_size, dtype=torch.int32, device=q.device)

    unit = _stride_unit(k_cache, v_cache)
    per_channel = shape.key_scales == "channel"
    if per_channel:
        k_scale = k_scale.contiguous()
    block_d = max(16, triton.next_power_of_2(shape.head_dim // 2 if is_int4 else shape.head_dim))
    if shape.batch_size == 0:
        return out.to(q.dtype), lse
    _attend[(shape.batch_size, programs, grid_splits)](
        q,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        seq_lens,
        seq_starts,
        block_table,
        sinks,
        out,
        lse,
        partial,
        partial_lse,
        splits_used,
        shape.softmax_scale,
        softcap,
        window,
        shape.capacity,
        shape.batch_size,
        num_splits or 0,
        programs_at_once,
        *q.stride()[:2],
        *(stride // unit for stride in k_cache.stride()[:3]),
        *(stride // unit for stride in v_cache.stride()[:3]),
        *((0, 0, 0) if k_scale is None or per_channel else k_scale.stride()),
        *((0, 0, 0) if v_scale is None else v_scale.stride()),
        0 if block_table is None else block_table.stride(0),
        HEAD_DIM=shape.head_dim,
        GROUP_SIZE=shape.group_size,
        PAGE_SIZE=shape.page_size or 1,
        STRIDE_UNIT=unit,
        IS_INT4=is_int4,
        K_SCALE_PER_CHANNEL=per_channel,
        DOT_DTYPE=tl.float32 if upcast else dot_dtype,
        DOT_IS_FP16=q.dtype == torch.float16,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        MAX_SPLITS=max_splits,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if grid_splits > 1:
        _combine[(shape.batch_size, shape.num_heads)](
            partial,
            partial_lse,
            splits_used,
            sinks,
            out,
            lse,
            grid_splits,
            HEAD_DIM=shape.head_dim,
            BLOCK_D=triton.next_power_of_2(shape.head_dim),
            BLOCK_SPLITS=min(16, triton.next_power_of_2(grid_splits)),
        )
    return out.to(q.dtype), lse
