"""The report in one or two sentences, computed from its numbers, each with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .formats import significant
from .schema import CacheBytesPerToken, DecodePoint, Interval, ModelRecord, Perplexity, TaskMetric


def verdict(
    models: Sequence[ModelRecord],
    perplexity: Perplexity | None,
    recovered: Interval | None,
    cache: CacheBytesPerToken,
    decode: Sequence[DecodePoint],
    tasks: Sequence[TaskMetric],
    device: str,
) -> str:
    """What the change cost and what it brought. device: where decode was timed, in words."""
    sentences = []
    heads = f"{models[0].num_key_value_heads} KV heads to {models[-1].num_key_value_heads}"
    if perplexity is not None:
        sentences.append(_quality(heads, perplexity, recovered))
    elif tasks:
        difference = _mapped(tasks[0].difference, lambda value: 100 * value)
        sentences.append(
            f"Going from {heads} changes {tasks[0].metric} on {tasks[0].task} by {difference.value:+.1f} "
            f"points{_between(difference, '+.1f')}."
        )
    gains = [_cache(cache)]
    if decode:
        gains.append(_speed(headline_point(decode), device))
    sentences.append(" and ".join(gains) + ".")
    return " ".join(sentences)


def headline_point(decode: Sequence[DecodePoint]) -> DecodePoint:
    """The point with the largest cache, where grouped-query attention has most to give."""
    return max(decode, key=lambda point: (point.batch * point.context, point.context))


def _quality(heads: str, perplexity: Perplexity, recovered: Interval | None) -> str:
    ratio = perplexity.changes[-1].ratio
    before, after = significant(perplexity.before, 4), significant(perplexity.after, 4)
    change = _mapped(ratio, lambda value: 100 * (value - 1))
    if change.low is not None and change.high is not None and change.low <= 0 <= change.high:
        end = f"{after}, not to be told from the original's {before} on this text{_between(change, '+.1f')}"
    elif change.value < 0:
        lower = _mapped(change, lambda value: -value)
        end = f"{after}, {lower.value:.1f} % below the original's {before}{_between(lower, '.1f')}"
    elif ratio.value < 2:
        end = f"{after}, {change.value:.1f} % above the original's {before}{_between(change, '.1f')}"
    else:
        end = f"{after}, {ratio.value:.1f} times the original's {before}{_between(ratio, '.1f')}"
    if recovered is None:
        return f"Going from {heads} leaves perplexity at {end}."
    verb, sign = ("won back", 100) if recovered.value >= 0 else ("added another", -100)
    share = _mapped(recovered, lambda value: sign * value)
    return (
        f"Uptraining {verb} {share.value:.0f} % of the loss that going from {heads} had cost{_between(share, '.0f')}; "
        f"perplexity ends at {end}."
    )


def _cache(cache: CacheBytesPerToken) -> str:
    factor = cache.before / cache.after
    return f"The KV cache takes {factor:.3g} times less memory" if factor > 1 else "The KV cache takes as much memory"


def _speed(point: DecodePoint, device: str) -> str:
    speedup = point.speedup
    return (
        f"decoding is {speedup.median:.2f} times as fast ({speedup.low:.2f} to {speedup.high:.2f} over repetitions) "
        f"at batch {point.batch} and context {point.context:,} on {device}"
    )


def _mapped(interval: Interval, function: Callable[[float], float]) -> Interval:
    """The interval of a monotone function of the value."""
    value = function(interval.value)
    if interval.low is None or interval.high is None:
        return Interval(value=value)
    low, high = sorted((function(interval.low), function(interval.high)))
    return Interval(value=value, low=low, high=high)


def _between(interval: Interval, number: str) -> str:
    """The interval in words."""
    if interval.low is None or interval.high is None:
        return " (too little data for an interval)"
    return f" (95 % interval: {interval.low:{number}} to {interval.high:{number}})"
