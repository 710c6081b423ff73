"""What runs a model when decode is timed: transformers, with its own attention or ours, or vLLM.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from headfold.convert.errors import HeadfoldError, RefusedError, first_line
from headfold.kernels import KernelError

from .loading import Placement, load_model, text_config

VLLM_MIN_BATCHED_TOKENS = 8192
VLLM_MAX_BATCHED_TOKENS = 65536
VLLM_MEMORY_SHARE = 0.45
"""Of a GPU's memory, for each of the two models."""


@dataclass(frozen=True)
class Run:
    """One prefill and the steps after it. Seconds and bytes."""

    first_token: float
    steps: list[float]
    cache_bytes: int
    peak_memory_bytes: int | None = None

    @property
    def median_step(self) -> float:
        return statistics.median(self.steps)


class Engine(Protocol):
    """A model that can be timed."""

    device: torch.device
    vocab_size: int

    def run(self, prompt: torch.Tensor, num_steps: int) -> Run:
        """Prefills prompt (B, T), then decodes num_steps tokens for each sequence, greedily."""

    def cache_bytes(self, num_tokens: int) -> int:
        """Bytes of the cache of one sequence."""

    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that a step of a dense model must read."""


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class TransformersEngine:
    """transformers' own modules over its StaticCache. Meets `Engine`."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.vocab_size: int = text_config(model).vocab_size

    @torch.inference_mode()
    def run(self, prompt: torch.Tensor, num_steps: int) -> Run:
        """The cache is allocated and written once before the clock starts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        batch, context = prompt.shape
        cache = preallocated_cache(self.model, batch, context + num_steps)
        start = clock(self.device)
        token = step(self.model, prompt, cache)
        last = clock(self.device)
        first_token, steps = last - start, []
        for _ in range(num_steps):
            token = step(self.model, token, cache)
            now = clock(self.device)
            steps.append(now - last)
            last = now
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return Run(first_token, steps, bytes_of(cache), peak)

    @torch.inference_mode()
    def cache_bytes(self, num_tokens: int) -> int:
        return bytes_of(preallocated_cache(self.model, 1, num_tokens))

    def weight_bytes_per_step(self) -> int:
        """All but an untied input embedding, of which a step reads a row."""
        parameters = {id(parameter): parameter for parameter in self.model.parameters()}
        if not text_config(self.model).tie_word_embeddings:
            parameters.pop(id(self.model.get_input_embeddings().weight), None)
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())


def preallocated_cache(model: transformers.PreTrainedModel, batch: int, num_tokens: int) -> transformers.StaticCache:
    """An empty cache for B sequences of num_tokens tokens, its memory touched.

    One token goes through the model, so that the model itself decides on heads, sizes and dtype; then it is forgotten.
    """
    cache = transformers.StaticCache(config=model.config, max_cache_len=num_tokens)
    step(model, torch.zeros(batch, 1, dtype=torch.long, device=model.device), cache)
    cache.reset()
    return cache


def bytes_of(cache: transformers.StaticCache) -> int:
    """Bytes of keys and values that the cache holds."""
    layers: list[Any] = cache.layers
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class CacheShape:
    """What a model keeps of a token, counted in a cache that it filled. Heads and size are those of the first layer."""

    num_layers: int
    num_key_value_heads: int
    head_dim: int
    entries_per_token: float


@torch.inference_mode()
def cache_shape(model: transformers.PreTrainedModel, num_tokens: int) -> CacheShape:
    """Layers, KV heads, head_dim, and the numbers that each of num_tokens tokens adds over all layers.

    Raises RefusedError for a model whose cache is not keys and values of every token (a state-space layer, say), or
    that the attention it was loaded with cannot serve.
    """
    try:
        layers: list[Any] = preallocated_cache(model, 1, num_tokens).layers
        _, num_heads, _, head_dim = layers[0].keys.shape
    except (KernelError, AttributeError, TypeError, KeyError, NotImplementedError) as error:
        raise RefusedError(f"{type(model).__name__} cannot run on a preallocated KV cache: {error}") from error
    entries = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    return CacheShape(len(layers), num_heads, head_dim, entries / num_tokens)


def step(model: transformers.PreTrainedModel, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Feeds tokens (B, T) after what the cache holds; returns the most likely next token (B, 1)."""
    kind: Any = type(model)
    logits = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{_cache_argument(kind): cache}).logits
    return logits[:, -1:].argmax(-1)


@functools.cache
def _cache_argument(model_class: Any) -> str:
    """transformers renamed past_key_values to cache in 5.x; models with code of their own may use either."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


class VllmEngine:
    """vLLM's engine, stepped by hand. Meets `Engine`.

    A step counts where every sequence got a token in it. Prefixes are not shared, since repeated prompts would then
    cost nothing. Cache bytes are those of the blocks that the tokens fill, not of the pool that vLLM reserves.
    """

    def __init__(self, path: Path, place: Placement, *, max_sequences: int, max_tokens: int) -> None:
        refuse_without_vllm()
        import vllm

        model = load_model(path, place)
        self.device = place.device
        self.vocab_size: int = text_config(model).vocab_size
        self._weight_bytes = TransformersEngine(model).weight_bytes_per_step()
        self._bytes_per_token = cache_shape(model, 1).entries_per_token * place.dtype.itemsize
        del model
        all_at_once = max_sequences * max_tokens
        try:
            self._engine: Any = vllm.LLM(
                model=str(path),
                dtype=str(place.dtype).removeprefix("torch."),
                trust_remote_code=place.trust_remote_code,
                max_model_len=max_tokens,
                max_num_seqs=max_sequences,
                max_num_batched_tokens=min(max(all_at_once, VLLM_MIN_BATCHED_TOKENS), VLLM_MAX_BATCHED_TOKENS),
                gpu_memory_utilization=VLLM_MEMORY_SHARE,
                enable_prefix_caching=False,
                disable_log_stats=True,
            ).llm_engine
        except (RuntimeError, ValueError, TypeError) as error:
            raise HeadfoldError(f"{path}: vLLM cannot load this model: {first_line(error)}") from error
        self._block_size: int = self._engine.vllm_config.cache_config.block_size
        self._names = itertools.count()

    def run(self, prompt: torch.Tensor, num_steps: int) -> Run:
        import vllm

        batch, context = prompt.shape
        sampling = vllm.SamplingParams(max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        for ids in prompt.tolist():
            self._engine.add_request(str(next(self._names)), {"prompt_token_ids": ids}, sampling)
        last, first_token = start, None
        started: set[str] = set()
        steps: list[float] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            if first_token is not None and len(outputs) == batch:
                steps.append(now - last)
            started.update(output.request_id for output in outputs)
            if first_token is None and len(started) == batch:
                first_token = now - start
            last = now
        if first_token is None or not steps:
            raise HeadfoldError(
                f"decode: vLLM never decoded {batch} sequences of {context} tokens at once; ask for smaller "
                "decode.batches or decode.contexts, or more decode.new_tokens."
            )
        return Run(first_token, steps, batch * self.cache_bytes(context + num_steps))

    def cache_bytes(self, num_tokens: int) -> int:
        return int(self._bytes_per_token * -(-num_tokens // self._block_size) * self._block_size)

    def weight_bytes_per_step(self) -> int:
        return self._weight_bytes


def refuse_without_vllm() -> None:
    """Raises RefusedError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise RefusedError("engine vllm: vLLM is not installed here; use headfold or transformers.")
