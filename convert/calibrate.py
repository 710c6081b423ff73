"""Folds a model's KV heads layer by layer, on what calibration text does in it. The derivation is in docs/fold.md.

Two streams of hidden states walk through the model side by side: the original one, and the converted one, which every
layer receives from the converted layers before it. For each layer, with the weights of its block alone in memory:

1. gather second moments of its queries, keys and values on the converted stream (statistics.py), the logits of some
   queries on the original one (sampling.py), and what the original attention makes of that;
2. share K and V in closed form (merge.py) within the groups (grouping.py);
3. refit queries and keys to the logits, then the output projection, then the last layer of the MLP, so that the
   converted stream comes out where the original one does (logits.py, least_squares.py);
4. move both streams on.

Behind the last layer, the norm there is refitted too (final_norm.py).

Shapes in one letter code: W windows, T tokens, H query heads, G KV heads, N new KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headfold.convert.dataflow import BlockPaths, trace_block
from headfold.convert.errors import RefusedError
from headfold.convert.families import AttentionLayer
from headfold.convert.final_norm import refit_norm
from headfold.convert.grouping import Groups
from headfold.convert.least_squares import NormalEquations, solve_with_held_out
from headfold.convert.logits import refit_logits
from headfold.convert.sampling import LogitSampler
from headfold.convert.sensitivity import output_metric
from headfold.convert.settings import Grouping, Method
from headfold.convert.statistics import LayerStatistics
from headfold.convert.streams import NUM_SINKS, Streams, name_in_block, removing
from headfold.convert.walk import AttentionCall, Stop, StreamedModel
from headfold.convert.weights import AttentionWeights

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint

Folded = tuple[AttentionLayer, dict[str, Tensor], dict[str, Any]]

_NUM_SWEEPS = 2
_NUM_ITERATIONS = 4
_LOGIT_STRENGTH = 1e-3
_METRIC_TOKENS = 2048
"""Tokens on which it is measured what an error of the output projection costs."""

_HELD_OUT = 8
"""One window of so many tells how strongly the refit of the output projection is drawn to the folded one."""

_TINY = torch.finfo(torch.float64).tiny


def refuse_calibration(layers: list[AttentionLayer]) -> None:
    """Raises RefusedError if heads of these layers cannot be turned onto each other without changing the model."""
    for layer in layers:
        norm = layer.k_norm or layer.q_norm
        if norm is not None:
            reason = f"{norm.weight} normalises each head after the projection, so that none can be turned onto another"
        elif layer.clip_qkv is not None:
            reason = f"clip_qkv ({layer.clip_qkv}) clips every channel, so that no head can be turned onto another"
        elif layer.rotary.kind == "unknown":
            reason = "its family is not declared, and how rotary embedding pairs the channels of its heads is not known"
        else:
            continue
        raise RefusedError(f"fold and aligned cannot convert this model: {reason}; use --method mean or first")


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
    """Each layer with its new tensors by name, and its statistics for the record; nothing for layers where N = G.

    windows (W, T): token ids of the calibration text. device: the first CUDA device by default, if there is one. With
    method aligned, heads are aligned on the original stream and nothing is refitted.

    The statistics: `key_energy_kept` and `value_energy_kept` are the shares that the shared heads keep, as queries and
    outputs see them. `logit_error_shared` and `_refitted`: the root mean square error of the attention logits, against
    those of the original model, before and after the refit. `output_error_shared` and `_repaired`: that of the stream
    behind the attention, before and after the refit of the output projection, relative to the root mean square of what
    the original attention adds. `mlp_error_before` and `_repaired`: that of the stream behind the block, relative to
    what the MLP adds. `output_shrinkage` and `mlp_shrinkage`: how strongly each was drawn to what it started from, as
    held-out windows had it best. The last layer's also have `final_norm_error_before` and `_repaired`: that of what the
    norm behind it gives, relative to the original.

    Raises RefusedError at once if the layers or the windows do not allow it.
    """
    refuse_calibration(layers)
    if all(layer.num_key_value_heads == num_key_value_heads for layer in layers):
        return iter(())
    model = StreamedModel(checkpoint, layers, device=_device(device), trust_remote_code=trust_remote_code)
    streams = Streams(model, windows)
    plan = _Plan(num_key_value_heads, method, grouping, seed)
    run = _align if method == "aligned" else _fold
    return run(checkpoint, layers, streams, plan)


@torch.no_grad()
def energy_kept(
    checkpoint: Checkpoint,
    layers: list[AttentionLayer],
    windows: Tensor,
    *,
    counts: Sequence[int],
    grouping: Grouping = "adjacent",
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, list[tuple[float, float]]]:
    """What fold would keep of each layer's key and value energy at each number of KV heads, before any refit.

    From the statistics that fold gathers, on the original stream; nothing is written. Every count must divide the KV
    heads of every layer. `progress(done, total)` counts layers. Raises RefusedError as fold_layers does.
    """
    refuse_calibration(layers)
    model = StreamedModel(checkpoint, layers, device=_device(device), trust_remote_code=trust_remote_code)
    streams = Streams(model, windows)
    kept: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with streams.embedded(1) as (original,):
        for number, (layer, _) in enumerate(_layer_by_layer(model, layers, streams, original)):
            weights = AttentionWeights.read(checkpoint, layer).to(model.device)
            statistics = _statistics(layer, weights, streams, original, seed=0)
            for count in counts:
                groups = statistics.groups(count, grouping, "fold")
                kept[count].append(statistics.kept(groups, *statistics.share(groups, "fold")))
            streams.advance(layer.index, original)
            if progress:
                progress(number + 1, len(layers))
    return kept


@dataclass(frozen=True)
class _Plan:
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


@torch.no_grad()
def _align(checkpoint: Checkpoint, layers: list[AttentionLayer], streams: Streams, plan: _Plan) -> Iterator[Folded]:
    with streams.embedded(1) as (original,):
        for layer, _ in _layer_by_layer(streams.model, layers, streams, original):
            if layer.num_key_value_heads != plan.num_key_value_heads:
                weights = AttentionWeights.read(checkpoint, layer).to(streams.model.device)
                weights, _, record = plan.share(_statistics(layer, weights, streams, original, seed=plan.seed), weights)
                yield layer, _on_cpu(weights.tensors(layer)), record
            streams.advance(layer.index, original)


@torch.no_grad()
def _fold(checkpoint: Checkpoint, layers: list[AttentionLayer], streams: Streams, plan: _Plan) -> Iterator[Folded]:
    with streams.embedded(3) as (original, converted, target):
        for layer, block in _layer_by_layer(streams.model, layers, streams, original, converted):
            if layer.num_key_value_heads == plan.num_key_value_heads:
                streams.advance(layer.index, original, converted)
                continue
            tensors, record = _fold_layer(checkpoint, layer, block, streams, plan, original, converted, target)
            if layer.index == len(streams.model.blocks) - 1:
                _repair_final_norm(streams, original, converted, tensors, record)
            yield layer, _on_cpu(tensors), record


def _layer_by_layer(
    model: StreamedModel, layers: list[AttentionLayer], streams: Streams, *moving: Tensor
) -> Iterator[tuple[AttentionLayer, nn.Module]]:
    """The attention layers with their blocks, weights loaded. Blocks without attention move the streams on here."""
    by_block = {layer.index: layer for layer in layers}
    for number in range(max(by_block) + 1):
        with model.block(number) as block:
            if number in by_block:
                yield by_block[number], block
            else:
                streams.advance(number, *moving)


def _fold_layer(
    checkpoint: Checkpoint,
    layer: AttentionLayer,
    block: nn.Module,
    streams: Streams,
    plan: _Plan,
    original: Tensor,
    converted: Tensor,
    target: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The new tensors of a layer and its statistics; moves the streams on. `target` is scratch space."""
    weights = AttentionWeights.read(checkpoint, layer).to(streams.model.device)
    sampler = LogitSampler(layer, weights, streams.windows, NUM_SINKS, plan.seed)
    statistics = _statistics(layer, weights, streams, converted, sampler.add_inputs, seed=plan.seed)
    paths, energy = _move_original(layer, block, streams, original, target, sampler)
    weights, record = _share(statistics, weights, sampler, plan)
    del statistics, sampler  # large, and what comes next needs the memory
    _assign(layer, block, weights)
    bias = None if layer.o.bias is None else checkpoint.read(layer.o.bias).to(streams.model.device).float()
    with streams.scratch(weights.o[0].numel()) as heads:
        fitted, held_out = _output_equations(layer, block, streams, paths, bias, converted, target, heads)
        folded = weights.o.flatten(1)
        repaired, record["output_shrinkage"] = solve_with_held_out(fitted, held_out, folded)
        for name, output in (("output_error_shared", folded), ("output_error_repaired", repaired)):
            record[name] = math.sqrt(fitted.error(output) / energy)

        weights = replace(weights, o=repaired.view_as(weights.o)).rounded(streams.model.stored_dtype)
        _assign(layer, block, weights)
        tensors = weights.tensors(layer)
        run = streams.run_known(layer, converted, heads)
        if paths.down is None or streams.model.is_whole:
            for batch in streams.batches:
                converted[batch] = run(batch).to(converted)
        else:
            down = block.get_submodule(paths.down.name)
            assert isinstance(down, nn.Linear)
            repaired = _repair_mlp(run, down, paths.down.scale, streams, original, converted, target, record)
            tensors[streams.model.stored_name(layer.index, f"{paths.down.name}.weight")] = repaired
    return tensors, record


def _share(
    statistics: LayerStatistics, weights: AttentionWeights, sampler: LogitSampler, plan: _Plan
) -> tuple[AttentionWeights, dict[str, Any]]:
    """A layer's weights with shared heads, queries and keys refitted, and the record so far."""
    weights, groups, record = plan.share(statistics, weights)
    weights, before, after = refit_logits(
        sampler.sample(groups),
        weights,
        num_sweeps=_NUM_SWEEPS,
        strength=_LOGIT_STRENGTH,
        num_iterations=_NUM_ITERATIONS,
    )
    record |= {"logit_error_shared": math.sqrt(before), "logit_error_refitted": math.sqrt(after)}
    return weights, record


def _repair_mlp(
    run: Callable[[slice], Tensor],
    down: nn.Linear,
    scale: float,
    streams: Streams,
    original: Tensor,
    converted: Tensor,
    target: Tensor,
    record: dict[str, Any],
) -> Tensor:
    """The weight of the MLP's last layer with which the converted stream leaves the block nearest to the original one.

    `run` gives a batch of it behind the block. `original` stands there already; `converted` is moved there, with the
    new weight. `target` is scratch space: it gets what the stream is without the MLP.
    """
    prior = down.weight.data
    fitted, held_out = (NormalEquations(prior.shape[1], prior.shape[0], streams.model.device) for _ in range(2))
    calls: list[tuple[Tensor, Tensor]] = []
    energy = _TINY
    with streams.scratch(prior.shape[1]) as all_features:
        with removing(down.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))):
            for batch in streams.batches:
                calls.clear()
                moved = run(batch)
                ((features, output),) = calls
                features, output = features.view(*moved.shape[:2], -1), output.view(moved.shape)
                without = moved - scale * output
                target[batch], all_features[batch] = without.to(target), features.to(all_features)
                behind = streams.load(original, batch)
                wanted = (behind - without) / scale
                wanted = wanted if down.bias is None else wanted - down.bias
                weights = _token_weights(behind)
                _add(fitted, held_out, batch, weights * features, weights * wanted)
                energy += _energy(weights * output)
        repaired, record["mlp_shrinkage"] = solve_with_held_out(fitted, held_out, prior)
        rounded = repaired.to(streams.model.stored_dtype).to(prior.dtype)
        for batch in streams.batches:
            output = nn.functional.linear(streams.load(all_features, batch), rounded, down.bias)
            converted[batch] = (streams.load(target, batch) + scale * output).to(converted)
    for name, weight in (("mlp_error_before", prior), ("mlp_error_repaired", repaired)):
        record[name] = math.sqrt(fitted.error(weight) / energy)
    return rounded


def _repair_final_norm(
    streams: Streams, original: Tensor, converted: Tensor, tensors: dict[str, Tensor], record: dict[str, Any]
) -> None:
    """Add the weight of the norm behind the last block to the tensors; both streams stand behind that block."""
    with streams.model.final_norm() as found:
        if found is None:
            return
        name, norm = found
        pairs = (
            (streams.load(original, batch)[:, NUM_SINKS:], streams.load(converted, batch)[:, NUM_SINKS:])
            for batch in streams.batches
        )
        weight, before, after = refit_norm(norm, pairs)
    tensors[name] = weight.to(streams.model.stored_dtype)
    record |= {"final_norm_error_before": before, "final_norm_error_repaired": after}


def _add(fitted: NormalEquations, held_out: NormalEquations, batch: slice, features: Tensor, wanted: Tensor) -> None:
    """Count a batch of windows, features (B, T, F) and what is wanted of them (B, T, E): one of eight is held out."""
    is_held_out = torch.arange(batch.start, batch.start + len(features)) % _HELD_OUT == _HELD_OUT // 2
    for equations, chosen in ((fitted, ~is_held_out), (held_out, is_held_out)):
        equations.add(features[chosen, NUM_SINKS:], wanted[chosen, NUM_SINKS:])


def _token_weights(behind: Tensor) -> Tensor:
    """What the rows of the least squares are multiplied by: (B, T, 1) for what the stream should become (B, T, E).

    The norms behind divide a token by its size, so that an error counts as a share of it. Tokens of hardly any size
    count as those of a third of what is usual in their window.
    """
    size = behind.square().mean(-1, keepdim=True)
    usual = size[:, NUM_SINKS:].median(1, keepdim=True).values
    return size.maximum(0.1 * usual).clamp_min(torch.finfo(size.dtype).tiny).rsqrt()


def _energy(rows: Tensor) -> float:
    """The sum of squares of (B, T, E), without the positions that do not count."""
    return rows[:, NUM_SINKS:].double().square().sum().item()


def _statistics(
    layer: AttentionLayer,
    weights: AttentionWeights,
    streams: Streams,
    stream: Tensor,
    also: Callable[[AttentionCall, Tensor, slice], None] | None = None,
    *,
    seed: int,
) -> LayerStatistics:
    """On a stream; the layer's block is loaded. What `watch` tells is passed on to `also`."""
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


def _move_original(
    layer: AttentionLayer,
    block: nn.Module,
    streams: Streams,
    original: Tensor,
    target: Tensor,
    sampler: LogitSampler,
) -> tuple[BlockPaths, float]:
    """Move the original stream on, leaving in `target` where it stood behind the attention (or the attention alone).

    The logits on its way are sampled. Returns how the block is wired, and the energy of what its output projection
    gives, summed over all rows.
    """
    name, number = name_in_block(layer.o.weight), layer.index
    seen: list[Tensor] = []

    def run(hidden: Tensor, listener: Callable[[AttentionCall], None] | None = None) -> Tensor:
        output = streams.model.run(number, hidden, listener)
        assert output is not None
        return output

    paths = trace_block(block, run, streams.load(original, slice(0, 1)), name)
    energy = _TINY
    with removing(block.get_submodule(name).register_forward_hook(lambda _, __, output: seen.append(output))):
        for batch in streams.batches:
            seen.clear()
            hidden = streams.load(original, batch)
            moved = run(hidden, partial(sampler.add_logits, batch=batch))
            attention = seen[0].view(hidden.shape)
            behind = hidden + paths.output.scale * attention if paths.output else attention
            energy += _energy(_token_weights(behind) * attention)
            target[batch], original[batch] = behind.to(target), moved.to(original)
    return paths, energy


def _output_equations(
    layer: AttentionLayer,
    block: nn.Module,
    streams: Streams,
    paths: BlockPaths,
    bias: Tensor | None,
    converted: Tensor,
    target: Tensor,
    heads: Tensor,
) -> tuple[NormalEquations, NormalEquations]:
    """For the output projection with which the converted stream comes out nearest to the original one.

    What the projection reads is left in `heads` (W, T, H*D).

    Where a norm stands between the projection and the stream that is no linear problem: there, for the one whose own
    output is nearest to the original one's. Two sets: of most windows, and of every eighth, which is held out.
    """
    size = layer.num_attention_heads * layer.head_dim
    fitted, held_out = (NormalEquations(size, layer.hidden_size, streams.model.device) for _ in range(2))
    seen: list[Tensor] = []

    def leave(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise Stop

    with removing(block.get_submodule(name_in_block(layer.o.weight)).register_forward_pre_hook(leave)):
        for batch in streams.batches:
            seen.clear()
            hidden, wanted = streams.load(converted, batch), streams.load(target, batch)
            weights = _token_weights(wanted)
            streams.model.run(layer.index, hidden)
            if paths.output is not None:
                wanted = (wanted - hidden) / paths.output.scale
            if bias is not None:
                wanted = wanted - bias
            features = seen[0].view(*hidden.shape[:2], -1)
            heads[batch] = features.to(heads)
            _add(fitted, held_out, batch, weights * features, weights * wanted)
    return fitted, held_out


def _assign(layer: AttentionLayer, block: nn.Module, weights: AttentionWeights) -> None:
    """Let the block compute with new weights, as those of its old shapes that give the same function."""
    for name, tensor in weights.expanded(layer.num_key_value_heads).tensors(layer).items():
        module = block.get_submodule(name_in_block(name))
        module._parameters[name.rpartition(".")[2]] = nn.Parameter(tensor, requires_grad=False)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
