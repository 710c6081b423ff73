"""The one formula for the memory of a KV cache: plan, eval, the caches themselves and the tests all use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .dtypes import KeyScales, is_quantised, num_bits
from .errors import KernelError

if TYPE_CHECKING:
    import torch

_SCALE_BYTES = 4  # float32


def kv_cache_bytes(
    *,
    num_layers: int,
    num_key_value_heads: int,
    head_dim: int,
    num_tokens: int,
    cache_dtype: str | torch.dtype = "bfloat16",
    num_sequences: int = 1,
    sliding_windows: Sequence[int | None] | None = None,
    value_head_dim: int | None = None,
    key_scales: KeyScales = "token",
    page_size: int | None = None,
) -> int:
    """Bytes that the K and V of `num_sequences` sequences of `num_tokens` tokens each take, scales included.

    Per layer, slot and KV head: head_dim values of K and value_head_dim (default: head_dim) values of V. Quantised
    dtypes (8 bits and fewer) add a float32 scale per slot and KV head for K and for V each; with key_scales="channel"
    K has instead one float32 scale per layer, KV head and channel, shared by all sequences.

    A layer holds num_tokens slots per sequence, or at most its sliding window (one entry of `sliding_windows` per
    layer, in tokens, the current one included; None: full attention), and with `page_size` whole pages of slots.
    Bookkeeping that does not grow with the model (block table, lengths: 4 bytes per page or sequence) is not counted.

    Raises KernelError if a number is out of range.
    """
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    bits = num_bits(cache_dtype)
    for argument, value, least in (
        ("num_layers", num_layers, 0),
        ("num_key_value_heads", num_key_value_heads, 1),
        ("head_dim", head_dim, 1),
        ("value_head_dim", value_head_dim, 1),
        ("num_tokens", num_tokens, 0),
        ("num_sequences", num_sequences, 0),
        ("page_size", 1 if page_size is None else page_size, 1),
    ):
        if value < least:
            raise KernelError(f"{argument} must be at least {least}, found {value}")
    if bits == 4 and (head_dim % 2 or value_head_dim % 2):
        raise KernelError(
            f"int4 packs two values per byte: head_dim must be even, found {head_dim} and {value_head_dim}"
        )
    if key_scales not in ("token", "channel"):
        raise KernelError(f'key_scales must be "token" or "channel", found {key_scales!r}')
    windows = [None] * num_layers if sliding_windows is None else list(sliding_windows)
    if len(windows) != num_layers:
        raise KernelError(f"sliding_windows must have one entry per layer ({num_layers}), found {len(windows)}")

    bytes_per_slot = num_key_value_heads * (head_dim + value_head_dim) * bits // 8
    bytes_per_layer = 0
    if is_quantised(cache_dtype):
        bytes_per_slot += num_key_value_heads * _SCALE_BYTES  # V
        if key_scales == "token":
            bytes_per_slot += num_key_value_heads * _SCALE_BYTES
        else:
            bytes_per_layer = num_key_value_heads * head_dim * _SCALE_BYTES

    total = 0
    for window in windows:
        if window is not None and window < 1:
            raise KernelError(f"a sliding window must be at least 1 token, found {window}")
        num_slots = num_tokens if window is None else min(num_tokens, window)
        if page_size is not None:
            num_slots = -(-num_slots // page_size) * page_size
        total += num_sequences * num_slots * bytes_per_slot + bytes_per_layer
    return total
