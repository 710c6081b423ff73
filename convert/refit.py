"""Least-squares refits of what stands before and behind shared heads. The derivation is in docs/fold.md.

Shapes in one letter code: W windows, T tokens, S sampled queries of a window, H query heads, N KV heads, D head_dim,
P rotary pairs, E hidden size, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from headfold.convert.families import Rotary
from headfold.convert.merge import pair_channels
from headfold.convert.weights import AttentionWeights

_FLOOR = 1e-3
"""Share of the mean that is added to the second moments of inputs, so that directions never seen stay put."""

_STRENGTHS = [10 ** (half / 2) for half in range(-6, 5)]
"""Strengths of ridge regression, 0.001 to 100, that held-out text may choose from."""

_MODERATE = 4
"""The number of 0.1 among them: where the search starts, and what is taken where nothing is held out."""

_GRAM_BLOCK = 512
"""Rows of a Gram matrix that are computed together."""

_ROWS = 1024
"""Rows of a matrix that are solved for together."""

_CHUNK_LOGITS = 1 << 20
"""Logits that are in memory at a time, beside those of the sample."""

_UNIFORM_SHARE = 0.5
"""Weight of all keys alike beside the attention probabilities: keys without attention must not come to get any."""


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


@dataclass
class LogitSample:
    """Some queries of every window, and the products q . k that the original heads had with all keys that they see."""

    inputs: Tensor
    """(W, T, E): what the projections read."""
    positions: Tensor
    """(W, S): where the queries stand."""
    products: Tensor
    """(W, H, S, T): q . k of the original heads, in the order of the new query heads; -inf where a query is blind."""
    rotation: Tensor
    """(T, P), complex: what rotary multiplies the pairs by at each position."""
    rotary: Rotary
    scaling: float
    """What the products are multiplied by to give the logits."""


def refit_logits(
    sample: LogitSample, weights: AttentionWeights, *, num_sweeps: int, strength: float, num_iterations: int
) -> tuple[AttentionWeights, float, float]:
    """New q and k whose products match those of the sample, and the error of the logits before and after.

    The query heads are mapped by a matrix (D, D) each, the KV heads are free; both in turn, num_sweeps times. Each is a
    linear least-squares problem (docs/fold.md, equations 5 and 6) that is drawn to what it starts from (`strength`, as
    a share of its own second moments) and solved by at most num_iterations of conjugate gradients. The error is the
    variance of the difference of logits over the keys of a query, weighted half by the original attention and half
    alike, because softmax sees no offset; it is the mean over queries and heads.
    """
    problem = _LogitProblem(sample, len(weights.k))
    before = problem.error(weights)
    for _ in range(num_sweeps):
        weights = problem.refit_queries(weights, strength, num_iterations)
        weights = problem.refit_keys(weights, strength, num_iterations)
    return weights, before, problem.error(weights)


class _LogitProblem:
    """The two quadratic problems of refit_logits, some windows at a time, so that memory is for their logits alone.

    With weights w_s that sum to one over the keys s of a query, the error of a query is sum_s w_s (d_s - mean_w d)^2
    for d_s = q . k_s - target. Its gradient by d is 2 r_s with r_s = w_s (d_s - mean_w d), by q it is 2 sum_s r_s k_s,
    and by k_s it is 2 sum over queries of r_s q; the rotary of each position comes between. Factors of 2 are left out.
    """

    def __init__(self, sample: LogitSample, num_key_heads: int):
        self._sample = sample
        self._num_key_heads = num_key_heads
        num_windows, num_heads, num_queries, num_keys = sample.products.shape
        size = max(1, _CHUNK_LOGITS // (num_heads * num_queries * num_keys))
        self._chunks = [slice(first, first + size) for first in range(0, num_windows, size)]
        self._num_queries = num_windows * num_queries
        self._weights = _weights(sample.products * sample.scaling)
        self._targets = sample.products.nan_to_num(neginf=0.0)

    def error(self, weights: AttentionWeights) -> float:
        total = 0.0
        for chunk in self._chunks:
            difference = self._products(self._queries(chunk, weights), self._keys(chunk, weights))
            weight = self._weights[chunk]
            difference -= self._targets[chunk]
            difference -= (weight * difference).sum(-1, keepdim=True)
            total += (weight * difference.square_()).sum().item()
        return total * self._sample.scaling**2 / (self._num_queries * len(weights.q))

    def refit_queries(self, weights: AttentionWeights, strength: float, num_iterations: int) -> AttentionWeights:
        """Maps (H, D, D) of the query heads; the unknown is their difference from the identity."""
        raw = [self._raw_queries(chunk, weights) for chunk in self._chunks]
        keys = [self._keys(chunk, weights) for chunk in self._chunks]
        second = _with_floor(_total((q.mT @ q).sum(0) for q in raw) / self._num_queries)
        spread = self._average_pairs(_total(map(self._key_spread, self._chunks, keys)) / self._num_queries)
        ridge = strength * spread.mean(1)[:, None, None]

        def gradient(maps: Tensor | None) -> Tensor:
            """By the maps; with None that at the identity, otherwise its linear part."""
            total = torch.zeros_like(second)
            for chunk, chunk_raw, chunk_keys in zip(self._chunks, raw, keys, strict=True):
                rotation = self._query_rotation(chunk)
                mapped = self._rotate(chunk_raw if maps is None else chunk_raw @ maps.mT, rotation)
                products = self._products(mapped, chunk_keys)
                residual = self._residual(chunk, products, with_target=maps is None)
                back = (self._by_key_head(residual) @ chunk_keys).view_as(mapped)
                total += (self._rotate(back, rotation.conj()).mT @ chunk_raw).sum(0)
            return total / self._num_queries

        inverse = torch.linalg.inv(second.double()).to(second)
        scale = 1 / (spread[:, :, None] + ridge)
        change = conjugate_gradients(
            lambda maps: gradient(maps) + ridge * maps @ second,
            -gradient(None),
            lambda rest: scale * rest @ inverse,
            num_iterations,
        )
        q = weights.q + change @ weights.q
        bias = None if weights.q_bias is None else weights.q_bias + (change @ weights.q_bias[:, :, None])[:, :, 0]
        return replace(weights, q=q, q_bias=bias)

    def refit_keys(self, weights: AttentionWeights, strength: float, num_iterations: int) -> AttentionWeights:
        """New rows (N, D, E) of the KV heads; the unknown is their change."""
        has_bias = weights.k_bias is not None
        inputs = torch.nn.functional.pad(self._sample.inputs, (0, 1), value=1.0) if has_bias else self._sample.inputs
        queries = [self._queries(chunk, weights) for chunk in self._chunks]
        flat = inputs.flatten(0, 1)
        second = _with_floor(flat.T @ flat / len(flat))
        energy = _total(q.square().sum((0, 2)) for q in queries) / self._num_queries
        spread = self._average_pairs(energy.unflatten(0, (self._num_key_heads, -1)).sum(1))
        ridge = strength * spread.mean(1)[:, None, None]

        def gradient(change: Tensor | None) -> Tensor:
            """By the rows; with None that at the given weights, otherwise its linear part."""
            total = inputs.new_zeros(inputs.shape[2], spread.numel())
            for chunk, chunk_queries in zip(self._chunks, queries, strict=True):
                keys = self._keys(chunk, weights) if change is None else self._projected_keys(inputs[chunk], change)
                products = self._products(chunk_queries, keys)
                residual = self._residual(chunk, products, with_target=change is None)
                back = self._by_key_head(residual).mT @ self._by_key_head(chunk_queries)
                back = self._rotate(back, self._sample.rotation.conj())
                total += inputs[chunk].flatten(0, 1).T @ back.transpose(1, 2).flatten(2).flatten(0, 1)
            return total.T.reshape(*spread.shape, -1) / self._num_queries

        inverse = torch.linalg.inv(second.double()).to(second)
        scale = 1 / (spread[:, :, None] + ridge)
        change = conjugate_gradients(
            lambda rows: gradient(rows) + ridge * rows @ second,
            -gradient(None),
            lambda rest: scale * rest @ inverse,
            num_iterations,
        )
        if weights.k_bias is None:
            return replace(weights, k=weights.k + change)
        return replace(weights, k=weights.k + change[:, :, :-1], k_bias=weights.k_bias + change[:, :, -1])

    def _raw_queries(self, chunk: slice, weights: AttentionWeights) -> Tensor:
        """(W, H, S, D), before rotary."""
        at = self._sample.positions[chunk]
        windows = torch.arange(len(at), device=at.device)[:, None]
        return _heads(self._sample.inputs[chunk][windows, at], weights.q, weights.q_bias).contiguous()

    def _queries(self, chunk: slice, weights: AttentionWeights) -> Tensor:
        return self._rotate(self._raw_queries(chunk, weights), self._query_rotation(chunk))

    def _keys(self, chunk: slice, weights: AttentionWeights) -> Tensor:
        """(W, N, T, D), after rotary."""
        return self._projected_keys(self._sample.inputs[chunk], weights.k, weights.k_bias)

    def _projected_keys(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._rotate(_heads(inputs, weight, bias), self._sample.rotation)

    def _products(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(W, H, S, T)."""
        return (self._by_key_head(queries) @ keys.mT).view(*queries.shape[:3], -1)

    def _by_key_head(self, x: Tensor) -> Tensor:
        """(W, H, S, ...) as (W, N, H/N*S, ...): one large product for each KV head in place of a small one per query
        head."""
        return x.reshape(len(x), self._num_key_heads, -1, x.shape[-1])

    def _residual(self, chunk: slice, products: Tensor, *, with_target: bool) -> Tensor:
        """The residuals r of the products (W, H, S, T), in their place."""
        weight = self._weights[chunk]
        if with_target:
            products -= self._targets[chunk]
        products -= (weight * products).sum(-1, keepdim=True)
        return products.mul_(weight)

    def _key_spread(self, chunk: slice, keys: Tensor) -> Tensor:
        """The variance of the keys under the weights of each query, summed over queries: (H, D)."""
        weight = self._weights[chunk]
        by_key_head = self._by_key_head(weight)
        variance = by_key_head @ keys.square() - (by_key_head @ keys).square()
        return variance.view(*weight.shape[:3], -1).sum((0, 2))

    def _average_pairs(self, spread: Tensor) -> Tensor:
        real, imaginary = pair_channels(self._sample.rotary, spread.device)
        mean = (spread[:, real] + spread[:, imaginary]) / 2
        spread = spread.clone()
        spread[:, real] = spread[:, imaginary] = mean
        return spread

    def _rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        return rotate(x, rotation, self._sample.rotary)

    def _query_rotation(self, chunk: slice) -> Tensor:
        """(W, 1, S, P)."""
        return self._sample.rotation[self._sample.positions[chunk]][:, None]


def _heads(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Projections of inputs (W, T, E) by heads (N, D, E): (W, N, T, D)."""
    projected = torch.nn.functional.linear(inputs, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return projected.unflatten(2, weight.shape[:2]).transpose(1, 2)


def _weights(logits: Tensor) -> Tensor:
    """The weight of each key for each query (..., T): what sums to one, half of it by attention."""
    visible = logits.isfinite().to(logits.dtype)
    alike = visible / visible.sum(-1, keepdim=True)
    return (1 - _UNIFORM_SHARE) * logits.softmax(-1) + _UNIFORM_SHARE * alike


def rotate(x: Tensor, rotation: Tensor, rotary: Rotary) -> Tensor:
    """Heads (..., T, D) with their rotary pairs multiplied by complex numbers (T, P)."""
    if rotary.kind == "none":
        return x
    # Slices, because indexing with the numbers of the channels would copy them one by one.
    size, half = rotary.num_channels, rotary.num_channels // 2
    real, imaginary = (
        (slice(half), slice(half, size)) if rotary.kind == "half" else (slice(0, size, 2), slice(1, size, 2))
    )
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned[..., size:] = x[..., size:]
    turned[..., real] = x[..., real] * rotation.real - x[..., imaginary] * rotation.imag
    turned[..., imaginary] = x[..., imaginary] * rotation.real + x[..., real] * rotation.imag
    return turned


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    target: Tensor,
    precondition: Callable[[Tensor], Tensor],
    num_iterations: int,
) -> Tensor:
    """Solves apply(x) = target from x = 0 for a batch of matrices, each with its own steps.

    `apply` and `precondition` are linear, symmetric and positive definite on each matrix of the batch. Matrices whose
    residual has fallen by a factor of 1000 in the preconditioned norm stop moving.
    """
    solution, rest = torch.zeros_like(target), target.clone()
    step = direction = precondition(rest)
    size = first = _dots(rest, step)
    for _ in range(num_iterations):
        moving = size > first * 1e-6
        if not moving.any():
            break
        applied = apply(direction)
        length = torch.where(moving, size / _dots(direction, applied).clamp_min(torch.finfo(size.dtype).tiny), 0.0)
        solution = solution + length * direction
        rest = rest - length * applied
        step = precondition(rest)
        new_size = _dots(rest, step)
        direction = step + torch.where(moving, new_size / size.clamp_min(torch.finfo(size.dtype).tiny), 0.0) * direction
        size = torch.where(moving, new_size, size)
    return solution


def _dots(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum((-2, -1), keepdim=True)


def _with_floor(second: Tensor) -> Tensor:
    """Second moments (..., C, C) with a small share of their mean on the diagonal."""
    mean = second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    floor = _FLOOR * mean + torch.finfo(second.dtype).tiny
    return second + floor * torch.eye(second.shape[-1], dtype=second.dtype, device=second.device)


def _total(tensors: Iterable[Tensor]) -> Tensor:
    return sum(tensors)  # type: ignore[return-value]  # there is always one, so it is no int
