"""Ridge regression by normal equations, for the refits of the output projection and the MLP (docs/fold.md, 7 and 8).

Shapes in one letter code: F features, E outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

_STRENGTHS = [10 ** (half / 2) for half in range(-6, 5)]
"""Strengths of ridge regression, 0.001 to 100, that held-out text may choose from."""

_MODERATE = 4
"""The number of 0.1 among them: where the search starts, and what is taken where nothing is held out."""

_GRAM_BLOCK = 512
"""Rows of a Gram matrix that are computed together."""

_ROWS = 1024
"""Rows of a matrix that are solved for together."""


class NormalEquations:
    """Gathers E[f f^T] (F, F) and E[y f^T] (E, F) over batches, to solve for the matrix that takes f to y. float64."""

    def __init__(self, num_features: int, num_outputs: int, device: torch.device | str = "cpu"):
        self._features = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self._products = torch.zeros(num_outputs, num_features, dtype=torch.float64, device=device)
        self._targets = 0.0

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Count the rows of features (..., F) with their targets (..., E)."""
        features, targets = features.flatten(0, -2), targets.flatten(0, -2)
        for first in range(0, features.shape[1], _GRAM_BLOCK):  # left of the diagonal it is known by symmetry
            rows, rest = slice(first, first + _GRAM_BLOCK), slice(first, None)
            products = features[:, rows].T @ features[:, rest]
            self._features[rows, rest] += products
            self._features[first + _GRAM_BLOCK :, rows] += products[:, _GRAM_BLOCK:].T
        self._products += targets.T @ features
        self._targets += targets.double().pow(2).sum().item()

    def solve(self, prior: Tensor, strength: float) -> Tensor:
        """The W (E, F) with the least E|y - W f|^2 + strength * E[f_i^2] |W - prior|^2, in the dtype of `prior`.

        Ridge regression towards `prior`; E[f_i^2] is the mean over all features, so that `strength` has no unit.
        """
        diagonal = self._features.diagonal()
        moments = diagonal.clone()
        ridge = strength * moments.mean() + torch.finfo(torch.float64).tiny
        while True:
            diagonal.copy_(moments + ridge)  # in place: of a large MLP the matrix has a gigabyte
            factor, failed = torch.linalg.cholesky_ex(self._features)
            diagonal.copy_(moments)
            if not failed:
                break
            ridge = 10 * ridge  # it is below the rounding of the moments
        solution = torch.empty_like(prior)
        for products, start, rows in self._by_rows(prior, solution):
            # Not cholesky_solve, which copies the factor.
            halfway = torch.linalg.solve_triangular(factor, (products + ridge * start.double()).T, upper=False)
            rows.copy_(torch.linalg.solve_triangular(factor.T, halfway, upper=True).T)
        return solution

    def include(self, other: NormalEquations) -> None:
        """Count the rows of `other` as well."""
        self._features += other._features
        self._products += other._products
        self._targets += other._targets

    def error(self, weight: Tensor) -> float:
        """E|y - W f|^2 of a matrix (E, F), summed over all rows."""
        squares = self._targets
        for products, rows in self._by_rows(weight):
            rows = rows.double()
            squares += ((rows @ self._features - 2 * products) * rows).sum().item()
        return max(squares, 0.0)

    def _by_rows(self, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The products and matrices (E, F) some rows at a time, so that little is needed beside the moments."""
        return zip(*(matrix.split(_ROWS) for matrix in (self._products, *matrices)), strict=True)


def solve_with_held_out(fitted: NormalEquations, held_out: NormalEquations, prior: Tensor) -> tuple[Tensor, float]:
    """The solution on all rows, and its strength: that with which a fit to `fitted` has the least error on `held_out`.

    What calibration text says about a direction holds for other text only as far as there was enough of it. The
    search goes downhill in steps of ten, then of the square root of ten. Afterwards `fitted` counts all rows.
    """

    @cache
    def error(number: int) -> float:
        return held_out.error(fitted.solve(prior, _STRENGTHS[number]))

    chosen = _MODERATE
    for step in (2, 1):
        while True:
            around = (number for number in (chosen, chosen - step, chosen + step) if 0 <= number < len(_STRENGTHS))
            best = min(around, key=error)
            if best == chosen:
                break
            chosen = best
    fitted.include(held_out)
    return fitted.solve(prior, _STRENGTHS[chosen]), _STRENGTHS[chosen]
