"""A greedy decode loop for measuring: a prompt at once, then one token per step, with nothing allocated in between.

On GPUs a step is one replay of a CUDA graph, on other devices the same calls one by one.
Shape letters: B sequences, T tokens of the prompt.
"""

from __future__ import annotations

from typing import Any

import torch

from .cache import KVCache


class DecodeLoop:
    """Runs `model`, loaded with attn_implementation="headfold", on a cache of its own batch size.

    loop = DecodeLoop(model, KVCache(model.config, num_sequences=B, max_tokens=..., device=model.device))
    tokens = [loop.prefill(input_ids, attention_mask)]
    tokens += [loop.step().clone() for _ in range(n)]
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        size, device = cache.num_sequences, cache.device
        # What a step reads and writes, in places that stay.
        self.tokens = torch.zeros(size, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(size, 1, dtype=torch.long, device=device)
        self._bounds = torch.zeros(2, size, dtype=torch.int32, device=device)  # first key and end of each sequence
        self._graph: Any = None
        self._is_warm = False

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the prompt (B, T), padded on the left where attention_mask (B, T) is 0, into the cache.

        The cache may already hold the beginning of the prompt. Returns the next token of each sequence, (B, 1), in a
        buffer that `step` overwrites.
        """
        start = self.cache.get_seq_length()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        out = self.model(
            input_ids[:, start:],
            attention_mask=attention_mask,
            position_ids=positions[:, start:],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.tokens.copy_(out.logits[:, -1:].argmax(dim=-1))
        self._positions.copy_(positions[:, -1:] + 1)
        self._bounds[0] = (mask == 0).sum(dim=1)
        self._bounds[1] = input_ids.shape[1] + 1  # the token of the next step included
        return self.tokens

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Runs the tokens found last, and returns the next ones, (B, 1), in the same buffer."""
        self.cache.count(1)
        self.cache.counts_tokens = False
        try:
            if self._graph is not None:
                self._graph.replay()
            elif self.cache.device.type != "cuda":
                self._step()
            elif not self._is_warm:
                # Once outside of the graph, on a stream of its own: kernels are compiled and libraries loaded here.
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._step()
                torch.cuda.current_stream().wait_stream(stream)
                self._is_warm = True
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
                self._graph = graph
                graph.replay()
        finally:
            self.cache.counts_tokens = True
        return self.tokens

    def _step(self) -> None:
        out = self.model(
            self.tokens,
            attention_mask=self._bounds.t()[:, None, None, :],
            position_ids=self._positions,
            cache=self.cache,
            use_cache=True,
        )
        self.tokens.copy_(out.logits[:, -1:].argmax(dim=-1))
        self._positions += 1
        self._bounds[1] += 1
