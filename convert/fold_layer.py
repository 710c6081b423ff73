"""Folds one layer: steps 1 to 4 of calibrate.py, with the derivation in docs/fold.md.

Shapes in one letter code: W windows, B windows of a batch, T tokens, H query heads, D head_dim, E hidden size,
F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headfold.convert.dataflow import BlockPaths, Linear, trace_block
from headfold.convert.families import AttentionLayer
from headfold.convert.least_squares import NormalEquations, solve_with_held_out
from headfold.convert.logits import refit_logits
from headfold.convert.sampling import LogitSampler
from headfold.convert.sharing import Sharing, gather_statistics
from headfold.convert.streams import NUM_SINKS, Streams, name_in_block, removing
from headfold.convert.walk import Stop
from headfold.convert.weights import AttentionWeights

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint

_NUM_SWEEPS = 2
_NUM_ITERATIONS = 4
_LOGIT_STRENGTH = 1e-3

_HELD_OUT = 8
"""One window of so many tells how strongly a refit is drawn to what it starts from."""

_TINY = torch.finfo(torch.float64).tiny


class LayerFold:
    """One layer on its way from many KV heads to few; its block is loaded.

    Of the streams of hidden states (W, T, E), `original` and `converted` stand before the block. `target` is scratch
    space: it gets where the converted stream should be, behind the attention and then behind the block.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        block: nn.Module,
        streams: Streams,
        original: Tensor,
        converted: Tensor,
        target: Tensor,
    ):
        self._layer = layer
        self._block = block
        self._streams = streams
        self._original = original
        self._converted = converted
        self._target = target
        self.record: dict[str, Any] = {}
        """The statistics of calibrate.fold_layers."""

    def fold(self, checkpoint: Checkpoint, sharing: Sharing) -> dict[str, Tensor]:
        """The new tensors of the layer by name; moves the streams on."""
        model, name = self._streams.model, self._layer.o.bias
        bias = None if name is None else checkpoint.read(name).to(model.device).float()
        weights = AttentionWeights.read(checkpoint, self._layer).to(model.device)
        weights, paths, energy = self._share(weights, sharing)
        self._assign(weights)
        with self._streams.scratch(weights.o[0].numel()) as heads:
            output = self._repair_output(weights.o.flatten(1), bias, paths.output, energy, heads)
            weights = replace(weights, o=output.view_as(weights.o)).rounded(model.stored_dtype)
            self._assign(weights)
            tensors = weights.tensors(self._layer)
            run = self._streams.run_known(self._layer, self._converted, heads)
            if paths.down is None or model.is_whole:
                for batch in self._streams.batches:
                    self._converted[batch] = run(batch).to(self._converted)
            else:
                stored = model.stored_name(self._layer.index, f"{paths.down.name}.weight")
                tensors[stored] = self._repair_mlp(run, paths.down)
        return tensors

    def _share(self, weights: AttentionWeights, sharing: Sharing) -> tuple[AttentionWeights, BlockPaths, float]:
        """The weights with shared heads, queries and keys refitted; moves the original stream on.

        And how the block is wired, and the energy of what the attention adds, summed over all rows.
        """
        sampler = LogitSampler(self._layer, weights, self._streams.windows, NUM_SINKS, sharing.seed)
        statistics = gather_statistics(
            self._layer, weights, self._streams, self._converted, sampler.add_inputs, seed=sharing.seed
        )
        paths, energy = self._move_original(sampler)
        weights, groups, record = sharing.share(statistics, weights)
        self.record |= record
        weights, before, after = refit_logits(
            sampler.sample(groups),
            weights,
            num_sweeps=_NUM_SWEEPS,
            strength=_LOGIT_STRENGTH,
            num_iterations=_NUM_ITERATIONS,
        )
        self.record |= {"logit_error_shared": math.sqrt(before), "logit_error_refitted": math.sqrt(after)}
        return weights, paths, energy

    def _move_original(self, sampler: LogitSampler) -> tuple[BlockPaths, float]:
        """Move the original stream on, leaving in `target` where it stood behind the attention, or the attention alone.

        The logits on its way are sampled. Returns what _share does.
        """
        streams, name, number = self._streams, name_in_block(self._layer.o.weight), self._layer.index
        seen: list[Tensor] = []

        def run(hidden: Tensor) -> Tensor:
            output = streams.model.run(number, hidden)
            assert output is not None
            return output

        paths = trace_block(self._block, run, streams.load(self._original, slice(0, 1)), name)
        energy = _TINY
        with removing(self._block.get_submodule(name).register_forward_hook(lambda _, __, output: seen.append(output))):
            for batch in streams.batches:
                seen.clear()
                hidden = streams.load(self._original, batch)
                moved = streams.model.run(number, hidden, partial(sampler.add_logits, batch=batch))
                assert moved is not None
                attention = seen[0].view(hidden.shape)
                behind = hidden + paths.output.scale * attention if paths.output else attention
                energy += _energy(_token_weights(behind) * attention)
                self._target[batch], self._original[batch] = behind.to(self._target), moved.to(self._original)
        return paths, energy

    def _repair_output(
        self, folded: Tensor, bias: Tensor | None, path: Linear | None, energy: float, heads: Tensor
    ) -> Tensor:
        """The output projection (E, H*D) with which the converted stream comes out nearest to the original one.

        What it reads is left in `heads` (W, T, H*D). `folded`: the one to start from; `energy`: what errors are
        relative to. Where a norm stands between the projection and the stream (no `path`) that is no linear problem:
        there, the one whose own output is nearest to the original one's.
        """
        equations = self._output_equations(folded, bias, path, heads)
        repaired, self.record["output_shrinkage"] = equations.solve(folded)
        for name, output in (("output_error_shared", folded), ("output_error_repaired", repaired)):
            self.record[name] = math.sqrt(equations.error(output) / energy)
        return repaired

    def _output_equations(self, folded: Tensor, bias: Tensor | None, path: Linear | None, heads: Tensor) -> _Equations:
        streams, equations = self._streams, _Equations(folded)
        seen: list[Tensor] = []

        def leave(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise Stop

        projection = self._block.get_submodule(name_in_block(self._layer.o.weight))
        with removing(projection.register_forward_pre_hook(leave)):
            for batch in streams.batches:
                seen.clear()
                hidden, wanted = streams.load(self._converted, batch), streams.load(self._target, batch)
                weights = _token_weights(wanted)
                streams.model.run(self._layer.index, hidden)
                if path is not None:
                    wanted = (wanted - hidden) / path.scale
                if bias is not None:
                    wanted = wanted - bias
                features = seen[0].view(*hidden.shape[:2], -1)
                heads[batch] = features.to(heads)
                equations.add(batch, weights * features, weights * wanted)
        return equations

    def _repair_mlp(self, run: Callable[[slice], Tensor], path: Linear) -> Tensor:
        """The weight (E, F) of the MLP's last layer with which the converted stream leaves the block nearest to the
        original one; moves the converted stream there, with the new weight. `run` gives a batch of it behind the block.
        """
        streams = self._streams
        down = self._block.get_submodule(path.name)
        assert isinstance(down, nn.Linear)
        prior = down.weight.data
        with streams.scratch(prior.shape[1]) as all_features:
            equations, energy = self._mlp_equations(run, down, path.scale, all_features)
            repaired, self.record["mlp_shrinkage"] = equations.solve(prior)
            rounded = repaired.to(streams.model.stored_dtype).to(prior.dtype)
            for batch in streams.batches:
                output = nn.functional.linear(streams.load(all_features, batch), rounded, down.bias)
                moved = streams.load(self._target, batch) + path.scale * output
                self._converted[batch] = moved.to(self._converted)
        for name, weight in (("mlp_error_before", prior), ("mlp_error_repaired", repaired)):
            self.record[name] = math.sqrt(equations.error(weight) / energy)
        return rounded

    def _mlp_equations(
        self, run: Callable[[slice], Tensor], down: nn.Linear, scale: float, all_features: Tensor
    ) -> tuple[_Equations, float]:
        """And the energy of what the MLP adds, summed over all rows.

        What `down` reads is left in `all_features` (W, T, F), and what the converted stream is without it in `target`.
        """
        streams, equations = self._streams, _Equations(down.weight)
        calls: list[tuple[Tensor, Tensor]] = []
        energy = _TINY
        with removing(down.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))):
            for batch in streams.batches:
                calls.clear()
                moved = run(batch)
                ((features, output),) = calls
                features, output = features.view(*moved.shape[:2], -1), output.view(moved.shape)
                without = moved - scale * output
                self._target[batch], all_features[batch] = without.to(self._target), features.to(all_features)
                behind = streams.load(self._original, batch)
                wanted = (behind - without) / scale
                wanted = wanted if down.bias is None else wanted - down.bias
                weights = _token_weights(behind)
                equations.add(batch, weights * features, weights * wanted)
                energy += _energy(weights * output)
        return equations, energy

    def _assign(self, weights: AttentionWeights) -> None:
        """Let the block compute with new weights, as those of its old shapes that give the same function."""
        for name, tensor in weights.expanded(self._layer.num_key_value_heads).tensors(self._layer).items():
            module = self._block.get_submodule(name_in_block(name))
            module._parameters[name.rpartition(".")[2]] = nn.Parameter(tensor, requires_grad=False)


class _Equations:
    """For a matrix (E, F): normal equations over windows, every eighth of which is held out until they are solved."""

    def __init__(self, matrix: Tensor):
        num_outputs, num_features = matrix.shape
        self._fitted, self._held_out = (NormalEquations(num_features, num_outputs, matrix.device) for _ in range(2))

    def add(self, batch: slice, features: Tensor, wanted: Tensor) -> None:
        """Count a batch of windows: features (B, T, F) and what is wanted of them (B, T, E)."""
        is_held_out = torch.arange(batch.start, batch.start + len(features)) % _HELD_OUT == _HELD_OUT // 2
        for equations, chosen in ((self._fitted, ~is_held_out), (self._held_out, is_held_out)):
            equations.add(features[chosen, NUM_SINKS:], wanted[chosen, NUM_SINKS:])

    def solve(self, prior: Tensor) -> tuple[Tensor, float]:
        """The matrix on all windows, and how strongly it is drawn to `prior`. Once: nothing is held out any more."""
        return solve_with_held_out(self._fitted, self._held_out, prior)

    def error(self, matrix: Tensor) -> float:
        """The sum of squared errors over all rows; after `solve`."""
        return self._fitted.error(matrix)


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
