"""Decode speed and cache memory, with the models taking turns.

A forward pass over a prompt computes; it gains nothing from fewer KV heads. A decoding step reads: every weight once,
and the whole cache. That is where grouped-query attention pays, and why prefill and decode are timed apart.

What is timed: prefill until the first token is chosen; then single steps, each until its token is chosen, with the
device synchronised around each. The cache is preallocated (transformers' StaticCache) and written once before the clock
starts, so neither allocation nor page faults nor warm-up count. Models take turns, repetition by repetition, so
that a machine that slows down slows both; ratios are formed within a repetition.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

import functools
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.kernels import KernelError

from .loading import available_bytes, text_config
from .schema import DecodePoint, Ladder, Latency, Rung, Speed, Spread
from .settings import DecodeSettings
from .stats import quantile

WARMUP_STEPS = 2
FREE_MEMORY_SHARE = 0.8
_COPY_BYTES = 1 << 28
_COPY_REPETITIONS = 10

Models = Sequence[transformers.PreTrainedModel]
"""The model before and the model after, in this order."""


@dataclass(frozen=True)
class Run:
    """One prefill and the steps after it. Seconds and bytes."""

    first_token: float
    steps: list[float]
    cache_bytes: int
    peak_memory_bytes: int | None

    @property
    def median_step(self) -> float:
        return statistics.median(self.steps)


def preallocated_cache(model: transformers.PreTrainedModel, batch: int, num_tokens: int) -> transformers.StaticCache:
    """An empty cache for B sequences of num_tokens tokens, its memory touched.

    One token goes through the model, so that the model itself decides on heads, sizes and dtype; then it is forgotten.
    """
    cache = transformers.StaticCache(config=model.config, max_cache_len=num_tokens)
    step(model, torch.zeros(batch, 1, dtype=torch.long, device=_device(model)), cache)
    cache.reset()
    return cache


def cache_bytes(cache: transformers.StaticCache) -> int:
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


def _device(model: transformers.PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps the collector from running inside a timed step. Caches are freed without it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@torch.inference_mode()
def run_once(model: transformers.PreTrainedModel, prompt: torch.Tensor, num_steps: int) -> Run:
    """Prefills prompt (B, T), then decodes num_steps tokens for each sequence, greedily."""
    device = prompt.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    batch, context = prompt.shape
    cache = preallocated_cache(model, batch, context + num_steps)
    start = _clock(device)
    token = step(model, prompt, cache)
    last = _clock(device)
    first_token, steps = last - start, []
    for _ in range(num_steps):
        token = step(model, token, cache)
        now = _clock(device)
        steps.append(now - last)
        last = now
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Run(first_token, steps, cache_bytes(cache), peak)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of the fastest of some large copies on the device."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPY_REPETITIONS):
        start = _clock(device)
        target.copy_(source)
        times.append(_clock(device) - start)
    return 2 * _COPY_BYTES / min(times)


def bytes_per_step(model: transformers.PreTrainedModel, run: Run, context: int) -> float:
    """Bytes that a step of a dense model must read: all weights but an untied input embedding, and the filled cache."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    if not text_config(model).tie_word_embeddings:
        parameters.pop(id(model.get_input_embeddings().weight), None)
    filled = (context + len(run.steps) / 2) / (context + len(run.steps))  # on average over the steps
    return sum(p.numel() * p.element_size() for p in parameters.values()) + run.cache_bytes * filled


def usable_contexts(settings: DecodeSettings, max_positions: int | None) -> tuple[list[int], int, str | None]:
    """The contexts and the ladder's context, cut to what the model's positions hold beside the new tokens.

    The third value says so where one was cut. Raises RefusedError where no context is left at all.
    """
    contexts = sorted(set(settings.contexts))
    ladder_context = settings.ladder_context or contexts[-1]
    if max_positions is None:
        return contexts, ladder_context, None
    longest = max_positions - settings.new_tokens
    if longest < 1:
        raise RefusedError(
            f"decode.new_tokens: {settings.new_tokens} tokens leave no room for a context within the model's "
            f"{max_positions} positions; ask for fewer."
        )
    cut = ", ".join(f"{context:,}" for context in sorted({*contexts, ladder_context}) if context > longest)
    note = f"Decode contexts of {cut} tokens were cut to {longest:,}: the model has {max_positions:,} positions."
    return sorted({min(context, longest) for context in contexts}), min(ladder_context, longest), note if cut else None


def _interleaved(models: Models, batch: int, context: int, settings: DecodeSettings, seed: int) -> list[list[Run]]:
    """Runs by model and repetition, on the same prompt; the model that goes first changes each time."""
    vocabulary = min(text_config(model).vocab_size for model in models)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocabulary, (batch, context), generator=generator).to(_device(models[0]))
    runs: list[list[Run]] = [[] for _ in models]
    with _no_garbage_collection():
        for model in models:
            run_once(model, prompt, WARMUP_STEPS)
        for repetition in range(settings.repetitions):
            order = list(range(len(models)))
            for index in order if repetition % 2 == 0 else order[::-1]:
                runs[index].append(run_once(models[index], prompt, settings.new_tokens))
    return runs


def _speed(
    model: transformers.PreTrainedModel, runs: Sequence[Run], batch: int, context: int, bandwidth: float | None
) -> Speed:
    """Medians and quantiles over all repetitions of one model at one point."""
    steps = [seconds for run in runs for seconds in run.steps]
    median = statistics.median(steps)
    return Speed(
        time_to_first_token_s=statistics.median(run.first_token for run in runs),
        time_per_output_token_s=Latency(median=median, p90=quantile(steps, 0.9), p99=quantile(steps, 0.99)),
        tokens_per_second=batch * len(steps) / sum(steps),
        cache_bytes=runs[0].cache_bytes,
        peak_memory_bytes=max((run.peak_memory_bytes for run in runs if run.peak_memory_bytes), default=None),
        bandwidth_share=bytes_per_step(model, runs[0], context) / median / bandwidth if bandwidth else None,
    )


def _spread(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Ratio before / after, repetition by repetition."""
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    return Spread(median=statistics.median(ratios), low=min(ratios), high=max(ratios))


def _bandwidth_of_gpu(models: Models) -> float | None:
    """The device's copy bandwidth. None on a CPU, whose caches make a share of it meaningless."""
    device = _device(models[0])
    return copy_bandwidth(device) if device.type == "cuda" else None


def _memory_limit(settings: DecodeSettings, device: torch.device) -> int | None:
    if settings.memory_limit_gib is not None:
        return int(settings.memory_limit_gib * 2**30)
    available = available_bytes(device)
    return None if available is None else int(FREE_MEMORY_SHARE * available)


def measure_points(
    models: Models,
    settings: DecodeSettings,
    contexts: Sequence[int],
    *,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[DecodePoint]:
    """Both models at every pair of a context and a batch. Raises HeadfoldError where memory does not suffice."""
    bandwidth = _bandwidth_of_gpu(models)
    pairs = [(context, batch) for context in contexts for batch in sorted(set(settings.batches))]
    points = []
    for done, (context, batch) in enumerate(pairs):
        progress(done, len(pairs))
        try:
            before, after = _interleaved(models, batch, context, settings, seed)
        except torch.OutOfMemoryError as error:
            raise HeadfoldError(
                f"decode: batch {batch} with context {context} does not fit the memory of {_device(models[0])}; "
                "ask for smaller decode.batches or decode.contexts."
            ) from error
        points.append(
            DecodePoint(
                batch=batch,
                context=context,
                before=_speed(models[0], before, batch, context, bandwidth),
                after=_speed(models[1], after, batch, context, bandwidth),
                speedup=_spread([run.median_step for run in before], [run.median_step for run in after]),
                first_token_speedup=_spread([run.first_token for run in before], [run.first_token for run in after]),
            )
        )
    progress(len(pairs), len(pairs))
    return points


def measure_ladder(
    models: Models,
    settings: DecodeSettings,
    context: int,
    points: Sequence[DecodePoint],
    *,
    seed: int,
    progress: Callable[[int, int], None],
) -> Ladder:
    """1, 2, 4, ... sequences up to settings.ladder_sequences, each model until its cache no longer fits the memory.

    Rungs that are among `points` already are taken from there.
    """
    bandwidth = _bandwidth_of_gpu(models)
    limit = _memory_limit(settings, _device(models[0]))
    known = {(point.batch, point.context): (point.before, point.after) for point in points}
    counts = [2**power for power in range(settings.ladder_sequences.bit_length())]
    rungs: list[Rung] = []
    with torch.inference_mode():
        per_sequence = [cache_bytes(preallocated_cache(model, 1, context + settings.new_tokens)) for model in models]
    fitting = [0, 1]
    for done, sequences in enumerate(counts):
        progress(done, len(counts))
        fitting = [index for index in fitting if limit is None or per_sequence[index] * sequences <= limit]
        speeds: list[Speed | None] = [None, None]
        if (sequences, context) in known:
            for index in fitting:
                speeds[index] = known[sequences, context][index]
        else:
            fitting, runs = _while_memory_lasts(models, fitting, sequences, context, settings, seed)
            for index, of_one_model in zip(fitting, runs, strict=True):
                speeds[index] = _speed(models[index], of_one_model, sequences, context, bandwidth)
        if not fitting:
            break
        rungs.append(Rung(sequences=sequences, before=speeds[0], after=speeds[1]))
    progress(len(counts), len(counts))
    return Ladder(context=context, new_tokens=settings.new_tokens, memory_limit_bytes=limit, rungs=rungs)


def _while_memory_lasts(
    models: Models, fitting: list[int], sequences: int, context: int, settings: DecodeSettings, seed: int
) -> tuple[list[int], list[list[Run]]]:
    """Runs of the models that fit, and which these are. The first, whose cache is the larger, is the first to go."""
    while fitting:
        try:
            return fitting, _interleaved([models[index] for index in fitting], sequences, context, settings, seed)
        except torch.OutOfMemoryError:
            fitting = fitting[1:]
    return [], []
