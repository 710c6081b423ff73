"""Decode speed and cache memory, with the models taking turns.

A forward pass over a prompt computes; it gains nothing from a smaller cache. A decoding step reads: every weight once,
and the whole cache. That is where grouped-query attention pays, and why prefill and decode are timed apart.

What is timed: prefill until the first token is chosen; then single steps, each until its token is chosen, with the
device synchronised around each. The cache is preallocated (transformers' StaticCache) and written once before the clock
starts, so neither allocation nor page faults nor warm-up count. Models take turns, repetition by repetition, so
that a machine that slows down slows both; ratios are formed within a repetition.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from headfold.convert.errors import HeadfoldError, RefusedError

from .engines import Engine, Run, clock
from .loading import available_bytes
from .schema import DecodePoint, Ladder, Latency, Rung, Speed, Spread
from .settings import DecodeSettings
from .stats import quantile

WARMUP_STEPS = 2
FREE_MEMORY_SHARE = 0.8
_COPY_BYTES = 1 << 28
_COPY_REPETITIONS = 10

Engines = Sequence[Engine]
"""Those of the model before and the model after, in this order."""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps the collector from running inside a timed step. Caches are freed without it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of the fastest of some large copies on the device."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPY_REPETITIONS):
        start = clock(device)
        target.copy_(source)
        times.append(clock(device) - start)
    return 2 * _COPY_BYTES / min(times)


def bytes_per_step(engine: Engine, run: Run, context: int) -> float:
    """Bytes that a step must read, on average over the steps of a run: weights, and what the cache holds by then."""
    filled = (context + len(run.steps) / 2) / (context + len(run.steps))
    return engine.weight_bytes_per_step() + run.cache_bytes * filled


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


def _interleaved(engines: Engines, batch: int, context: int, settings: DecodeSettings, seed: int) -> list[list[Run]]:
    """Runs by model and repetition, on the same prompt; the model that goes first changes each time."""
    vocabulary = min(engine.vocab_size for engine in engines)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocabulary, (batch, context), generator=generator).to(engines[0].device)
    runs: list[list[Run]] = [[] for _ in engines]
    with _no_garbage_collection():
        for engine in engines:
            engine.run(prompt, WARMUP_STEPS)
        for repetition in range(settings.repetitions):
            order = list(range(len(engines)))
            for index in order if repetition % 2 == 0 else order[::-1]:
                runs[index].append(engines[index].run(prompt, settings.new_tokens))
    return runs


def _speed(engine: Engine, runs: Sequence[Run], batch: int, context: int, bandwidth: float | None) -> Speed:
    """Medians and quantiles over all repetitions of one model at one point."""
    steps = [seconds for run in runs for seconds in run.steps]
    median = statistics.median(steps)
    return Speed(
        time_to_first_token_s=statistics.median(run.first_token for run in runs),
        time_per_output_token_s=Latency(median=median, p90=quantile(steps, 0.9), p99=quantile(steps, 0.99)),
        tokens_per_second=batch * len(steps) / sum(steps),
        cache_bytes=runs[0].cache_bytes,
        peak_memory_bytes=max((run.peak_memory_bytes for run in runs if run.peak_memory_bytes), default=None),
        bandwidth_share=bytes_per_step(engine, runs[0], context) / median / bandwidth if bandwidth else None,
    )


def _spread(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Ratio before / after, repetition by repetition."""
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    return Spread(median=statistics.median(ratios), low=min(ratios), high=max(ratios))


def _bandwidth_of_gpu(engines: Engines) -> float | None:
    """The device's copy bandwidth. None on a CPU, whose caches make a share of it meaningless."""
    device = engines[0].device
    return copy_bandwidth(device) if device.type == "cuda" else None


def _memory_limit(settings: DecodeSettings, device: torch.device) -> int | None:
    if settings.memory_limit_gib is not None:
        return int(settings.memory_limit_gib * 2**30)
    available = available_bytes(device)
    return None if available is None else int(FREE_MEMORY_SHARE * available)


def measure_points(
    engines: Engines,
    settings: DecodeSettings,
    contexts: Sequence[int],
    *,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[DecodePoint]:
    """Both models at every pair of a context and a batch. Raises HeadfoldError where memory does not suffice."""
    bandwidth = _bandwidth_of_gpu(engines)
    pairs = [(context, batch) for context in contexts for batch in sorted(set(settings.batches))]
    points = []
    for done, (context, batch) in enumerate(pairs):
        progress(done, len(pairs))
        try:
            before, after = _interleaved(engines, batch, context, settings, seed)
        except torch.OutOfMemoryError as error:
            raise HeadfoldError(
                f"decode: batch {batch} with context {context} does not fit the memory of {engines[0].device}; "
                "ask for smaller decode.batches or decode.contexts."
            ) from error
        points.append(
            DecodePoint(
                batch=batch,
                context=context,
                before=_speed(engines[0], before, batch, context, bandwidth),
                after=_speed(engines[1], after, batch, context, bandwidth),
                speedup=_spread([run.median_step for run in before], [run.median_step for run in after]),
                first_token_speedup=_spread([run.first_token for run in before], [run.first_token for run in after]),
            )
        )
    progress(len(pairs), len(pairs))
    return points


def measure_ladder(
    engines: Engines,
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
    bandwidth = _bandwidth_of_gpu(engines)
    limit = _memory_limit(settings, engines[0].device)
    known = {(point.batch, point.context): (point.before, point.after) for point in points}
    counts = [2**power for power in range(settings.ladder_sequences.bit_length())]
    rungs: list[Rung] = []
    per_sequence = [engine.cache_bytes(context + settings.new_tokens) for engine in engines]
    fitting = [0, 1]
    for done, sequences in enumerate(counts):
        progress(done, len(counts))
        fitting = [index for index in fitting if limit is None or per_sequence[index] * sequences <= limit]
        speeds: list[Speed | None] = [None, None]
        if (sequences, context) in known:
            for index in fitting:
                speeds[index] = known[sequences, context][index]
        else:
            fitting, runs = _while_memory_lasts(engines, fitting, sequences, context, settings, seed)
            for index, of_one_model in zip(fitting, runs, strict=True):
                speeds[index] = _speed(engines[index], of_one_model, sequences, context, bandwidth)
        if not fitting:
            break
        rungs.append(Rung(sequences=sequences, before=speeds[0], after=speeds[1]))
    progress(len(counts), len(counts))
    return Ladder(context=context, new_tokens=settings.new_tokens, memory_limit_bytes=limit, rungs=rungs)


def _while_memory_lasts(
    engines: Engines, fitting: list[int], sequences: int, context: int, settings: DecodeSettings, seed: int
) -> tuple[list[int], list[list[Run]]]:
    """Runs of the models that fit, and which these are. The first, whose cache is the larger, is the first to go."""
    while fitting:
        try:
            return fitting, _interleaved([engines[index] for index in fitting], sequences, context, settings, seed)
        except torch.OutOfMemoryError:
            fitting = fitting[1:]
    return [], []
