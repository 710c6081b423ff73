"""Writing the K and V of new tokens into a cache, quantised on the way: one launch, and no other copy.

Shape letters: B sequences, T new tokens, S slots, G KV heads, D head_dim.
"""

from __future__ import annotations

import torch

from .arguments import CACHE_DTYPE_OF_STORAGE, check_cache_dtype, check_last_axis, check_tensor, refuse
from .attention import runs_triton
from .quantise import QUANTISED_MAX, quantise, stored_head_dim, token_scale


def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes key and value (B, T, G, D) at positions[b], positions[b] + 1, ... of each sequence, in place.

    Caches, block_table and scales as for `gqa_decode`. Scales per token are computed here and written too; a scale of K
    per channel, (G, D), is used as it is, and what exceeds it is cut. positions: (B) int32; a sequence whose position
    is negative is left alone. Positions beyond the cache are the caller's mistake, and not looked for.

    Raises KernelError that names the argument, what it must be and what was found.
    """
    check_tensor("key", key, ("B", "T", "G", "D"), (torch.float32, torch.float16, torch.bfloat16))
    check_tensor("value", value, tuple(key.shape), (key.dtype,), key.device)
    num_heads, head_dim = key.shape[2:]
    check_tensor("k_cache", k_cache, ("B or num_pages", "S", "G", "D"), tuple(CACHE_DTYPE_OF_STORAGE), key.device)
    cache_dtype = CACHE_DTYPE_OF_STORAGE[k_cache.dtype]
    quantised = cache_dtype in QUANTISED_MAX
    if not quantised and k_cache.dtype != key.dtype:
        refuse("k_cache", f"of key's dtype {key.dtype}, or quantised", k_cache.dtype)
    rows = "num_pages" if block_table is not None else key.shape[0]
    shape = (rows, "S", num_heads, stored_head_dim(cache_dtype, head_dim))
    check_tensor("k_cache", k_cache, shape, (k_cache.dtype,))
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), key.device)
    check_tensor("positions", positions, (key.shape[0],), (torch.int32,), key.device)
    if block_table is not None:
        check_tensor("block_table", block_table, (key.shape[0], "max_pages"), (torch.int32,), key.device)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        check_last_axis(name, x)
    check_cache_dtype(cache_dtype, key.device)
    if quantised:
        per_channel = isinstance(k_scale, torch.Tensor) and k_scale.dim() == 2
        per_token = tuple(k_cache.shape[:3])
        k_shape = (num_heads, head_dim) if per_channel else per_token
        check_tensor("k_scale", k_scale, k_shape, (torch.float32,), key.device)
        check_tensor("v_scale", v_scale, per_token, (torch.float32,), key.device)
    elif k_scale is not None or v_scale is not None:
        refuse("k_scale and v_scale", f"None for a cache of {cache_dtype}", "one")

    if runs_triton(key.device.type) and not (key.device.type == "cpu" and cache_dtype.startswith("float8")):
        from .append_kernel import kv_append_triton

        kv_append_triton(k_cache, v_cache, key, value, positions, block_table, k_scale, v_scale)
    else:  # also FP8 in the interpreter, which rounds to it wrongly
        _append_torch(k_cache, v_cache, key, value, positions, block_table, k_scale, v_scale, cache_dtype)


def _append_torch(k_cache, v_cache, key, value, positions, block_table, k_scale, v_scale, cache_dtype: str) -> None:
    active = positions >= 0
    slots = positions[active, None].long() + torch.arange(key.shape[1], device=key.device)
    if block_table is None:
        rows = active.nonzero().expand(-1, key.shape[1])
    else:
        rows = block_table[active].long().gather(1, slots // k_cache.shape[1])
        slots = slots % k_cache.shape[1]
    for cache, scale, new in ((k_cache, k_scale, key[active]), (v_cache, v_scale, value[active])):
        if scale is None:
            cache[rows, slots] = new
        elif scale.dim() == 2:
            cache[rows, slots] = quantise(new, scale, cache_dtype)
        else:
            new_scale = token_scale(new, cache_dtype)
            scale[rows, slots] = new_scale
            cache[rows, slots] = quantise(new, new_scale[..., None], cache_dtype)
