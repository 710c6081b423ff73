"""The dtypes that a KV cache can have. Nothing heavy is imported here: plans are made from a config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .errors import KernelError

if TYPE_CHECKING:
    import torch

KeyScales = Literal["token", "channel"]

_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "int4": 4,
}
_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def cache_dtype_name(cache_dtype: str | torch.dtype) -> str:
    """The canonical name of a cache dtype: torch's name, or int4 (two values per byte), which torch does not have.

    Accepts a torch.dtype, torch's name, and fp32, fp16, bf16, fp8 (e4m3), fp8_e4m3, fp8_e5m2. Raises KernelError
    on others.
    """
    name = str(cache_dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _BITS:
        raise KernelError(f"cache_dtype {cache_dtype!r} is not known; known: {', '.join([*_BITS, *_ALIASES])}")
    return name


def num_bits(cache_dtype: str | torch.dtype) -> int:
    """Bits of one stored value."""
    return _BITS[cache_dtype_name(cache_dtype)]


def is_quantised(cache_dtype: str | torch.dtype) -> bool:
    """Whether a cache of this dtype stores float32 scales beside its values."""
    return num_bits(cache_dtype) <= 8
