"""Which path serves a call: Triton kernels, scaled_dot_product_attention or the reference; and transformers' door.

Shape letters: B sequences, T query tokens, S slots, N keys, H query heads, G KV heads, M query heads per KV head,
D head_dim.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .arguments import check_decode_arguments, refuse
from .errors import KernelError
from .reference import gqa_decode_reference

ATTN_IMPLEMENTATION = "headfold"
MAX_HEAD_DIM = 256  # that the kernels hold in registers
MAX_SLOT_STRIDE = 2**24  # that the kernels reach across a tile of 128 keys with offsets of 32 bits

_WORTH_PACKING = 2048  # elements of K: reading fewer once per query head takes less time than packing the group

# Arguments with which some models change what attention means.
_NOT_HONOURED = frozenset({"output_attentions", "head_mask", "indices", "block_indices", "sinks"})

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton looks at this when it is imported, once for all.
_IS_INTERPRETED = _HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device_type: str) -> bool:
    """Whether `gqa_decode` runs its Triton kernels on such a device: GPUs, and with TRITON_INTERPRET=1 the CPU."""
    return (_HAS_TRITON and device_type == "cuda") or (_IS_INTERPRETED and device_type == "cpu")


def gqa_decode(
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
    """Attention of one query token per sequence over its cached keys. MHA, GQA and MQA alike; K and V are not expanded.

    q: (B, H, D) float16, bfloat16 or float32, with H a multiple of the G KV heads; query heads of one group are
        neighbours.
    k_cache, v_cache: (B, S, G, D), or with `block_table` pages (num_pages, page_size, G, D). Of q's dtype, or
        float8_e4m3fn, float8_e5m2, int8, or int4 packed into uint8 (..., D/2) with elements j and j + D/2 in byte j.
        Any strides, except that the last axis is contiguous; for the kernels slots are at most 2^24 elements apart.
    seq_lens: (B) int32 on q's device: keys of each sequence, the current token's included.
    seq_starts: (B) int32: keys before it are not attended to (left padding). Default 0.
    block_table: (B, max_pages) int32: page of each run of page_size tokens. Entries that no key needs may hold
        anything.
    softmax_scale: default 1 / sqrt(D).
    window: only the last `window` keys count, the current one included.
    softcap: logits x become softcap * tanh(x / softcap).
    sinks: (H): one more logit per query head in the softmax, with no value.
    k_scale, v_scale: float32 per token and KV head, (B, S, G) or (num_pages, page_size, G); K's may instead be one per
        channel, (G, D). Needed by int8 and int4, possible with float8.
    num_splits: into how many parts the keys of each sequence are split, 1 to 128. Then a sequence's result does not
        depend on the rest of the batch. By default it is chosen on the device from all lengths.

    Returns (B, H, D) in q's dtype; with `return_lse` also the natural logarithm of the softmax's denominator, sink
    included, (B, H) float32. A sequence without keys gives zeros and -inf. Slots past a sequence's end are not read.

    On devices without Triton the call goes to scaled_dot_product_attention with the group packed as query rows where
    that can express it, else to `gqa_decode_reference`; there a length beyond the cache is refused, on a GPU it is cut.

    Raises KernelError that names the argument, what it must be and what was found, before anything is launched.
    """
    options: dict[str, Any] = {
        "seq_starts": seq_starts,
        "block_table": block_table,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "num_splits": num_splits,
    }
    shape = check_decode_arguments(q, k_cache, v_cache, seq_lens, softmax_scale=softmax_scale, **options)
    if softmax_scale is None:
        softmax_scale = shape.head_dim**-0.5
    if runs_triton(q.device.type):
        from .decode import gqa_decode_triton

        if shape.head_dim > MAX_HEAD_DIM:
            refuse("q", f"of a head_dim of at most {MAX_HEAD_DIM}", shape.head_dim)
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if x.stride(1) > MAX_SLOT_STRIDE:
                refuse(name, f"of slots at most {MAX_SLOT_STRIDE} elements apart", x.stride(1))
        out, lse = gqa_decode_triton(q, k_cache, v_cache, seq_lens, softmax_scale, **options)
        return (out, lse) if return_lse else out
    if shape.cache_dtype == str(q.dtype).removeprefix("torch.") and not (
        block_table is not None or softcap is not None or sinks is not None or return_lse
    ):
        ends = seq_lens.tolist()
        starts = [0] * len(ends) if seq_starts is None else seq_starts.tolist()
        if max(ends, default=0) > shape.capacity:
            refuse("seq_lens", f"at most the {shape.capacity} slots of the cache", max(ends))
        return _attend_sdpa(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), starts, ends, window, softmax_scale)
    return gqa_decode_reference(
        q, k_cache, v_cache, seq_lens, softmax_scale=softmax_scale, return_lse=return_lse, **options
    )


def _attend_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    window: int | None,
    softmax_scale: float | None,
) -> torch.Tensor:
    """q (B, H, D), k and v (B, G, N, D): the group's heads are SDPA's query rows. Returns (B, H, D).

    Keys are cut out, never masked: what lies in unused slots may be NaN.
    """
    batch_size, num_heads, head_dim = q.shape
    q_bgmd = q.reshape(batch_size, k.shape[1], num_heads // k.shape[1], head_dim)
    if window is not None:
        starts = [max(start, end - window) for start, end in zip(starts, ends, strict=True)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, end: int) -> torch.Tensor:
        start = max(start, 0)
        if start >= end:
            return torch.zeros_like(q)
        if end - start < k.shape[2]:  # slicing takes as long as a short sequence's attention
            k, v = k[:, :, start:end], v[:, :, start:end]
        return scaled_dot_product_attention(q, k, v, scale=softmax_scale)

    if batch_size and starts.count(starts[0]) == ends.count(ends[0]) == batch_size:
        out = attend(q_bgmd, k, v, starts[0], ends[0])
    else:
        rows = (slice(b, b + 1) for b in range(batch_size))
        parts = [attend(q_bgmd[b], k[b], v[b], *span) for b, *span in zip(rows, starts, ends, strict=True)]
        out = torch.cat(parts) if parts else torch.zeros_like(q_bgmd)
    return out.reshape(q.shape)


def register_attention() -> None:
    """Makes attn_implementation="headfold" known to transformers. Calling it again changes nothing.

    Both tables are filled: without the mask's, a model would get no mask, and attend to padding and to the unfilled
    slots of a static cache without a word.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTN_IMPLEMENTATION, headfold_attention)
    AttentionMaskInterface.register(ATTN_IMPLEMENTATION, headfold_mask)


@functools.cache
def _computes_own_attention(config_class: type) -> bool:
    """Whether the modelling code of a config has attention of its own, which no registered implementation reaches."""
    name = config_class.__module__
    modelling = sys.modules.get(name.replace("configuration_", "modeling_"))
    modules = [modelling] if modelling else [m for n, m in sys.modules.items() if n.startswith(name.rpartition(".")[0])]
    return not any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules)


def headfold_mask(*, q_length: int, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers hands to `headfold_attention`, for transformers.AttentionMaskInterface.

    For several query tokens it is the one of "sdpa". For one it is the span of keys that each row attends to, first
    and end, (B, 1, 1, 2) int32, worked out once for all layers, or None for all keys: padding on the left, a window
    and the unfilled slots of a static cache all leave one span. Where they do not (holes), it is the boolean mask, and
    the step goes to SDPA.

    Raises KernelError for models with attention code of their own (ALiBi in Bloom, MPT and Falcon): it would read
    neither.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if config is not None and _computes_own_attention(type(config)):  # type: ignore[arg-type]
        raise KernelError(
            f"{config.model_type} computes attention with code of its own, which attn_implementation="
            f'"{ATTN_IMPLEMENTATION}" does not reach: load it with "eager"'
        )
    padding, q_offset = kwargs.get("attention_mask"), kwargs.get("q_offset", 0)
    if q_length != 1 or is_tracing(q_offset if padding is None else padding):
        return sdpa_mask(q_length=q_length, config=config, **kwargs)

    kv_length, kv_offset = kwargs["kv_length"], kwargs.get("kv_offset", 0)
    is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if is_causal and not (isinstance(q_offset, torch.Tensor) and q_offset.device.type != "cpu"):
        # The padding says it all: the keys up to the token's own.
        end = int(q_offset) + 1 - kv_offset
        allowed_bn = None if padding is None else padding[:, kv_offset : kv_offset + end].bool()
        if allowed_bn is None or bool(allowed_bn.all()):
            end = end if allowed_bn is None else allowed_bn.shape[1]
            if end == kv_length and kwargs.get("allow_is_causal_skip", True):
                return None
            size = kwargs["batch_size"]
            return _spans([0] * size, [end] * size, kwargs.get("device"))
        if not runs_triton(allowed_bn.device.type) and bool((allowed_bn[:, :-1] <= allowed_bn[:, 1:]).all()):
            # Padding on the left only, for a step that goes to SDPA: what `_common_span` would make is at hand.
            end = allowed_bn.shape[1]
            starts = [end - count for count in allowed_bn.sum(dim=1).tolist()]
            spans = _spans(starts, [end] * len(starts), allowed_bn.device)
            spans.__dict__["common_spans"] = {None: (0, end, allowed_bn[:, None, None, :])}
            return spans
        mask = None
    else:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(q_length=q_length, config=config, **kwargs)
        assert mask is not None
        if mask.shape[1] != 1:
            return mask
        allowed_bn = mask[:, 0, 0]
    allowed_bn = allowed_bn.to(torch.int32)
    count = allowed_bn.sum(dim=1)
    start = allowed_bn.argmax(dim=1)
    end = torch.where(count > 0, allowed_bn.shape[1] - allowed_bn.flip(1).argmax(dim=1), start)
    if bool((end - start == count).all()):
        # Laid out as in `_spans`.
        return torch.stack([start, end]).to(torch.int32).t()[:, None, None, :]
    if mask is None:
        kwargs["allow_is_causal_skip"] = False
        mask = sdpa_mask(q_length=q_length, config=config, **kwargs)
    return mask


def _spans(starts: list[int], ends: list[int], device: torch.device | None) -> torch.Tensor:
    """(B, 1, 1, 2) int32; starts and ends each contiguous in memory: the kernels read them as they are."""
    return torch.tensor([starts, ends], dtype=torch.int32, device=device).t()[:, None, None, :]


def _is_spans(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int32


def spans_to_mask(spans: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Spans (B, 1, 1, 2) as the boolean mask (B, 1, 1, N)."""
    n = torch.arange(num_keys, device=spans.device)
    return (n >= spans[..., :1]) & (n < spans[..., 1:])


def _common_span(spans: torch.Tensor, window: int | None) -> tuple[int, int, torch.Tensor | None]:
    """The keys that any row attends to, first and end; and where rows differ the mask of these (B, 1, 1, end - first).

    Worked out once for all layers, which are handed the same tensor, and kept with it: it takes longer than a short
    sequence's attention.
    """
    known = spans.__dict__.setdefault("common_spans", {})
    if window not in known:
        starts, ends = spans[:, 0, 0].t().tolist()
        if window is not None:
            starts = [max(start, end - window) for start, end in zip(starts, ends, strict=True)]
        first, end = max(min(starts, default=0), 0), max(ends, default=0)
        mask = None
        if starts.count(first) != len(starts) or ends.count(end) != len(ends):
            mask = spans_to_mask(_spans(starts, ends, spans.device) - first, end - first)
        known[window] = first, end, mask
    return known[window]


def _step_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor | None,
    window: int | None,
    softmax_scale: float | None,
) -> torch.Tensor:
    """query (B, H, 1, D), key and value (B, G, N, D): the group's heads are SDPA's query rows. Returns (B, 1, H, D).

    What `gqa_decode` would do, without its checks and with padding masked, not cut out: each would take longer than a
    short sequence's attention.
    """
    batch_size, num_heads, _, head_dim = query.shape
    _, num_kv_heads, num_keys, _ = key.shape
    mask = None
    if spans is not None or (window is not None and window < num_keys):
        if spans is None:
            assert window is not None
            first, end = num_keys - window, num_keys
        else:
            first, end, mask = _common_span(spans, window)
        if end - first < num_keys:
            key, value = key[:, :, first:end], value[:, :, first:end]
    if mask is None and key.numel() < _WORTH_PACKING:
        return scaled_dot_product_attention(query, key, value, scale=softmax_scale, enable_gqa=True).transpose(1, 2)
    if num_kv_heads != num_heads:
        query = query.reshape(batch_size, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale)
    return out.reshape(batch_size, 1, num_heads, value.shape[-1])


def headfold_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers.AttentionInterface: query (B, H, T, D), key and value (B, G, N, D) not expanded.

    One query token goes to `gqa_decode`, several to scaled_dot_product_attention as transformers' own "sdpa" calls it,
    or where that has no argument for what is asked (softcap, sinks) to plain torch. Returns (B, T, H, D) and None.
    Raises KernelError for what cannot be honoured.
    """
    for name in _NOT_HONOURED.intersection(kwargs):
        if kwargs[name] is not None and kwargs[name] is not False:
            raise KernelError(
                f'attn_implementation="{ATTN_IMPLEMENTATION}" cannot honour {name}: load the model with "eager"'
            )
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:
        raise KernelError(
            f'attn_implementation="{ATTN_IMPLEMENTATION}" needs a mask for packed rows, cu_seq_lens_q is not one'
        )

    plain = dropout == 0 and position_bias is None
    is_step = query.shape[2] == 1 and plain and (attention_mask is None or _is_spans(attention_mask))
    is_sdpa = softcap is None and s_aux is None  # for these it has no arguments
    if is_step and is_sdpa and isinstance(key, torch.Tensor) and not runs_triton(key.device.type):
        return _step_sdpa(query, key, value, attention_mask, sliding_window, scaling), None
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux, "window": sliding_window}
    if not isinstance(key, torch.Tensor):  # a view of one of our caches, see cache.py
        if not is_step:
            raise KernelError("this cache takes one query token at a time, and rows padded on the left only")
        return key.attend(query[:, :, 0], attention_mask, **options)[:, None], None

    if is_step and query.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM:
        k_cache, v_cache = key.transpose(1, 2), value.transpose(1, 2)
        if attention_mask is None:
            first, end = None, torch.full(query.shape[:1], key.shape[2], dtype=torch.int32, device=query.device)
        else:
            first, end = attention_mask[:, 0, 0, 0], attention_mask[:, 0, 0, 1]
        out = gqa_decode(query[:, :, 0], k_cache, v_cache, end, seq_starts=first, **options)
        assert isinstance(out, torch.Tensor)  # no log-sum-exp was asked for
        return out[:, None], None

    if attention_mask is not None and _is_spans(attention_mask):
        attention_mask = spans_to_mask(attention_mask, key.shape[2])
    if attention_mask is None and sliding_window is not None and sliding_window < key.shape[2]:
        raise KernelError(f"a sliding window of {sliding_window} over {key.shape[2]} keys needs a mask, found None")
    if is_sdpa:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
        )
    if not plain:
        raise KernelError("softcap and sinks cannot be combined with dropout or a position bias: use eager")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return _prefill_plain(query, key, value, attention_mask, scaling, softcap, s_aux, is_causal), None


def _prefill_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    is_causal: bool,
    block: int = 512,
) -> torch.Tensor:
    """Attention with a cap or sinks in plain torch, `block` query tokens at a time; K and V are not expanded."""
    batch_size, num_heads, num_tokens, head_dim = query.shape
    group_size = num_heads // key.shape[1]
    if mask is None and is_causal and num_tokens > 1:
        # As in transformers' sdpa: queries and keys start together, what follows is unfilled.
        key, value = key[:, :, :num_tokens], value[:, :, :num_tokens]
        mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
    out = query.new_empty(batch_size, num_tokens, num_heads, value.shape[-1])
    q_bgmtd = query.unflatten(1, (key.shape[1], group_size))
    for first in range(0, num_tokens, block):
        rows = slice(first, first + block)
        logits = torch.einsum("bgmtd,bgnd->bgmtn", q_bgmtd[:, :, :, rows], key).flatten(1, 2).float()
        logits *= head_dim**-0.5 if scaling is None else scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            part = mask[:, :, rows]
            # The lowest finite number, not -inf: a row of padding that attends to nothing must not become NaN.
            lowest = torch.finfo(logits.dtype).min
            logits = logits.masked_fill(~part, lowest) if part.dtype == torch.bool else logits + part
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            probabilities = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            probabilities = logits.softmax(dim=-1)
        p_bgmtn = probabilities.to(value.dtype).unflatten(1, (key.shape[1], group_size))
        out[:, rows] = torch.einsum("bgmtn,bgnd->btgmd", p_bgmtn, value).flatten(2, 3)
    return out
