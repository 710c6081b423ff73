"""The arguments of `gqa_decode`, checked once for every path that serves it.

Shape letters: B sequences, S slots, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .dtypes import KeyScales, is_quantised
from .errors import KernelError
from .quantise import QUANTISED_MAX, storage_dtype, stored_head_dim

MAX_NUM_SPLITS = 128
_Q_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPE_OF_STORAGE = {storage_dtype(name): name for name in ("float32", "float16", "bfloat16", *QUANTISED_MAX)}


@dataclass(frozen=True)
class DecodeShape:
    """What shapes and dtypes say of a call."""

    batch_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    cache_dtype: str
    key_scales: KeyScales | None
    page_size: int | None  # None: contiguous
    capacity: int  # tokens that a sequence can have at most

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_key_value_heads


def decode_shape(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None, k_scale: torch.Tensor | None
) -> DecodeShape:
    """The shape of a call whose arguments have been checked."""
    num_slots, num_key_value_heads = k_cache.shape[1:3]
    return DecodeShape(
        batch_size=q.shape[0],
        num_heads=q.shape[1],
        num_key_value_heads=num_key_value_heads,
        head_dim=q.shape[2],
        cache_dtype=CACHE_DTYPE_OF_STORAGE[k_cache.dtype],
        key_scales=None if k_scale is None else "channel" if k_scale.dim() == 2 else "token",
        page_size=None if block_table is None else num_slots,
        capacity=num_slots if block_table is None else num_slots * block_table.shape[1],
    )


def refuse(name: str, expected: str, found: object) -> NoReturn:
    """Refuses an argument by its name."""
    raise KernelError(f"{name} must be {expected}, found {found}")


def check_tensor(
    name: str,
    x: Any,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Refuses what is not a tensor of this shape (a name stands for any size), dtype and device."""
    if not isinstance(x, torch.Tensor):
        refuse(name, "a tensor", type(x).__name__)
    if x.dim() != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, x.shape, strict=True)):
        refuse(name, f"of shape ({', '.join(map(str, shape))})", tuple(x.shape))
    if x.dtype not in dtypes:
        refuse(name, " or ".join(map(str, dtypes)), x.dtype)
    if device is not None and x.device != device:
        refuse(name, f"on {device}, like the others", x.device)


def check_last_axis(name: str, x: torch.Tensor | None) -> None:
    """Refuses a tensor whose last axis the kernels could not walk along one by one."""
    if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
        refuse(name, "contiguous along its last axis", f"stride {x.stride(-1)}")


def check_cache_dtype(cache_dtype: str, device: torch.device) -> None:
    """Refuses a cache dtype that the device cannot convert from."""
    if cache_dtype == "float8_e4m3fn" and device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise KernelError(
                f"float8_e4m3fn needs compute capability 8.9 or later, {torch.cuda.get_device_name(device)} has "
                f"{major}.{minor}: use int8 or float8_e5m2"
            )


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
    check_tensor("q", q, ("B", "H", "D"), _Q_DTYPES)
    layout = ("B", "S", "G", "D") if block_table is None else ("num_pages", "page_size", "G", "D")
    check_tensor("k_cache", k_cache, layout, tuple(CACHE_DTYPE_OF_STORAGE), q.device)
    if block_table is not None:
        check_tensor("block_table", block_table, (q.shape[0], "max_pages"), (torch.int32,), q.device)
    shape = decode_shape(q, k_cache, block_table, None)
    quantised = is_quantised(shape.cache_dtype)
    if not quantised and k_cache.dtype != q.dtype:
        refuse("k_cache", f"of q's dtype {q.dtype}, or quantised", k_cache.dtype)
    width = stored_head_dim(shape.cache_dtype, shape.head_dim)
    rows = "num_pages" if block_table is not None else shape.batch_size
    check_tensor("k_cache", k_cache, (rows, *layout[1:3], width), (k_cache.dtype,))
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), q.device)
    check_cache_dtype(shape.cache_dtype, q.device)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        check_last_axis(name, x)
    if shape.num_key_value_heads < 1 or shape.num_heads % shape.num_key_value_heads or shape.num_heads < 1:
        refuse("k_cache", f"of a number of KV heads that divides q's {shape.num_heads}", shape.num_key_value_heads)
    if shape.head_dim < 1:
        refuse("q", "of a head_dim of at least 1", 0)
    if k_cache.shape[1] < 1 and block_table is not None:
        refuse("k_cache", "of a page_size of at least 1", 0)

    check_tensor("seq_lens", seq_lens, (shape.batch_size,), (torch.int32,), q.device)
    if seq_starts is not None:
        check_tensor("seq_starts", seq_starts, (shape.batch_size,), (torch.int32,), q.device)
    if sinks is not None:
        check_tensor("sinks", sinks, (shape.num_heads,), _Q_DTYPES, q.device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if shape.cache_dtype.startswith("int"):
                refuse(name, f"given for a cache of {shape.cache_dtype}", None)
        elif not quantised:
            refuse(name, f"None for a cache of {shape.cache_dtype}", "one")
        elif name == "k_scale" and isinstance(scale, torch.Tensor) and scale.dim() == 2:
            check_tensor(name, scale, (shape.num_key_value_heads, shape.head_dim), (torch.float32,), q.device)
        else:
            check_tensor(name, scale, tuple(k_cache.shape[:3]), (torch.float32,), q.device)

    if window is not None and not (isinstance(window, int) and window >= 1):
        refuse("window", "an integer of at least 1", window)
    if softcap is not None and not (isinstance(softcap, float | int) and math.isfinite(softcap) and softcap > 0):
        refuse("softcap", "a positive and finite number", softcap)
    if softmax_scale is not None and not (isinstance(softmax_scale, float | int) and math.isfinite(softmax_scale)):
        refuse("softmax_scale", "a finite number", softmax_scale)
    if num_splits is not None and not (isinstance(num_splits, int) and 1 <= num_splits <= MAX_NUM_SPLITS):
        refuse("num_splits", f"an integer from 1 to {MAX_NUM_SPLITS}", num_splits)
    return decode_shape(q, k_cache, block_table, k_scale)
