"""Samples the logits of a layer's original heads, for the refit of the new ones.

Shapes in one letter code: W windows, B windows of a batch, T tokens, S sampled queries of a window, H query heads,
G KV heads, D head_dim, P rotary pairs, E hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headfold.convert.errors import RefusedError
from headfold.convert.families import AttentionLayer
from headfold.convert.grouping import Groups, query_order
from headfold.convert.logits import LogitSample, rotate
from headfold.convert.merge import pair_channels
from headfold.convert.walk import AttentionCall
from headfold.convert.weights import AttentionWeights

_NUM_QUERIES = 4096
"""Queries that are sampled from all windows together."""

_MAX_WINDOWS = 64
"""Windows that queries are sampled from: their inputs and logits are in memory together."""

_ROTARY_TOLERANCE = 1e-3


class LogitSampler:
    """Gathers the LogitSample of one layer from the calls of its original attention, on two streams of hidden states.

    The logits are those on the original stream: what the model had before any layer was converted. The queries and keys
    that are to match them are computed from the converted one.
    """

    def __init__(self, layer: AttentionLayer, weights: AttentionWeights, windows: Tensor, first: int, seed: int):
        """windows (W, T) are sampled from position `first` on; weights are the original ones."""
        num_windows, length = windows.shape
        self._layer = layer
        self._weights = weights
        num_sampled = min(num_windows, _MAX_WINDOWS)
        self._sampled = {number * num_windows // num_sampled: number for number in range(num_sampled)}
        num_queries = min(length - first, math.ceil(_NUM_QUERIES / num_sampled))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer.index)
        order = torch.rand(num_sampled, length - first, generator=generator).argsort(1)
        self._positions = order[:, :num_queries].sort(1).values + first
        self._inputs: list[Tensor] = []
        self._products: list[Tensor] = []
        self._rotation: Tensor | None = None
        self._scaling = 1.0

    def add_inputs(self, call: AttentionCall, inputs: Tensor, batch: slice) -> None:
        """Sample the windows of a batch of the converted stream; inputs (B, T, E) are what the projections read."""
        if self._rotation is None:
            self._rotation = self._measure_rotation(call, inputs)
        self._inputs += [inputs[row] for row, _ in self._rows(batch, len(inputs))]

    def add_logits(self, call: AttentionCall, batch: slice) -> None:
        """Sample the windows of a batch of the original stream."""
        self._scaling = call.scaling
        blind = call.mask <= torch.finfo(call.mask.dtype).min / 2
        for row, number in self._rows(batch, len(call.query)):
            at = self._positions[number].to(call.query.device)
            query = call.query[row][:, at].unflatten(0, (call.key.shape[1], -1))
            products = (query @ call.key[row][:, None].mT).flatten(0, 1)
            mask = blind[min(row, len(blind) - 1)][:, at]
            self._products.append(products.masked_fill(mask, -torch.inf))

    def _rows(self, batch: slice, num_rows: int) -> list[tuple[int, int]]:
        """The rows of a batch that are sampled, each with its number in the sample."""
        numbers = ((row, self._sampled.get(batch.start + row)) for row in range(num_rows))
        return [(row, number) for row, number in numbers if number is not None]

    def sample(self, groups: Groups) -> LogitSample:
        """What was gathered, the heads in the order of the groups."""
        assert self._rotation is not None
        order = query_order(groups, self._layer.group_size)
        return LogitSample(
            inputs=torch.stack(self._inputs),
            positions=self._positions.to(self._inputs[0].device),
            products=torch.stack(self._products)[:, order],
            rotation=self._rotation,
            rotary=self._layer.rotary,
            scaling=self._scaling,
        )

    def _measure_rotation(self, call: AttentionCall, inputs: Tensor) -> Tensor:
        """What the model multiplies the pairs of q and k by at each position, from both sides of its rotary: (T, P).

        Raises RefusedError if the pairs are not those that the layer is described with.
        """
        real, imaginary = pair_channels(self._layer.rotary, inputs.device)

        def projected(weight: Tensor, bias: Tensor | None) -> Tensor:
            heads = inputs[:, None] @ weight.mT
            return heads if bias is None else heads + bias[:, None]

        weights = self._weights
        before = torch.cat([projected(weights.q, weights.q_bias), projected(weights.k, weights.k_bias)], dim=1)
        after = torch.cat([call.query, call.key], dim=1)
        old = torch.complex(before[..., real], before[..., imaginary])
        new = torch.complex(after[..., real], after[..., imaginary])
        products, energy = (new * old.conj()).sum((0, 1)), old.abs().square().sum((0, 1))
        rotation = torch.where(energy > 0, products / energy.clamp_min(torch.finfo(energy.dtype).tiny), 1.0)
        expected = rotate(before, rotation, self._layer.rotary)
        if not (after - expected).norm() <= _ROTARY_TOLERANCE * after.norm():
            raise RefusedError(
                f"layer {self._layer.index} does not rotate its queries and keys in {self._layer.rotary.kind} pairs of "
                f"{self._layer.rotary.num_channels} channels as described, so that they cannot be folded. "
                "Use --method mean or first"
            )
        return rotation
