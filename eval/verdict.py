"""The report in one or two sentences, computed from its numbers, each with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        first = tasks[0]
        sentences.append(
            f"Going from {heads} changed {first.task} ({first.metric}) by {first.difference.value:+.3f}"
            f"{_between(first.difference, '{:+.3f}')}."
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
    before, after = f"{perplexity.before:.4g}", f"{perplexity.after:.4g}"
    percent = _mapped(ratio, lambda value: 100 * (value - 1))
    if percent.low is not None and percent.high is not None and percent.low <= 0 <= percent.high:
        end = f"{after}, which this text cannot tell from the original's {before}{_between(percent, '{:+.1f} %')}"
    else:
        flipped = percent.value < 0
        end = f"{after}, {abs(percent.value):.1f} % {'below' if flipped else 'above'} the original's {before}"
        end += _between(_mapped(percent, lambda value: -value) if flipped else percent, "{:.1f} %")
    if recovered is not None:
        share = _mapped(recovered, lambda value: 100 * value)
        return (
            f"Uptraining won back {share.value:.0f} %{_between(share, '{:.0f} %')} of the loss that going from {heads} "
            f"had cost; perplexity ends at {end}."
        )
    return f"Going from {heads} leaves perplexity at {end}."


def _cache(cache: CacheBytesPerToken) -> str:
    factor = cache.before / cache.after
    return f"The KV cache takes {factor:.3g} times less memory" if factor > 1 else "The KV cache takes as much memory"


def _speed(point: DecodePoint, device: str) -> str:
    speedup = point.speedup
    return (
        f"decoding is {speedup.median:.2f} times as fast ({speedup.low:.2f} to {speedup.high:.2f} over repetitions) "
        f"at batch {point.batch} and context {point.context} on {device}"
    )


def _mapped(interval: Interval, function: Callable[[float], float]) -> Interval:
    """The interval of a monotone function of the value."""
    value = function(interval.value)
    if interval.low is None or interval.high is None:
        return Interval(value=value)
    low, high = sorted((function(interval.low), function(interval.high)))
    return Interval(value=value, low=low, high=high)


def _between(interval: Interval, number: str) -> str:
    if interval.low is None or interval.high is None:
        return " (too little text for an interval)"
    return f" (95 % interval {number.format(interval.low)} to {number.format(interval.high)})"
