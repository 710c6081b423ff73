"""How the heads of each layer come to be shared, and the statistics that this rests on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from headfold.convert.families import AttentionLayer
from headfold.convert.grouping import Groups
from headfold.convert.sensitivity import output_metric
from headfold.convert.settings import Grouping, Method
from headfold.convert.statistics import LayerStatistics
from headfold.convert.streams import NUM_SINKS, Streams, name_in_block
from headfold.convert.walk import AttentionCall
from headfold.convert.weights import AttentionWeights

_METRIC_TOKENS = 2048
"""Tokens on which it is measured what an error of the output projection costs."""


@dataclass(frozen=True)
class Sharing:
    """What was asked for. The seed is that of every draw on the way."""

    num_key_value_heads: int
    method: Method
    grouping: Grouping
    seed: int

    def share(
        self, statistics: LayerStatistics, weights: AttentionWeights
    ) -> tuple[AttentionWeights, Groups, dict[str, Any]]:
        """The weights with shared heads, the groups, and the record of both."""
        groups = statistics.groups(self.num_key_value_heads, self.grouping, self.method)
        keys, values = statistics.share(groups, self.method)
        kept_keys, kept_values = statistics.kept(groups, keys, values)
        record: dict[str, Any] = {"key_energy_kept": kept_keys, "value_energy_kept": kept_values}
        if self.grouping == "similar":
            record["groups"] = groups
        return weights.share(groups, keys, values), groups, record


def gather_statistics(
    layer: AttentionLayer,
    weights: AttentionWeights,
    streams: Streams,
    stream: Tensor,
    also: Callable[[AttentionCall, Tensor, slice], None] | None = None,
    *,
    seed: int,
) -> LayerStatistics:
    """On a stream (W, T, E); the layer's block is loaded. What `Streams.watch` tells is passed on to `also`."""
    some_windows = slice(0, None, math.ceil(streams.windows.numel() / _METRIC_TOKENS))
    metric = output_metric(
        streams.model.blocks[layer.index],
        partial(streams.model.run, layer.index),
        streams.load(stream, some_windows),
        name_in_block(layer.o.weight),
        first_token=NUM_SINKS,
        seed=seed,
    )
    statistics = LayerStatistics.empty(layer, weights.o, metric)

    def listen(call: AttentionCall, inputs: Tensor, batch: slice) -> None:
        statistics.add(call, NUM_SINKS)
        if also is not None:
            also(call, inputs, batch)

    streams.watch(layer, stream, listen)
    return statistics
