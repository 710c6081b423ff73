"""Refits the queries and keys of shared heads to the logits of the original ones (docs/fold.md, equations 5 and 6).

Shapes in one letter code: W windows, T tokens, S sampled queries of a window, H query heads, N KV heads, D head_dim,
P rotary pairs, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headfold.convert.families import Rotary
from headfold.convert.weights import AttentionWeights

_FLOOR = 1e-3
"""Share of the mean that is added to the second moments of inputs, so that directions never seen stay put."""

_CHUNK_LOGITS = 1 << 20
"""Logits that are in memory at a time, beside those of the sample."""

_UNIFORM_SHARE = 0.25
"""Weight of all keys alike beside the attention probabilities: keys without attention must not come to get any."""

_CURVATURE_WINDOWS, _CURVATURE_QUERIES = 8, 16
"""Windows of a sample, and queries of each, on which the curvature is estimated that preconditions the refits."""


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
    variance of the difference of logits over the keys of a query (because softmax sees no offset), which are weighted
    mostly by the original attention, and for a part alike; it is the mean over queries and heads.
    """
    problem = _LogitProblem(sample, weights)
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

    The Hessian of either problem is near a Kronecker product: the second moments of what the unknown matrix reads, and
    those of what its output is multiplied by, both turned back by rotary. Its inverse preconditions.
    """

    def __init__(self, sample: LogitSample, weights: AttentionWeights):
        """Of weights, only the number of KV heads counts, and whether they have a bias."""
        self._sample = sample
        self._num_key_heads = len(weights.k)
        num_windows, num_heads, num_queries, num_keys = sample.products.shape
        size = max(1, _CHUNK_LOGITS // (num_heads * num_queries * num_keys))
        self._chunks = [slice(first, first + size) for first in range(0, num_windows, size)]
        self._num_queries = num_windows * num_queries
        self._weights = _weights(sample.products * sample.scaling)
        self._targets = sample.products.nan_to_num(neginf=0.0)
        # What the keys read: with a bias, a channel more that is always 1.
        has_bias = weights.k_bias is not None
        self._inputs = torch.nn.functional.pad(sample.inputs, (0, 1), value=1.0) if has_bias else sample.inputs
        self._input_moments = self._moments_of_inputs()

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

        change = _regress(gradient, self._key_moments(weights), second, strength, num_iterations)
        q = weights.q + change @ weights.q
        bias = None if weights.q_bias is None else weights.q_bias + (change @ weights.q_bias[:, :, None])[:, :, 0]
        return replace(weights, q=q, q_bias=bias)

    def refit_keys(self, weights: AttentionWeights, strength: float, num_iterations: int) -> AttentionWeights:
        """New rows (N, D, E) of the KV heads; the unknown is their change."""
        inputs = self._inputs
        queries = [self._queries(chunk, weights) for chunk in self._chunks]

        def gradient(change: Tensor | None) -> Tensor:
            """By the rows; with None that at the given weights, otherwise its linear part."""
            total = inputs.new_zeros(inputs.shape[2], self._num_key_heads * weights.k.shape[1])
            for chunk, chunk_queries in zip(self._chunks, queries, strict=True):
                keys = self._keys(chunk, weights) if change is None else self._projected_keys(inputs[chunk], change)
                products = self._products(chunk_queries, keys)
                residual = self._residual(chunk, products, with_target=change is None)
                back = self._by_key_head(residual).mT @ self._by_key_head(chunk_queries)
                back = self._rotate(back, self._sample.rotation.conj())
                total += inputs[chunk].flatten(0, 1).T @ back.transpose(1, 2).flatten(2).flatten(0, 1)
            return total.T.reshape(*weights.k.shape[:2], -1) / self._num_queries

        change = _regress(gradient, self._query_moments(weights), self._input_moments, strength, num_iterations)
        if weights.k_bias is None:
            return replace(weights, k=weights.k + change)
        return replace(weights, k=weights.k + change[:, :, :-1], k_bias=weights.k_bias + change[:, :, -1])

    def _moments_of_inputs(self) -> Tensor:
        """Second moments of what the keys read, weighted as the keys are: (E, E)."""
        weights = self._weights.sum(2).mean(1)
        weighted = ((self._inputs[chunk] * weights[chunk, :, None].sqrt()).flatten(0, 1) for chunk in self._chunks)
        return _with_floor(_total(rows.T @ rows for rows in weighted) / self._num_queries)

    def _key_moments(self, weights: AttentionWeights) -> Tensor:
        """Second moments (H, D, D) of the keys, around their mean under each query, as it meets them before rotary."""

        def rows(window: slice, some: slice, weight: Tensor) -> Tensor:
            keys = self._keys(window, weights)[0].repeat_interleave(len(weight) // self._num_key_heads, 0)
            centred = keys[:, None] - (weight @ keys)[:, :, None]
            back = self._query_rotation(window)[0, 0, some, None].conj()
            return self._rotate(weight.sqrt()[..., None] * centred, back)

        return self._mean_moments(rows)

    def _query_moments(self, weights: AttentionWeights) -> Tensor:
        """Second moments (N, D, D) of the queries of each KV head, as its keys meet them before rotary."""

        def rows(window: slice, some: slice, weight: Tensor) -> Tensor:
            queries = self._queries(window, weights)[0][:, some, None]
            return self._rotate(weight.sqrt()[..., None] * queries, self._sample.rotation.conj())

        return self._mean_moments(rows).unflatten(0, (self._num_key_heads, -1)).sum(1)

    def _mean_moments(self, rows: Callable[[slice, slice, Tensor], Tensor]) -> Tensor:
        """The mean over queries of sum_s x_s x_s^T (H, D, D), for x = rows(window, some of its queries, their weights)
        of (H, S, T, D); estimated on a few queries of a few windows."""
        num_windows, _, num_queries, _ = self._weights.shape
        windows = range(0, num_windows, max(1, num_windows // _CURVATURE_WINDOWS))
        some = slice(0, num_queries, max(1, num_queries // _CURVATURE_QUERIES))

        def moments(number: int) -> Tensor:
            x = rows(slice(number, number + 1), some, self._weights[number][:, some])
            return x.flatten(1, 2).mT @ x.flatten(1, 2) / x.shape[1]

        return _total(map(moments, windows)) / len(windows)

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

    def _rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        return rotate(x, rotation, self._sample.rotary)

    def _query_rotation(self, chunk: slice) -> Tensor:
        """(W, 1, S, P)."""
        return self._sample.rotation[self._sample.positions[chunk]][:, None]


def _regress(
    gradient: Callable[[Tensor | None], Tensor], curvature: Tensor, second: Tensor, strength: float, num_iterations: int
) -> Tensor:
    """The change X (..., D, F) of a matrix that takes the gradient to zero, in the ridge regression towards no change.

    The Hessian takes X to about curvature X second: the second moments (..., D, D) of what the matrix's output is
    multiplied by, and those of what it reads, (..., F, F). The inverse of this preconditions.
    """
    ridge = strength * curvature.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    left, right = _inverse(_with_floor(curvature, strength)), _inverse(second)
    return conjugate_gradients(
        lambda change: gradient(change) + ridge * change @ second,
        -gradient(None),
        lambda rest: left @ rest @ right,
        num_iterations,
    )


def _heads(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Projections of inputs (W, T, E) by heads (N, D, E): (W, N, T, D)."""
    projected = torch.nn.functional.linear(inputs, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return projected.unflatten(2, weight.shape[:2]).transpose(1, 2)


def _weights(logits: Tensor) -> Tensor:
    """The weight of each key for each query (..., T): what sums to one, most of it by attention."""
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


def _inverse(matrices: Tensor) -> Tensor:
    return torch.linalg.inv(matrices.double()).to(matrices)


def _with_floor(second: Tensor, share: float = _FLOOR) -> Tensor:
    """Second moments (..., C, C) with a small share of their mean on the diagonal."""
    mean = second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    floor = share * mean + torch.finfo(second.dtype).tiny
    return second + floor * torch.eye(second.shape[-1], dtype=second.dtype, device=second.device)


def _total(tensors: Iterable[Tensor]) -> Tensor:
    return sum(tensors)  # type: ignore[return-value]  # there is always one, so it is no int
