"""`kv_append` in Triton. Importing this module needs Triton.

Shape letters: B sequences, T new tokens, S slots, G KV heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import CACHE_DTYPE_OF_STORAGE
from .quantise import QUANTISED_MAX

# Added to a float32 of magnitude below 2^22 and taken off again, it rounds to the nearest integer, ties to even.
_ROUND = tl.constexpr(12582912.0)

_PLAIN_INTEGERS = [
    "num_tokens",
    "table_stride",
    *(f"{x}_stride_{axis}" for x in ("key", "value") for axis in ("b", "t", "g")),
    *(f"{x}_stride_{axis}" for x in ("k", "v", "k_scale", "v_scale") for axis in ("row", "slot", "head")),
]


@triton.jit
def _store_row(
    source_ptr,
    cache_ptr,
    scale_ptr,  # where the token's scale goes, or with SCALE_GIVEN those of the head's channels; None: not quantised
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE_GIVEN: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_INT4: tl.constexpr,
):
    """One row of D elements, quantised if there is a scale."""
    if IS_INT4:
        # Elements j and j + D/2 go into byte j.
        j = tl.arange(0, BLOCK_D)
        mask = j < HEAD_DIM // 2
        low = tl.load(source_ptr + j, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source_ptr + HEAD_DIM // 2 + j, mask=mask, other=0.0).to(tl.float32)
        if SCALE_GIVEN:
            low_scale = tl.load(scale_ptr + j, mask=mask, other=0.0)
            high_scale = tl.load(scale_ptr + HEAD_DIM // 2 + j, mask=mask, other=0.0)
        else:
            low_scale = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)) / LIMIT
            high_scale = low_scale
            tl.store(scale_ptr, low_scale)
        byte = _quantise(low, low_scale, LIMIT, True) + 8 + (_quantise(high, high_scale, LIMIT, True) + 8) * 16
        tl.store(cache_ptr + j, byte.to(tl.int32).to(tl.uint8), mask=mask)
    else:
        d = tl.arange(0, BLOCK_D)
        mask = d < HEAD_DIM
        x = tl.load(source_ptr + d, mask=mask, other=0.0)
        if scale_ptr is not None:
            x = x.to(tl.float32)
            if SCALE_GIVEN:
                scale = tl.load(scale_ptr + d, mask=mask, other=0.0)
            else:
                scale = tl.max(tl.abs(x), 0) / LIMIT
                tl.store(scale_ptr, scale)
            x = _quantise(x, scale, LIMIT, IS_INTEGER)
        tl.store(cache_ptr + d, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantise(x, scale, LIMIT: tl.constexpr, IS_INTEGER: tl.constexpr):
    """x / scale, cut at the largest value, an integer if asked; 0 where the scale is 0."""
    x = tl.where(scale > 0, tl.div_rn(x, tl.where(scale > 0, scale, 1.0)), 0.0)
    x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return (x + _ROUND) - _ROUND if IS_INTEGER else x


@triton.jit(do_not_specialize=_PLAIN_INTEGERS)
def _append(
    key_ptr,  # (B, T, G, D)
    value_ptr,
    k_ptr,  # (B, S, G, D) or (num_pages, page_size, G, D); int4: D / 2 bytes
    v_ptr,
    k_scale_ptr,  # per token, per channel, or None
    v_scale_ptr,
    positions_ptr,  # (B)
    block_table_ptr,  # (B, max_pages), or None: contiguous
    num_tokens: tl.int32,
    key_stride_b: tl.int64,
    key_stride_t: tl.int64,
    key_stride_g: tl.int64,
    value_stride_b: tl.int64,
    value_stride_t: tl.int64,
    value_stride_g: tl.int64,
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
    table_stride: tl.int32,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_SCALE_PER_CHANNEL: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_INT4: tl.constexpr,
):
    """One program per new token and KV head."""
    b = (tl.program_id(0) // num_tokens).to(tl.int64)
    t = (tl.program_id(0) % num_tokens).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    first = tl.load(positions_ptr + b)
    if first < 0:
        return
    slot = first + t
    row = b
    if block_table_ptr is not None:
        row = tl.load(block_table_ptr + row * table_stride + slot // PAGE_SIZE).to(tl.int64)
        slot = slot % PAGE_SIZE
    if k_scale_ptr is not None:
        if K_SCALE_PER_CHANNEL:
            k_scale_ptr += g * HEAD_DIM
        else:
            k_scale_ptr += row * k_scale_stride_row + slot * k_scale_stride_slot + g * k_scale_stride_head
        v_scale_ptr += row * v_scale_stride_row + slot * v_scale_stride_slot + g * v_scale_stride_head
    _store_row(
        key_ptr + b * key_stride_b + t * key_stride_t + g * key_stride_g,
        k_ptr + row * k_stride_row + slot * k_stride_slot + g * k_stride_head,
        k_scale_ptr,
        HEAD_DIM,
        BLOCK_D,
        K_SCALE_PER_CHANNEL,
        LIMIT,
        IS_INTEGER,
        IS_INT4,
    )
    _store_row(
        value_ptr + b * value_stride_b + t * value_stride_t + g * value_stride_g,
        v_ptr + row * v_stride_row + slot * v_stride_slot + g * v_stride_head,
        v_scale_ptr,
        HEAD_DIM,
        BLOCK_D,
        False,
        LIMIT,
        IS_INTEGER,
        IS_INT4,
    )


@torch.library.custom_op("headfold::kv_append", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"))
def kv_append_triton(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Runs the kernel on arguments that `kv_append` has checked."""
    batch_size, num_tokens, num_heads, head_dim = key.shape
    if key.numel() == 0:
        return
    cache_dtype = CACHE_DTYPE_OF_STORAGE[k_cache.dtype]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    per_channel = k_scale is not None and k_scale.dim() == 2
    scale_strides: list[int] = []
    for scale in (k_scale, v_scale):
        scale_strides += (0, 0, 0) if scale is None or scale.dim() == 2 else scale.stride()
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(key):
        _append[(batch_size * num_tokens, num_heads)](
            key,
            value,
            k_cache,
            v_cache,
            k_scale.contiguous() if k_scale is not None and per_channel else k_scale,
            v_scale,
            positions.contiguous(),
            block_table,
            num_tokens,
            *key.stride()[:3],
            *value.stride()[:3],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *scale_strides,
            0 if block_table is None else block_table.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim // 2 if cache_dtype == "int4" else head_dim),
            PAGE_SIZE=1 if block_table is None else k_cache.shape[1],
            K_SCALE_PER_CHANNEL=per_channel,
            LIMIT=QUANTISED_MAX.get(cache_dtype, 1.0),
            IS_INTEGER=cache_dtype.startswith("int"),
            IS_INT4=cache_dtype == "int4",
            num_warps=1,
        )
