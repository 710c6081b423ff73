"""The projections of one attention layer as heads, whatever the layout they are stored in.

Shapes in one letter code: H query heads, G KV heads, N new KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headfold.convert.families import AttentionLayer, Projection
from headfold.convert.grouping import Groups, query_order
from headfold.convert.merge import SharedHead

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint


@dataclass(frozen=True)
class AttentionWeights:
    """q (H, D, E), k and v (G, D, E), o (E, H, D), and the biases of q (H, D), k and v (G, D) where there are any.

    o's bias belongs to no head and never changes. sinks (H): learned logits that gpt-oss adds, one per query head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint, layer: AttentionLayer) -> AttentionWeights:
        """The weights of a layer, in float32."""

        def wide(name: str, rows: tuple[int, int] | None = None) -> Tensor:
            return checkpoint.read(name, rows).float()

        def heads(projection: Projection, num_heads: int) -> tuple[Tensor, Tensor | None]:
            rows = (projection.first_row, projection.first_row + num_heads * layer.head_dim)
            bias = None if projection.bias is None else wide(projection.bias, rows).unflatten(0, (num_heads, -1))
            return wide(projection.weight, rows).unflatten(0, (num_heads, -1)), bias

        q, q_bias = heads(layer.q, layer.num_attention_heads)
        k, k_bias = heads(layer.k, layer.num_key_value_heads)
        v, v_bias = heads(layer.v, layer.num_key_value_heads)
        o = wide(layer.o.weight).unflatten(1, (layer.num_attention_heads, -1))
        sinks = _sinks_name(layer)
        return cls(q, k, v, o, q_bias, k_bias, v_bias, wide(sinks) if sinks in checkpoint.tensors else None)

    def tensors(self, layer: AttentionLayer) -> dict[str, Tensor]:
        """The weights as they are stored: matrices and vectors by name, q, k and v in one where they are fused."""
        stored: dict[str, Tensor] = {layer.o.weight: self.o.flatten(1)}
        for projection, weight, bias in (
            (layer.q, self.q, self.q_bias),
            (layer.k, self.k, self.k_bias),
            (layer.v, self.v, self.v_bias),
        ):
            for name, heads in ((projection.weight, weight), (projection.bias, bias)):
                if name is not None and heads is not None:
                    rows = heads.flatten(0, 1)
                    stored[name] = torch.cat([stored[name], rows]) if name in stored else rows
        if self.sinks is not None:
            stored[_sinks_name(layer)] = self.sinks
        return stored

    def share(self, groups: Groups, keys: list[SharedHead], values: list[SharedHead]) -> AttentionWeights:
        """The weights with one KV head per group: N KV heads, the query heads in the order of the groups.

        What encodes a group multiplies its rows of k and v; what restores its heads goes into q and o.
        """
        num_queries = len(self.q) // len(self.k)
        order = query_order(groups, num_queries)
        head_dim = self.q.shape[1]

        def encoded(heads: Tensor, shared: list[SharedHead]) -> Tensor:
            pairs = zip(groups, shared, strict=True)
            return torch.stack([(one.encode @ heads[group].double().flatten(0, 1)).to(heads) for group, one in pairs])

        def decoders(shared: list[SharedHead]) -> Tensor:
            """(H, D, D), in the new order of the query heads."""
            decode = torch.stack([one.decode for one in shared]).view(len(self.k), head_dim, head_dim)
            return decode.repeat_interleave(num_queries, 0)

        key_decoders, value_decoders = decoders(keys), decoders(values)

        def decoded(heads: Tensor) -> Tensor:
            return torch.einsum("hde,hd...->he...", key_decoders, heads[order].double()).to(heads)

        return AttentionWeights(
            q=decoded(self.q),
            k=encoded(self.k, keys),
            v=encoded(self.v, values),
            o=torch.einsum("ehd,hdc->ehc", self.o[:, order].double(), value_decoders).to(self.o),
            q_bias=None if self.q_bias is None else decoded(self.q_bias),
            k_bias=None if self.k_bias is None else encoded(self.k_bias, keys),
            v_bias=None if self.v_bias is None else encoded(self.v_bias, values),
            sinks=None if self.sinks is None else self.sinks[order],
        )

    def to(self, device: torch.device) -> AttentionWeights:
        """The same on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def rounded(self, dtype: torch.dtype) -> AttentionWeights:
        """The values that are left when the weights are stored in a dtype, in the dtype they have."""
        return self._each(lambda tensor: tensor.to(dtype).to(tensor.dtype))

    def _each(self, function: Callable[[Tensor], Tensor]) -> AttentionWeights:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(value) for name, value in values.items() if value is not None})

    def expanded(self, num_key_value_heads: int) -> AttentionWeights:
        """The same function with more KV heads: each one repeated for its query heads."""
        times = num_key_value_heads // len(self.k)

        def repeated(heads: Tensor | None) -> Tensor | None:
            return None if heads is None else heads.repeat_interleave(times, 0)

        return replace(
            self,
            k=self.k.repeat_interleave(times, 0),
            v=self.v.repeat_interleave(times, 0),
            k_bias=repeated(self.k_bias),
            v_bias=repeated(self.v_bias),
        )


def _sinks_name(layer: AttentionLayer) -> str:
    return layer.o.weight.rsplit(".", 2)[0] + ".sinks"
