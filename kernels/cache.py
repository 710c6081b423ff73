"""KV caches that are allocated once: contiguous, rolling and paged, in any dtype of dtypes.py.

They are transformers caches (`model(..., cache=...)`, `model.generate(..., cache=...)`). A plain contiguous cache hands
out tensors and works with any attention; the others hand a single query token to `gqa_decode` and need a model loaded
with attn_implementation="headfold", which they say if it was not.

Shape letters: B sequences, T new tokens, S slots, N keys, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from .append import kv_append
from .arguments import check_cache_dtype
from .attention import ATTN_IMPLEMENTATION, gqa_decode
from .dtypes import KeyScales, cache_dtype_name, is_quantised
from .errors import KernelError
from .memory import kv_cache_bytes
from .paging import PagePool
from .quantise import channel_scale, dequantise, storage_dtype, stored_head_dim

__all__ = ["KVCache", "PagedKVCache", "kv_cache_bytes"]

# A scale per channel is taken from the first prompt: how many tokens that takes, and room for larger ones to come.
_CALIBRATION_TOKENS = 32
_CALIBRATION_HEADROOM = 1.25


class _Layer(CacheLayerMixin):
    """What transformers asks of one layer, answered by its cache; and the layer's tensors."""

    supports_early_init = False

    def __init__(
        self, cache: KVCache, window: int | None, num_heads: int, head_dim: int, num_rows: int, num_slots: int
    ) -> None:
        super().__init__()
        self.cache = cache
        self.window = window
        self.is_sliding = window is not None
        self.num_slots = num_slots
        self.num_key_value_heads = num_heads
        self.head_dim = head_dim
        # Whether slots are reused within a sequence.
        self.is_rolling = window is not None and num_slots < cache.max_tokens and not cache.is_paged
        self.is_croppable = not self.is_rolling
        self.is_calibrated = False
        self.is_initialized = True
        name, device = cache.cache_dtype, cache.device
        shape = (num_rows, num_slots, num_heads, stored_head_dim(name, head_dim))
        # Zeros, not empty: attention that masks instead of leaving out would turn NaN in a free slot into NaN.
        self.k = torch.zeros(shape, dtype=storage_dtype(name), device=device)
        self.v = torch.zeros(shape, dtype=storage_dtype(name), device=device)
        self.k_scale = self.v_scale = None
        if is_quantised(name):
            # (rows, G, S) in memory: a tile's scales of one head are neighbours.
            per_token = (num_rows, num_heads, num_slots)
            self.v_scale = torch.zeros(per_token, device=device).transpose(1, 2)
            if cache.key_scales == "channel":
                self.k_scale = torch.zeros((num_heads, head_dim), device=device)
            else:
                self.k_scale = torch.zeros(per_token, device=device).transpose(1, 2)
        self.ring_table = None
        if self.is_rolling:
            # A ring of slots is a page that follows itself.
            rows = torch.arange(cache.num_sequences, dtype=torch.int32, device=device)
            self.ring_table = rows[:, None].repeat(1, -(-cache.max_tokens // num_slots))

    @property
    def batch_size(self) -> int:
        return self.cache.num_sequences

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("allocated when the cache is made")

    def update(self, key_states, value_states, *args, **kwargs):
        return self.cache.update(key_states, value_states, self.cache.layers.index(self))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.mask_sizes(self, query_length)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.max_tokens

    def reset(self) -> None:
        self.cache.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise AssertionError("reordered as a whole")


class CachedKeys:
    """Stands for the keys and values of a layer that a kernel reads where they are: paged, rolling or quantised.

    `attend` is what `headfold_attention` calls. Anything else that touches it learns what to do.
    """

    def __init__(self, cache: KVCache, layer: _Layer) -> None:
        self._cache = cache
        self._layer = layer

    def attend(
        self, q: torch.Tensor, spans: torch.Tensor | None, *, window: int | None, **options: Any
    ) -> torch.Tensor:
        """q (B, H, D); spans (B, 1, 1, 2) as `headfold_mask` makes them, or None: all tokens. Returns (B, H, D)."""
        layer, cache = self._layer, self._cache
        result = gqa_decode(
            q,
            layer.k,
            layer.v,
            cache.lengths if spans is None else spans[:, 0, 0, 1],
            seq_starts=None if spans is None else spans[:, 0, 0, 0],
            block_table=cache.table_of(layer),
            window=layer.window if layer.window is not None else window,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            **options,
        )
        assert isinstance(result, torch.Tensor)
        return result

    def __getattr__(self, name: str) -> Any:
        raise KernelError(
            "a paged, rolling or quantised cache holds no tensors of keys and values that attention code could read: "
            f'call register_attention() and load the model with attn_implementation="{ATTN_IMPLEMENTATION}"'
        )


class KVCache(Cache):
    """A contiguous cache for `num_sequences` sequences of at most `max_tokens` tokens each, allocated now.

    config: the model's config. Layers with a sliding window keep its last tokens only, in a rolling buffer.
    cache_dtype: any of dtypes.py; default the model's own (`dtype`, the dtype of its activations, default config's).
    key_scales: "token" or "channel", for quantised dtypes. "channel" takes its scales from the first prompt.

    Rows of a batch share one length, as in transformers (padding on the left counts). Raises KernelError if the device
    cannot do the dtype, if the model has layers that are not attention, if a row grows beyond max_tokens.
    """

    is_paged = False

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_sequences: int,
        max_tokens: int,
        cache_dtype: str | torch.dtype | None = None,
        key_scales: KeyScales = "token",
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.num_sequences = num_sequences
        self.max_tokens = max_tokens
        self._set_up(config, cache_dtype, key_scales, dtype, device)

    def _set_up(self, config, cache_dtype, key_scales, dtype, device) -> None:
        config = config.get_text_config(decoder=True)
        dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        self.cache_dtype = cache_dtype_name(cache_dtype or dtype)
        self.device = torch.device(device)
        self.key_scales = key_scales
        check_cache_dtype(self.cache_dtype, self.device)
        if not is_quantised(self.cache_dtype) and self.cache_dtype != cache_dtype_name(dtype):
            raise KernelError(f"cache_dtype must be the model's {dtype}, or quantised, found {self.cache_dtype}")
        if min(self.num_sequences, self.max_tokens) < 1:
            raise KernelError(
                f"num_sequences and max_tokens must be at least 1, found {self.num_sequences} and {self.max_tokens}"
            )
        layers = []
        types, options = get_layer_types_and_kwargs(config)
        for layer_type, option, layer_config in zip(types, options, config.per_layer_config, strict=True):
            if layer_type not in ("full_attention", "sliding_attention"):
                raise KernelError(f"{config.model_type} has a layer of type {layer_type}, which this cache cannot hold")
            num_heads = getattr(layer_config, "num_key_value_heads", None) or layer_config.num_attention_heads
            head_dim = getattr(layer_config, "head_dim", None)
            head_dim = head_dim or layer_config.hidden_size // layer_config.num_attention_heads
            layers.append(self._make_layer(option.get("sliding_window"), num_heads, head_dim))
        super().__init__(layers=layers)
        # Tokens of each sequence, those of the running forward pass included. On the device: a CUDA graph moves it on.
        self.lengths = torch.zeros(self.num_sequences, dtype=torch.int32, device=self.device)
        self.num_tokens = 0
        # Whether `update` counts on the host too. A decode loop that replays a graph does it itself.
        self.counts_tokens = True

    def _make_layer(self, window: int | None, num_heads: int, head_dim: int) -> _Layer:
        num_slots = self.max_tokens if window is None else min(window, self.max_tokens)
        return _Layer(self, window, num_heads, head_dim, self.num_sequences, num_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and scales; what `kv_cache_bytes` says."""
        return sum(x.nbytes for layer in self.layers for x in layer.tensors)

    def table_of(self, layer: _Layer) -> torch.Tensor | None:
        """The block table that the kernels need for a layer."""
        return layer.ring_table

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_tokens

    def mask_sizes(self, layer: _Layer, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return, and the position of the first."""
        if query_length == 1:
            return (self.max_tokens, 0) if self._hands_out_tensors(layer) else (self.num_tokens + 1, 0)
        kept = self.num_tokens
        if layer.is_rolling:
            kept = min(kept, layer.num_slots - 1)
        return kept + query_length, self.num_tokens - kept

    def _hands_out_tensors(self, layer: _Layer) -> bool:
        return not (self.is_paged or layer.is_rolling or is_quantised(self.cache_dtype))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the K and V (B, G, T, D) of new tokens; returns the keys and values that they attend to.

        For several tokens they are tensors (B, G, N, D), for one the whole buffer or a `CachedKeys`.
        """
        layer = self.layers[layer_idx]
        expected = (self.num_sequences, layer.num_key_value_heads, layer.head_dim)
        found = (key_states.shape[0], key_states.shape[1], key_states.shape[3])
        if found != expected or value_states.shape != key_states.shape:
            raise KernelError(
                f"this cache takes K and V of (B, G, D) = {expected} in layer {layer_idx}, "
                f"found {found} and V of shape {tuple(value_states.shape)}"
            )
        num_new = key_states.shape[2]
        if layer_idx == 0:
            if self.counts_tokens:
                self.count(num_new)
            self.lengths += num_new
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.key_scales == "channel" and not layer.is_calibrated and layer.k_scale is not None:
            if num_new < _CALIBRATION_TOKENS:
                raise KernelError(
                    f'key_scales="channel" takes its scales from the first prompt, of at least {_CALIBRATION_TOKENS} '
                    f"tokens, found {num_new}"
                )
            layer.k_scale.copy_(channel_scale(key, self.cache_dtype) * _CALIBRATION_HEADROOM)
            layer.is_calibrated = True

        # What a rolling buffer is about to overwrite is still attended to by the first of several new tokens.
        old = None
        if num_new > 1:
            num_old = self.num_tokens - num_new
            kept = min(num_old, layer.num_slots - 1) if layer.is_rolling else num_old
            old = self._read(layer, num_old - kept, num_old, key.dtype) if kept else None
        written = min(num_new, layer.num_slots) if layer.is_rolling else num_new
        kv_append(
            layer.k,
            layer.v,
            key[:, num_new - written :],
            value[:, num_new - written :],
            self.lengths - written,
            block_table=self.table_of(layer),
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        if num_new > 1:
            if old is None:
                return key_states, value_states
            return tuple(torch.cat([x, y], dim=1).transpose(1, 2) for x, y in zip(old, (key, value), strict=True))
        if self._hands_out_tensors(layer):
            return layer.k.transpose(1, 2), layer.v.transpose(1, 2)
        view = CachedKeys(self, layer)
        return view, view

    def count(self, num_new: int) -> None:
        """Makes room for new tokens of every sequence; the host's half of `update`, done in the first layer for all."""
        if self.num_tokens + num_new > self.max_tokens:
            raise KernelError(
                f"the cache holds {self.max_tokens} tokens per sequence, {self.num_tokens + num_new} are needed: make "
                "it larger"
            )
        self.num_tokens += num_new

    def _read(self, layer: _Layer, start: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens start..end of every sequence, (B, N, G, D) of `dtype`."""
        positions = torch.arange(start, end, device=self.device)
        table = self.table_of(layer)
        rows: Any
        slots: Any
        if table is None:
            rows, slots = slice(None), slice(start, end)
        else:
            rows, slots = table[:, positions // layer.num_slots].long(), positions % layer.num_slots
        values = []
        for x, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
            if scale is not None and scale.dim() == 3:
                scale = scale[rows, slots][..., None]
            values.append(dequantise(x[rows, slots], scale, self.cache_dtype, dtype))
        return values[0], values[1]

    def reset(self) -> None:
        """Forgets all tokens; keeps the memory."""
        self.num_tokens = 0
        self.lengths.zero_()
        for layer in self.layers:
            layer.is_calibrated = False

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens off every sequence; like transformers', a number of 0 or less."""
        if tokens_to_remove > 0:
            raise KernelError(f"crop takes minus the number of tokens to remove, found {tokens_to_remove}")
        if -tokens_to_remove > self.num_tokens:
            raise KernelError(
                f"crop can take off at most the {self.num_tokens} tokens there are, found {tokens_to_remove}"
            )
        if tokens_to_remove and not self.is_croppable:
            raise KernelError("a rolling cache has overwritten the tokens that crop would bring back")
        self.num_tokens += tokens_to_remove
        self.lengths += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence beam_idx[i] (beam search)."""
        for layer in self.layers:
            for x in layer.tensors:
                if x.dim() > 2:  # not a scale per channel, which all sequences share
                    x.copy_(x[beam_idx.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise KernelError("this cache's number of sequences is fixed: make it with one for every row that is needed")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise KernelError("this cache's number of sequences is fixed: reset it, or make another")


class PagedKVCache(KVCache):
    """A cache of `num_pages` pages of `page_size` tokens, shared by `num_sequences` sequences of at most max_tokens
    each.

    A page is taken when a sequence reaches it. `fork` lets one sequence begin as another, without a copy until one of
    them writes (copy on write); `publish` and `attach` let a sequence begin with the pages of an earlier one that began
    with the same tokens, also when that one has been freed. Layers with a sliding window keep all tokens here.
    """

    is_paged = True

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_sequences: int,
        max_tokens: int,
        num_pages: int | None = None,
        page_size: int = 16,
        cache_dtype: str | torch.dtype | None = None,
        key_scales: KeyScales = "token",
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        pages_each = -(-max_tokens // page_size) if page_size > 0 else 0
        self.pool = PagePool(num_sequences * pages_each if num_pages is None else num_pages, page_size)
        self.pages: list[list[int]] = [[] for _ in range(num_sequences)]
        self._lengths = [0] * num_sequences  # as self.lengths, on the host
        self.block_table = torch.full((num_sequences, pages_each), -1, dtype=torch.int32, device=device)
        super().__init__(
            config,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
            cache_dtype=cache_dtype,
            key_scales=key_scales,
            dtype=dtype,
            device=device,
        )

    def _make_layer(self, window: int | None, num_heads: int, head_dim: int) -> _Layer:
        return _Layer(self, window, num_heads, head_dim, self.pool.num_pages, self.pool.page_size)

    def table_of(self, layer: _Layer) -> torch.Tensor:
        return self.block_table

    @property
    def num_tokens(self) -> int:
        """Tokens of every sequence. Raises KernelError if they differ: then positions and spans must be given."""
        if len(set(self._lengths)) > 1:
            raise KernelError(f"the sequences have different lengths: {self._lengths}")
        return self._lengths[0]

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        self._lengths = [value] * self.num_sequences

    def count(self, num_new: int) -> None:
        self.reserve(num_new)
        self._lengths = [length + num_new for length in self._lengths]

    def reserve(self, num_new: int) -> None:
        """Takes the pages for the next `num_new` tokens of every sequence now, and makes the one written to its own."""
        for row, length in enumerate(self._lengths):
            if length + num_new > self.max_tokens:
                raise KernelError(
                    f"sequence {row} may have {self.max_tokens} tokens, {length + num_new} are needed: make the cache "
                    "with more"
                )
            pages = self.pages[row]
            page_size = self.pool.page_size
            # Pages that the sequence has already, and is about to write to.
            for i in range(length // page_size, min(len(pages), -(-(length + num_new) // page_size))):
                if num_new and self.pool.must_copy(pages[i]):
                    page = self.pool.take()
                    for layer in self.layers:
                        for x in layer.tensors:
                            if x.dim() > 2:  # not a scale per channel, which all sequences share
                                x[page] = x[pages[i]]
                    self.pool.release([pages[i]])
                    pages[i] = page
                    self.block_table[row, i] = page
            num_had = len(pages)
            try:
                while len(pages) * page_size < length + num_new:
                    pages.append(self.pool.take())
            finally:  # also where pages run out: those that were taken stay, for when others are free
                if len(pages) > num_had:
                    self._write_table(row, num_had)

    def _write_table(self, row: int, first: int = 0) -> None:
        """Brings a row of the block table up to date from page `first` on."""
        new = self.pages[row][first:] + [-1] * (self.block_table.shape[1] - max(first, len(self.pages[row])))
        self.block_table[row, first:] = torch.tensor(new, dtype=torch.int32).to(self.device)

    def free(self, row: int) -> None:
        """Ends a sequence and gives its pages back; those that were published can still be found."""
        self.pool.release(self.pages[row])
        self._set_row(row, [], 0)

    def publish(self, row: int, tokens: Sequence[int]) -> None:
        """Lets later sequences `attach` to the full pages of this one. tokens: its ids from the start, no padding."""
        length = min(self._lengths[row], len(tokens))
        self.pool.publish(list(tokens[:length]), self.pages[row])

    def attach(self, row: int, tokens: Sequence[int]) -> int:
        """Begins an empty sequence with the published pages that hold the longest start of `tokens`.

        Returns the number of tokens found, a multiple of page_size and less than len(tokens): the last token is left to
        be computed, since its logits are wanted.
        """
        if self._lengths[row]:
            raise KernelError(f"sequence {row} already has {self._lengths[row]} tokens: free it first")
        pages = self.pool.find(list(tokens[: len(tokens) - 1]))
        for page in pages:
            self.pool.hold(page)
        self.pool.release(self.pages[row])  # that were taken for tokens which never came
        self._set_row(row, pages, len(pages) * self.pool.page_size)
        return self._lengths[row]

    def fork(self, source: int, row: int) -> None:
        """Makes sequence `row` begin as sequence `source` stands. No page is copied before one of them writes to it."""
        for page in self.pages[source]:
            self.pool.hold(page)
        self.pool.release(self.pages[row])
        self._set_row(row, list(self.pages[source]), self._lengths[source])

    @contextmanager
    def only(self, rows: Sequence[int]) -> Iterator[None]:
        """Within it, forward passes run on these sequences alone, as a batch of len(rows)."""
        index = torch.tensor(list(rows), device=self.device)
        everything = (self.num_sequences, self.pages, self._lengths, self.lengths, self.block_table)
        self.num_sequences = len(rows)
        self.pages = [self.pages[row] for row in rows]  # the same lists
        self._lengths = [self._lengths[row] for row in rows]
        self.lengths, self.block_table = self.lengths[index], self.block_table[index]
        try:
            yield
        finally:
            part, part_lengths, part_table = self._lengths, self.lengths, self.block_table
            self.num_sequences, self.pages, self._lengths, self.lengths, self.block_table = everything
            for row, length in zip(rows, part, strict=True):
                self._lengths[row] = length
            self.lengths[index] = part_lengths
            self.block_table[index] = part_table

    def _set_row(self, row: int, pages: list[int], length: int) -> None:
        self.pages[row][:] = pages
        self._lengths[row] = length
        self.lengths[row] = length
        self._write_table(row)

    def reset(self) -> None:
        """Frees all sequences. What was published can still be found."""
        for row in range(self.num_sequences):
            self.free(row)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for row, pages in enumerate(self.pages):
            num_kept = -(-self._lengths[row] // self.pool.page_size)
            self.pool.release(pages[num_kept:])
            del pages[num_kept:]
            self._write_table(row, num_kept)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        sources = [(list(self.pages[i]), self._lengths[i]) for i in beam_idx.tolist()]
        for pages, _ in sources:
            for page in pages:
                self.pool.hold(page)
        for row, (pages, length) in enumerate(sources):
            self.pool.release(self.pages[row])
            self._set_row(row, pages, length)
