"""What decode attention over a KV cache is: plain torch, one function, the judge of all others.

Shape letters: B sequences, S slots, N keys attended, H query heads, G KV heads, M query heads per KV head, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import check_decode_arguments, refuse
from .quantise import dequantise


def gqa_decode_reference(
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
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence over its cached keys, computed in float32; `gqa_decode` tells the rest.

    `num_splits` is accepted, so that the two can be exchanged, and has no effect. Grouped-query attention: Ainslie et
    al. 2023 (arXiv 2305.13245); soft capping: Gemma 2 (arXiv 2408.00118), section 2; sinks: one more logit per head in
    the softmax's denominator (gpt-oss).
    """
    out, lse = decode_in_dtype(
        torch.float32,
        q,
        k_cache,
        v_cache,
        seq_lens,
        seq_starts=seq_starts,
        block_table=block_table,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
    )
    out = out.to(q.dtype)
    return (out, lse.float()) if return_lse else out


def decode_in_dtype(
    dtype: torch.dtype,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with every operation in `dtype`: output (B, H, D) and natural-log LSE (B, H) of that dtype.

    In float64 it is what errors are measured against, in 16 bits the plain implementation that they are compared with.
    """
    shape = check_decode_arguments(
        q,
        k_cache,
        v_cache,
        seq_lens,
        seq_starts=seq_starts,
        block_table=block_table,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
    )
    if softmax_scale is None:
        softmax_scale = shape.head_dim**-0.5
    out = torch.zeros_like(q, dtype=dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    ends = seq_lens.tolist()
    starts = [0] * len(ends) if seq_starts is None else seq_starts.tolist()
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > shape.capacity:
            refuse(f"seq_lens[{b}]", f"at most the {shape.capacity} slots of the cache", end)
        start = max(start, 0, 0 if window is None else end - window)
        if start >= end:
            continue

        rows: Any
        slots: Any
        if block_table is None:
            rows, slots = b, slice(start, end)
        else:
            assert shape.page_size is not None
            positions = torch.arange(start, end, device=q.device)
            rows, slots = block_table[b, positions // shape.page_size].long(), positions % shape.page_size
        k = _read(k_cache, k_scale, rows, slots, shape.cache_dtype, dtype)
        v = _read(v_cache, v_scale, rows, slots, shape.cache_dtype, dtype)

        q_gmd = q[b].to(dtype).view(shape.num_key_value_heads, shape.group_size, shape.head_dim)
        logits = torch.einsum("gmd,ngd->gmn", q_gmd, k) * softmax_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.reshape(shape.num_heads, end - start)
        denominator = logits if sinks is None else torch.cat([logits, sinks.to(dtype)[:, None]], dim=1)
        lse[b] = torch.logsumexp(denominator, dim=1)
        # Not exp(logits - lse): torch's softmax subtracts the maximum, which loses less in 16 bits.
        probabilities = torch.softmax(denominator, dim=1)[:, : end - start]
        p_gmn = probabilities.view(shape.num_key_value_heads, shape.group_size, end - start)
        out[b] = torch.einsum("gmn,ngd->gmd", p_gmn, v).reshape(shape.num_heads, shape.head_dim)
    return out, lse


def _read(cache, scale, rows, slots, cache_dtype: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows of K or V as (N, G, D) of `dtype`."""
    if scale is not None:
        scale = scale if scale.dim() == 2 else scale[rows, slots][..., None]
    return dequantise(cache[rows, slots], scale, cache_dtype, dtype)
