"""Intervals, standard errors and tests against independent references."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from headfold.eval.stats import bootstrap, mcnemar_p_value, quantile, ratio_with_standard_error


def mean(sums: np.ndarray) -> np.ndarray:
    return sums[:, 0] / sums[:, 1]


def test_bootstrap_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(5, 2, 400)
    interval = bootstrap(np.stack([values, np.ones(400)], axis=1), mean, num_samples=4000, seed=1)
    error = values.std(ddof=1) / 20
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert interval.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        sizes = generator.integers(1, 9, 60)
        units = np.stack([sizes * generator.normal(1, 1, 60), sizes], axis=1)
        interval = bootstrap(units, mean, num_samples=400, seed=trial)
        hits += interval.low <= 1 <= interval.high
    assert 178 <= hits <= 199


def test_bootstrap_is_reproducible_and_open_where_it_cannot_tell() -> None:
    units = np.random.default_rng(0).normal(size=(20, 1))
    draw = [bootstrap(units, lambda sums: sums[:, 0], num_samples=300, seed=seed) for seed in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]
    assert bootstrap([[3.0, 2.0]], mean, num_samples=100, seed=0).low is None
    # Some resamples hold no unit that counts: a ratio over nothing.
    assert bootstrap([[1.0, 0.0], [1.0, 1.0]], mean, num_samples=100, seed=0).high is None


def test_standard_error_of_a_ratio_with_equal_units_is_that_of_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=50)
    ratio, error = ratio_with_standard_error(4 * values, np.full(50, 4.0))
    assert ratio == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / math.sqrt(50))


def test_standard_error_of_a_ratio_is_the_spread_over_repeated_texts() -> None:
    """Texts drawn anew, with documents of very unequal length: the estimated error is the real one."""
    generator = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(600):
        sizes = generator.integers(1, 50, 80).astype(float)
        sums = sizes * (2 + generator.normal(0, 0.5, 80))
        ratio, error = ratio_with_standard_error(sums, sizes)
        ratios.append(ratio)
        errors.append(error)
    assert np.std(ratios) == pytest.approx(np.mean(errors), rel=0.1)
    assert ratio_with_standard_error([3.0], [2.0]) == (1.5, None)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (3, 1), (2, 2), (0, 9), (7, 4)])
def test_mcnemar_counts_all_ways_in_which_coins_fall(lost: int, won: int) -> None:
    outcomes = [sum(coins) for coins in product((0, 1), repeat=lost + won)]
    expected = sum(min(heads, lost + won - heads) <= min(lost, won) for heads in outcomes) / len(outcomes)
    assert mcnemar_p_value(lost, won) == pytest.approx(expected)


def test_mcnemar_with_many_items() -> None:
    assert mcnemar_p_value(2000, 2000) == 1.0
    # Normal approximation with continuity correction.
    z = (abs(2100 - 1900) - 1) / math.sqrt(4000)
    assert mcnemar_p_value(2100, 1900) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.02)


def test_quantile() -> None:
    assert quantile(list(range(101)), 0.9) == 90
    assert quantile([1.0, 2.0], 0.5) == 1.5
