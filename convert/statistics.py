"""Second moments of one layer's queries, keys and values over calibration text, and what sharing heads would keep.

Shapes in one letter code: H query heads, G KV heads, N new KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headfold.convert.families import AttentionLayer, Rotary
from headfold.convert.grouping import Groups, adjacent_groups, pairwise_loss, similar_groups
from headfold.convert.merge import SharedHead, align_keys, align_values, fold_keys, fold_values, key_metric
from headfold.convert.settings import Grouping, Method
from headfold.convert.walk import AttentionCall


@dataclass
class LayerStatistics:
    """E[k k^T] (G*D, G*D), E[v v^T] (G*D, G*D), and per KV head the sum of E[q q^T] over its query heads (G, D, D).

    float64. `output_metric` (G, D, D) is the sum of Wo^T M Wo over the query heads of each KV head, where M is what an
    error of the output projection costs (sensitivity.py).
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    output_metric: Tensor
    rotary: Rotary
    num_tokens: int = 0

    @classmethod
    def empty(cls, layer: AttentionLayer, output: Tensor, metric: Tensor) -> LayerStatistics:
        """Nothing seen yet. output (E, H, D): the output projection; metric (E, E): what an error of it costs."""
        num_heads, head_dim = layer.num_key_value_heads, layer.head_dim
        size = num_heads * head_dim
        zeros = output.new_zeros(size, size, dtype=torch.float64)
        heads = output.double().movedim(1, 0)
        output_metric = (heads.mT @ metric @ heads).unflatten(0, (num_heads, -1)).sum(1)
        queries = zeros.new_zeros(num_heads, head_dim, head_dim)
        return cls(zeros, zeros.clone(), queries, output_metric, layer.rotary)

    def add(self, call: AttentionCall, first_token: int) -> None:
        """Count the tokens of a batch from position `first_token` on."""
        key, value = (x[:, :, first_token:].transpose(1, 2).flatten(0, 1).flatten(1) for x in (call.key, call.value))
        query = call.query[:, :, first_token:].transpose(0, 1).flatten(1, 2)
        new = len(key)
        total = self.num_tokens + new
        for mean, batch in (
            (self.keys, key.T @ key),
            (self.values, value.T @ value),
            (self.queries, (query.mT @ query).unflatten(0, (len(self.queries), -1)).sum(1)),
        ):
            mean.mul_(self.num_tokens / total).add_(batch.double(), alpha=1 / total)
        self.num_tokens = total

    def share(self, groups: Groups, method: Method) -> tuple[list[SharedHead], list[SharedHead]]:
        """The shared key and value heads of each group."""
        return [self._key(group, method) for group in groups], [self._value(group, method) for group in groups]

    def groups(self, num_groups: int, grouping: Grouping, method: Method) -> Groups:
        """N groups of KV heads: neighbours, or those that lose least when they share (K and V count alike)."""
        num_heads = len(self.queries)
        if grouping == "adjacent" or num_groups in (1, num_heads):
            return adjacent_groups(num_heads, num_groups)

        def lost(pair: list[int]) -> float:
            key, value = self._key(pair, method), self._value(pair, method)
            keys, values = self._energy(pair)
            all_keys, all_values = everything
            lost_keys = (1 - key.kept(self._gram(self.keys, pair), self._key_metric(pair))) * keys / all_keys
            lost_values = (
                (1 - value.kept(self._gram(self.values, pair), self.output_metric[pair])) * values / all_values
            )
            return lost_keys + lost_values

        everything = self._energy(list(range(num_heads)))
        return similar_groups(pairwise_loss(lost, num_heads), num_groups)

    def kept(self, groups: Groups, keys: list[SharedHead], values: list[SharedHead]) -> tuple[float, float]:
        """The shares of the energy of K, as the queries see it, and of V, as the output does, that are kept."""
        kept_keys = kept_values = 0.0
        for group, key, value in zip(groups, keys, values, strict=True):
            key_energy, value_energy = self._energy(group)
            kept_keys += key.kept(self._gram(self.keys, group), self._key_metric(group)) * key_energy
            kept_values += value.kept(self._gram(self.values, group), self.output_metric[group]) * value_energy
        all_keys, all_values = self._energy([head for group in groups for head in group])
        return kept_keys / all_keys, kept_values / all_values

    def _key(self, group: list[int], method: Method) -> SharedHead:
        gram = self._gram(self.keys, group)
        if method == "aligned":
            return align_keys(gram, len(group), self.rotary)
        return fold_keys(gram, self._key_metric(group), self.rotary)

    def _value(self, group: list[int], method: Method) -> SharedHead:
        gram = self._gram(self.values, group)
        return align_values(gram, len(group)) if method == "aligned" else fold_values(gram, self.output_metric[group])

    def _gram(self, gram: Tensor, group: list[int]) -> Tensor:
        """The Gram matrix of the stacked heads of a group."""
        num_heads = len(self.queries)
        blocks = gram.unflatten(1, (num_heads, -1)).unflatten(0, (num_heads, -1))
        return blocks[group][:, :, group].flatten(2).flatten(0, 1)

    def _key_metric(self, group: list[int]) -> Tensor:
        return key_metric(self.queries[group], self.rotary)

    def _energy(self, group: list[int]) -> tuple[float, float]:
        """The energy of the keys and of the values of a group, never zero."""
        tiny = torch.finfo(torch.float64).tiny
        keys = torch.block_diag(*self._key_metric(group)) * self._gram(self.keys, group)
        values = torch.block_diag(*self.output_metric[group]) * self._gram(self.values, group)
        return max(keys.sum().item(), tiny), max(values.sum().item(), tiny)
