"""Folds a model's KV heads layer by layer, on what calibration text does in it. The derivation is in docs/fold.md.

Two streams of hidden states walk through the model side by side: the original one, and the converted one, which every
layer receives from the converted layers before it. For each layer, with the weights of its block alone in memory:

1. gather second moments of its queries, keys and values on the converted stream (statistics.py), the logits of some
   queries there, and what the original attention makes of the original stream;
2. share K and V in closed form (merge.py) within the groups (grouping.py);
3. refit queries and keys to the logits, and the output projection so that the converted stream comes out where the
   original one does (refit.py);
4. move both streams on.

Shapes in one letter code: W windows, B windows of a batch, T tokens, S sampled queries of a window, H query heads,
G KV heads, N new KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headfold.convert.dataflow import BlockPaths, trace_block
from headfold.convert.errors import RefusedError
from headfold.convert.families import AttentionLayer
from headfold.convert.grouping import Groups
from headfold.convert.merge import pair_channels
from headfold.convert.refit import LogitSample, NormalEquations, refit_logits, rotate
from headfold.convert.settings import Grouping, Method
from headfold.convert.statistics import LayerStatistics
from headfold.convert.walk import AttentionCall, Stop, StreamedModel
from headfold.convert.weights import AttentionWeights

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint

Folded = tuple[AttentionLayer, dict[str, Tensor], dict[str, Any]]

NUM_SINKS = 8
"""Positions at the start of a window that no statistic counts: their huge activations would drown all others."""

_BATCH_TOKENS = 4096
_NUM_QUERIES = 8192
_MAX_REFIT_WINDOWS = 128
_NUM_SWEEPS = 3
_NUM_ITERATIONS = 20
_LOGIT_STRENGTH = 1e-2
_OUTPUT_STRENGTH = 1e-2
_ROTARY_TOLERANCE = 1e-3
_MAX_MEMORY_BYTES = 1 << 30
"""Hidden states of one stream that are larger than this are kept in a file instead."""


def refuse_calibration(layers: list[AttentionLayer]) -> None:
    """Raises RefusedError if heads of these layers cannot be turned onto each other without changing the model."""
    for layer in layers:
        norm = layer.k_norm or layer.q_norm
        if norm is not None:
            raise RefusedError(
                f"fold and aligned cannot convert this model: {norm.weight} normalises its heads after the projection, "
                "so that no head can be turned onto another before it. Use --method mean or first"
            )
        if layer.clip_qkv is not None:
            raise RefusedError(
                f"fold and aligned cannot convert this model: clip_qkv ({layer.clip_qkv}) clips every channel after "
                "the projection, so that no head can be turned onto another before it. Use --method mean or first"
            )
        if layer.rotary.kind == "unknown":
            raise RefusedError(
                "fold and aligned cannot convert this model: its family is not declared, so that it is not known how "
                "rotary embedding pairs the channels of its keys. Use --method mean or first"
            )


def fold_layers(
    checkpoint: Checkpoint,
    layers: list[AttentionLayer],
    windows: Tensor,
    *,
    num_key_value_heads: int,
    method: Method = "fold",
    grouping: Grouping = "adjacent",
    seed: int = 0,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> Iterator[Folded]:
    """Each layer with its new tensors by name, and its statistics for the record; nothing where N = G.

    windows (W, T): token ids of the calibration text. device: by default the first CUDA device if there is one. With
    method aligned, heads are aligned on the original stream and nothing is refitted. The statistics: key_energy_kept
    and value_energy_kept (shares), and for fold the errors of the stream behind the attention, relative to what the
    attention adds: output_error_folded before the refits and output_error_repaired after.

    Raises RefusedError before the first layer if the layers or the windows do not allow it.
    """
    refuse_calibration(layers)
    if windows.shape[1] <= 2 * NUM_SINKS:
        raise RefusedError(f"calibration windows of {windows.shape[1]} tokens are too short: take at least 32")
    if all(layer.num_key_value_heads == num_key_value_heads for layer in layers):
        return iter(())
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    streamed = StreamedModel(checkpoint, layers, device=device, trust_remote_code=trust_remote_code)
    walk = _Walk(checkpoint, streamed, windows, num_key_value_heads, method, grouping, seed)
    return walk.fold_layers(layers)


class _Walk:
    """The two streams of hidden states, and the work on the layer that they stand before."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        streamed: StreamedModel,
        windows: Tensor,
        num_key_value_heads: int,
        method: Method,
        grouping: Grouping,
        seed: int,
    ):
        self._checkpoint = checkpoint
        self._streamed = streamed
        self._windows = windows
        self._num_key_value_heads = num_key_value_heads
        self._method = method
        self._grouping = grouping
        self._seed = seed
        per_batch = max(1, _BATCH_TOKENS // windows.shape[1])
        self._batches = [slice(first, first + per_batch) for first in range(0, len(windows), per_batch)]

    @torch.no_grad()
    def fold_layers(self, layers: list[AttentionLayer]) -> Iterator[Folded]:
        """One layer after the other, each when it is asked for."""
        by_block = {layer.index: layer for layer in layers}
        with self._streams():
            for number in range(max(by_block) + 1):
                with self._streamed.block(number) as block:
                    layer = by_block.get(number)
                    if layer is None or layer.num_key_value_heads == self._num_key_value_heads:
                        self._advance_both(number)
                    else:
                        yield layer, *self._fold(layer, block)

    @contextmanager
    def _streams(self) -> Iterator[None]:
        """Embeds the windows; what it needs on disk goes when the context ends."""
        with tempfile.TemporaryDirectory(prefix="headfold-") as directory:
            embedded = self._streamed.embed(self._windows[batch] for batch in self._batches)
            first = next(embedded)
            shape = (len(self._windows), *first.shape[1:])
            num_streams = 1 if self._method == "aligned" else 3
            streams = [
                _hidden_states(shape, self._streamed.hidden_dtype, f"{directory}/{number}")
                for number in range(num_streams)
            ]
            self._original = streams[0]
            if num_streams > 1:
                self._converted, self._target = streams[1:]
            for batch, hidden in zip(self._batches, chain([first], embedded), strict=True):
                for stream in streams[:2]:
                    stream[batch] = hidden.cpu()
            yield

    def _advance_both(self, number: int) -> None:
        """Move the streams through a block that is not converted."""
        self._advance(number, self._original)
        if self._method == "fold":
            self._advance(number, self._converted)

    def _fold(self, layer: AttentionLayer, block: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The new tensors of a layer and its statistics; moves the streams on."""
        weights = AttentionWeights.read(self._checkpoint, layer).to(self._streamed.device)
        statistics = LayerStatistics.empty(layer, weights.o)
        if self._method == "aligned":
            self._watch(layer, self._original, lambda call, _, __: statistics.add(call, NUM_SINKS))
            weights, _, record = self._share(statistics, weights)
            self._advance(layer.index, self._original)
            return self._stored(weights, layer), record

        paths, energy = self._move_original(layer, block)
        sampler = _LogitSampler(layer, weights, self._windows, self._seed)

        def gather(call: AttentionCall, inputs: Tensor, batch: slice) -> None:
            statistics.add(call, NUM_SINKS)
            sampler.add(call, inputs, batch)

        self._watch(layer, self._converted, gather)
        weights, groups, record = self._share(statistics, weights)
        weights, before, after = refit_logits(
            sampler.sample(groups),
            weights,
            num_sweeps=_NUM_SWEEPS,
            strength=_LOGIT_STRENGTH,
            num_iterations=_NUM_ITERATIONS,
        )
        record |= {"logit_error_shared": math.sqrt(before), "logit_error_refitted": math.sqrt(after)}
        weights, before, after = self._repair(layer, block, weights, paths)
        record |= {
            "output_error_shared": math.sqrt(before / energy),
            "output_error_repaired": math.sqrt(after / energy),
        }
        weights = weights.rounded(self._streamed.stored_dtype)
        self._assign(layer, block, weights)
        self._advance(layer.index, self._converted)
        return self._stored(weights, layer), record

    def _share(
        self, statistics: LayerStatistics, weights: AttentionWeights
    ) -> tuple[AttentionWeights, Groups, dict[str, Any]]:
        groups = statistics.groups(self._num_key_value_heads, self._grouping, self._method)
        keys, values = statistics.share(groups, self._method)
        kept_keys, kept_values = statistics.kept(groups, keys, values)
        record: dict[str, Any] = {"key_energy_kept": kept_keys, "value_energy_kept": kept_values}
        if self._grouping == "similar":
            record["groups"] = groups
        return weights.share(groups, keys, values), groups, record

    def _move_original(self, layer: AttentionLayer, block: nn.Module) -> tuple[BlockPaths, float]:
        """Move the original stream on, and keep where it stands behind the attention.

        Returns how the block is wired, and the energy of what the attention adds, summed over the counted tokens.
        """
        output_name = self._name_in_block(layer.o.weight)
        seen: list[Tensor] = []
        hook = block.get_submodule(output_name).register_forward_hook(lambda _, __, output: seen.append(output))
        first = self._load(self._original, slice(0, 1))
        paths = trace_block(block, lambda hidden: self._run(layer.index, hidden), first, output_name)
        energy = torch.finfo(torch.float64).tiny
        with _removing(hook):
            for batch in self._batches:
                hidden = self._load(self._original, batch)
                seen.clear()
                moved = self._run(layer.index, hidden)
                attention = seen[0].view(hidden.shape)
                energy += attention[:, NUM_SINKS:].double().square().sum().item()
                target = hidden + paths.output.scale * attention if paths.output else attention
                self._target[batch] = target.to(self._target)
                self._original[batch] = moved.to(self._original)
        return paths, energy

    def _repair(
        self, layer: AttentionLayer, block: nn.Module, weights: AttentionWeights, paths: BlockPaths
    ) -> tuple[AttentionWeights, float, float]:
        """The output projection with which the converted stream comes out nearest to the original one.

        With the squared errors of the attention's output before and after, summed over the counted tokens.
        """
        self._assign(layer, block, weights)
        equations = NormalEquations(weights.o.flatten(1).shape[1], len(weights.o), self._streamed.device)
        bias = 0.0 if layer.o.bias is None else self._checkpoint.read(layer.o.bias).to(self._streamed.device).float()
        features: list[Tensor] = []

        def leave(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            features.append(args[0])
            raise Stop

        hook = block.get_submodule(self._name_in_block(layer.o.weight)).register_forward_pre_hook(leave)
        with _removing(hook):
            for batch in self._batches:
                hidden = self._load(self._converted, batch)
                features.clear()
                self._streamed.run(layer.index, hidden)
                target = self._load(self._target, batch)
                if paths.output:
                    target = (target - hidden) / paths.output.scale
                rows = features[0].view(*hidden.shape[:2], -1)
                equations.add(rows[:, NUM_SINKS:], (target - bias)[:, NUM_SINKS:])
        folded = weights.o.flatten(1)
        repaired = equations.solve(folded, _OUTPUT_STRENGTH)
        weights = replace(weights, o=repaired.view_as(weights.o))
        return weights, equations.error(folded), equations.error(repaired)

    def _watch(
        self, layer: AttentionLayer, stream: Tensor, listener: Callable[[AttentionCall, Tensor, slice], None]
    ) -> None:
        """Run the attention of a layer on a stream; the listener gets its call and what its projections read."""
        inputs: list[Tensor] = []
        module = self._streamed.blocks[layer.index].get_submodule(self._name_in_block(layer.q.weight))
        hook = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        with _removing(hook):
            for batch in self._batches:
                inputs.clear()

                def listen(call: AttentionCall, batch: slice = batch) -> None:
                    listener(call, inputs[0], batch)
                    raise Stop

                if self._streamed.run(layer.index, self._load(stream, batch), listen) is not None:
                    raise RefusedError(
                        f"the attention of layer {layer.index} does not go through transformers' attention interface, "
                        "so that it cannot be calibrated; --method mean needs no calibration"
                    )

    def _advance(self, number: int, stream: Tensor) -> None:
        for batch in self._batches:
            stream[batch] = self._run(number, self._load(stream, batch)).to(stream)

    def _run(self, number: int, hidden: Tensor) -> Tensor:
        output = self._streamed.run(number, hidden)
        assert output is not None
        return output

    def _load(self, stream: Tensor, batch: slice) -> Tensor:
        return stream[batch].to(self._streamed.device, torch.float32)

    def _assign(self, layer: AttentionLayer, block: nn.Module, weights: AttentionWeights) -> None:
        """Let the block compute with new weights: those of its old shapes that are the same function."""
        for name, tensor in weights.expanded(layer.num_key_value_heads).tensors(layer).items():
            owner, _, leaf = self._name_in_block(name, leaf=True).rpartition(".")
            block.get_submodule(owner)._parameters[leaf] = nn.Parameter(tensor.float(), requires_grad=False)

    def _stored(self, weights: AttentionWeights, layer: AttentionLayer) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in weights.tensors(layer).items()}

    def _name_in_block(self, stored: str, leaf: bool = False) -> str:
        """`self_attn.o_proj` for `model.layers.0.self_attn.o_proj.weight`."""
        name = stored[stored.rindex("layers.") :].split(".", 2)[2]
        return name if leaf else name.rpartition(".")[0]


class _LogitSampler:
    """Gathers the LogitSample of one layer from the calls of its original attention."""

    def __init__(self, layer: AttentionLayer, weights: AttentionWeights, windows: Tensor, seed: int):
        num_windows, length = windows.shape
        self._layer = layer
        self._weights = weights
        num_sampled = min(num_windows, _MAX_REFIT_WINDOWS)
        self._sampled = [number * num_windows // num_sampled for number in range(num_sampled)]
        num_queries = min(length - NUM_SINKS, math.ceil(_NUM_QUERIES / num_sampled))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer.index)
        order = torch.rand(num_sampled, length - NUM_SINKS, generator=generator).argsort(1)
        self._positions = order[:, :num_queries].sort(1).values + NUM_SINKS
        self._inputs: list[Tensor] = []
        self._products: list[Tensor] = []
        self._rotation: Tensor | None = None
        self._scaling = 1.0

    def add(self, call: AttentionCall, inputs: Tensor, batch: slice) -> None:
        """Sample the windows of a batch; inputs (B, T, E) are what the projections read."""
        if self._rotation is None:
            self._rotation = self._measure_rotation(call, inputs)
            self._scaling = call.scaling
        blind = call.mask <= torch.finfo(call.mask.dtype).min / 2
        for number in range(*batch.indices(self._sampled[-1] + 1)):
            if number not in self._sampled:
                continue
            at = self._positions[len(self._products)].to(inputs.device)
            row = number - batch.start
            query = call.query[row][:, at].unflatten(0, (call.key.shape[1], -1))
            products = (query @ call.key[row][:, None].mT).flatten(0, 1)
            mask = blind[min(row, len(blind) - 1)][:, at]
            self._products.append(products.masked_fill(mask, -torch.inf))
            self._inputs.append(inputs[row])

    def sample(self, groups: Groups) -> LogitSample:
        """What was gathered, the heads in the order of the groups."""
        assert self._rotation is not None
        order = [
            head * self._layer.group_size + query
            for group in groups
            for head in group
            for query in range(self._layer.group_size)
        ]
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


def _hidden_states(shape: tuple[int, ...], dtype: torch.dtype, path: str) -> Tensor:
    """Uninitialised hidden states in memory, or in a file if they are many."""
    size = math.prod(shape)
    if size * dtype.itemsize <= _MAX_MEMORY_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(path, shared=True, size=size, dtype=dtype).view(shape)


@contextmanager
def _removing(hook: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()
