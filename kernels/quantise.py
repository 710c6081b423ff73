"""Values of 8 and 4 bits with float32 scales: how a cache stores them, and how they are read back.

int8 and int4 are symmetric integers (-127..127, -7..7). int4 packs elements j and j + D/2 into byte j, the first in the
low bits, each as value + 8: a kernel reads two half rows and joins nothing. FP8 is scaled to its largest finite value.

Shape letters: G KV heads, D head_dim; `...` stands for the axes of a cache before them. Scales are kept as (..., G) per
token or (G, D) per channel; the functions below take either in a shape that broadcasts against (..., G, D).
"""

from __future__ import annotations

import torch

from .dtypes import cache_dtype_name
from .errors import KernelError

# The magnitude that the largest element under one scale is stored as.
QUANTISED_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}


def storage_dtype(cache_dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype that holds the values: the dtype itself, uint8 for int4."""
    name = cache_dtype_name(cache_dtype)
    return torch.uint8 if name == "int4" else getattr(torch, name)


def stored_head_dim(cache_dtype: str | torch.dtype, head_dim: int) -> int:
    """Elements of the storage dtype in a row of `head_dim` values. Raises KernelError if int4 meets an odd head_dim."""
    if cache_dtype_name(cache_dtype) != "int4":
        return head_dim
    if head_dim % 2:
        raise KernelError(f"int4 packs two values per byte: head_dim must be even, found {head_dim}")
    return head_dim // 2


def token_scale(x: torch.Tensor, cache_dtype: str | torch.dtype) -> torch.Tensor:
    """One scale per token and KV head: (..., G, D) -> (..., G) float32. A row of zeros has scale 0."""
    return x.float().abs().amax(dim=-1) / QUANTISED_MAX[cache_dtype_name(cache_dtype)]


def channel_scale(x: torch.Tensor, cache_dtype: str | torch.dtype) -> torch.Tensor:
    """One scale per KV head and channel: (..., G, D) -> (G, D) float32, over all tokens of x.

    Keys have a few channels of large magnitude (KIVI, Liu et al. 2024, section 3): a scale per token lets them cost
    all other channels their precision, a scale per channel does not.
    """
    return x.float().abs().flatten(0, -3).amax(dim=0) / QUANTISED_MAX[cache_dtype_name(cache_dtype)]


def quantise(x: torch.Tensor, scale: torch.Tensor, cache_dtype: str | torch.dtype) -> torch.Tensor:
    """Stored values of x (..., G, D): x / scale, rounded to nearest even and cut at the largest value.

    Where the scale is 0 the value is 0. int4 gives (..., G, D/2) uint8.
    """
    name = cache_dtype_name(cache_dtype)
    limit = QUANTISED_MAX[name]
    values = torch.where(scale > 0, x.float() / scale, 0.0).clamp(-limit, limit)
    if name.startswith("float8"):
        return values.to(storage_dtype(name))
    values = values.round()
    if name == "int8":
        return values.to(torch.int8)
    low, high = (values + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def dequantise(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    cache_dtype: str | torch.dtype,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What a cache holds, as (..., G, D) of `dtype`. With scale None the values are taken as they are."""
    if cache_dtype_name(cache_dtype) == "int4":
        values = torch.cat([values & 15, values >> 4], dim=-1).to(torch.int8) - 8
    if scale is None:
        return values.to(dtype)
    return (values.to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)
