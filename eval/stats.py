"""Uncertainty of paired comparisons.

Both models score the same text, or answer the same items, so every difference is taken unit by unit before anything is
averaged: what makes a unit hard for both cancels. A unit is what can be taken to vary independently: a document, or a
window where there are few documents; never a token, since neighbouring tokens share their fate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .schema import Interval

Array = npt.NDArray[np.float64]
_RESAMPLES_AT_ONCE = 128


def bootstrap(
    units: npt.ArrayLike, statistic: Callable[[Array], Array], *, num_samples: int, seed: int, level: float = 0.95
) -> Interval:
    """A statistic of sums over units, with its percentile interval from resampling whole units with replacement.

    units: (number of units, K), what each unit adds to K sums. statistic: from sums (R, K) to values (R,). The interval
    is open with fewer than two units, or where the statistic is not finite for some resample.
    Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    values = np.asarray(units, dtype=np.float64)
    value = float(statistic(values.sum(axis=0, keepdims=True))[0])
    num_units = len(values)
    if num_units < 2:
        return Interval(value=value)
    generator = np.random.default_rng(seed)
    shares = np.full(num_units, 1 / num_units)
    results = []
    for start in range(0, num_samples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, num_samples - start)
        counts = generator.multinomial(num_units, shares, size=size)  # (R, units): how often each was drawn
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            results.append(statistic(counts @ values))
    resampled = np.concatenate(results)
    if not np.isfinite(resampled).all():
        return Interval(value=value)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value=value, low=float(low), high=float(high))


def ratio_with_standard_error(sums: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[float, float | None]:
    """sum(sums) / sum(counts) and its standard error, from the spread between units of unequal size.

    The linearised ratio estimator: Cochran, Sampling Techniques (1977), equation 2.46. With per-unit differences of
    negative log-likelihood as `sums` and tokens as `counts` this is mean ln(perplexity ratio), as llama.cpp reports it,
    but with units that are independent. The error is None with fewer than two units.
    """
    totals, sizes = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    ratio = float(totals.sum() / sizes.sum())
    num_units = len(totals)
    if num_units < 2:
        return ratio, None
    residuals = totals - ratio * sizes
    variance = num_units / (num_units - 1) * float(residuals @ residuals) / float(sizes.sum()) ** 2
    return ratio, math.sqrt(variance)


def mcnemar_p_value(num_lost: int, num_won: int) -> float:
    """Two-sided exact p-value that two models are equally often right, given the items where they differ.

    num_lost: items that only the first model got right; num_won: only the second. Under the null hypothesis each of
    them is a fair coin (McNemar 1947, in the exact binomial form). 1.0 when they never differ.
    """
    n, fewer = num_lost + num_won, min(num_lost, num_won)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


def quantile(values: Sequence[float] | Array, share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))
