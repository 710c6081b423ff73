"""The arguments of `gqa_decode`, checked once for every path that serves it.

Shape letters: B sequences, S slots, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .errors import KernelError
from .quantise import storage_dtype

MAX_NUM_SPLITS = 128
_CACHE_DTYPE_OF_STORAGE = {
    storage_dtype(name): name
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
}


@dataclass(frozen=True)
class DecodeShape:
    """What `check_decode_arguments` learned about a call, from shapes and dtypes alone."""

    batch_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    cache_dtype: str
    key_scales: Literal["token", "channel"] | None
    page_size: int | None  # None: contiguous
    capacity: int  # tokens that a sequence can have at most
    softmax_scale: float

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_key_value_heads


def _refuse(name: str, expected: str, found: object) -> None:
    raise KernelError(f"gqa_decode: {name} must be {expected}, found {found}")


def _check_tensor(name: str, x: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device) -> None:
    if not isinstance(x, torch.Tensor):
        _refuse(name, "a tensor", type(x).__name__)
    assert isinstance(x, torch.Tensor)
    if tuple(x.shape) != shape:
        _refuse(name, f"of shape {shape}", tuple(x.shape))
    if x.dtype not in dtypes:
        _refuse(name, " or ".join(map(str, dtypes)), x.dtype)
    if x.device != device:
        _refuse(name, f"on {device} like q", x.device)


def check_decode_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> DecodeShape:
    """Checks everything that shapes, dtypes and devices show; reads no tensor's values.

    Raises KernelError that names the argument, what it must be and what was found.
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        _refuse("q", "(B, H, D)", tuple(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        _refuse("q", "float16, bfloat16 or float32", q.dtype)
    batch_size, num_heads, head_dim = q.shape
    if min(q.shape[1:]) < 1:
        _refuse("q", "of at least one head and one channel", tuple(q.shape))

    layout = "(B, S, G, D)" if block_table is None else "(num_pages, page_size, G, D)"
    if not isinstance(k_cache, torch.Tensor) or k_cache.dim() != 4:
        _refuse(
            "k_cache", layout, tuple(k_cache.shape) if isinstance(k_cache, torch.Tensor) else type(k_cache).__name__
        )
    if k_cache.dtype not in _CACHE_DTYPE_OF_STORAGE:
        _refuse("k_cache", "of " + ", ".join(map(str, _CACHE_DTYPE_OF_STORAGE)), k_cache.dtype)
    cache_dtype = _CACHE_DTYPE_OF_STORAGE[k_cache.dtype]
    if cache_dtype in ("float32", "float16", "bfloat16") and k_cache.dtype != q.dtype:
        _refuse("k_cache", f"of q's dtype {q.dtype} or 8 bits and fewer", k_cache.dtype)
    num_rows, num_slots, num_kv_heads, row_width = k_cache.shape
    expected_width = head_dim / 2 if cache_dtype == "int4" else head_dim
    if row_width != expected_width:
        packed = ", two values per byte" if cache_dtype == "int4" else ""
        _refuse("k_cache", f"{layout} with D = {head_dim} like q{packed}", tuple(k_cache.shape))
    if block_table is None and num_rows != batch_size:
        _refuse("k_cache", f"{layout} with B = {batch_size} like q", tuple(k_cache.shape))
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        _refuse("k_cache", f"of a number of KV heads that divides q's {num_heads} heads", num_kv_heads)
    if block_table is not None and num_slots < 1:
        _refuse("k_cache", "of a page_size of at least 1", num_slots)
    _check_tensor("k_cache", k_cache, tuple(k_cache.shape), (k_cache.dtype,), q.device)
    _check_tensor("v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), q.device)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            _refuse(name, "contiguous along its last axis", f"stride {x.stride(-1)}")

    _check_tensor("seq_lens", seq_lens, (batch_size,), (torch.int32,), q.device)
    if seq_starts is not None:
        _check_tensor("seq_starts", seq_starts, (batch_size,), (torch.int32,), q.device)
    capacity = num_slots
    if block_table is not None:
        width = block_table.shape[1] if isinstance(block_table, torch.Tensor) and block_table.dim() == 2 else 0
        _check_tensor("block_table", block_table, (batch_size, width), (torch.int32,), q.device)
        capacity = width * num_slots

    key_scales: Literal["token", "channel"] | None = None
    if cache_dtype in ("float32", "float16", "bfloat16"):
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                _refuse(name, f"None for a {cache_dtype} cache", tuple(scale.shape))
    else:
        per_token = (num_rows, num_slots, num_kv_heads)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is None and cache_dtype.startswith("int"):
                _refuse(name, f"given for an {cache_dtype} cache", None)
        if k_scale is not None:
            key_scales = "channel" if isinstance(k_scale, torch.Tensor) and k_scale.dim() == 2 else "token"
            shape = (num_kv_heads, head_dim) if key_scales == "channel" else per_token
            _check_tensor("k_scale", k_scale, shape, (torch.float32,), q.device)
        if v_scale is not None:
            _check_tensor("v_scale", v_scale, per_token, (torch.float32,), q.device)

    if sinks is not None:
        _check_tensor("sinks", sinks, (num_heads,), (torch.float32, torch.float16, torch.bfloat16), q.device)
    if window is not None and not (isinstance(window, int) and window >= 1):
        _refuse("window", "an integer of at least 1", window)
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        _refuse("softcap", "positive and finite", softcap)
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        _refuse("softmax_scale", "finite", softmax_scale)
    if num_splits is not None and not (isinstance(num_splits, int) and 1 <= num_splits <= MAX_NUM_SPLITS):
        _refuse("num_splits", f"an integer from 1 to {MAX_NUM_SPLITS}", num_splits)

    return DecodeShape(
        batch_size=batch_size,
        num_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        cache_dtype=cache_dtype,
        key_scales=key_scales,
        page_size=None if block_table is None else num_slots,
        capacity=capacity,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
    )
