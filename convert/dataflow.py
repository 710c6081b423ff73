"""Where the attention's output and the MLP's enter the residual stream of a block, found by running it.

Shapes in one letter code: B windows, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-4
"""Relative error up to which two tensors that were computed in different orders count as the same."""


@dataclass(frozen=True)
class Linear:
    """A linear layer whose output, times `scale`, is added to the residual stream. `name` is relative to its block."""

    name: str
    scale: float


@dataclass(frozen=True)
class BlockPaths:
    """output: how the attention's output projection enters the stream. down: how the MLP's last linear layer does.

    None where it does not enter as it is: where a norm follows (OLMo2, Gemma2), or where there is no single last layer
    (mixtures of experts).
    """

    output: Linear | None
    down: Linear | None


def trace_block(block: nn.Module, run: Callable[[Tensor], Tensor], hidden: Tensor, output_name: str) -> BlockPaths:
    """The paths of a block, from one run on hidden states (B, T, E).

    In a sequential block, something (a norm) reads x + scale * attention, and the block's output is that plus
    scale * MLP. In a parallel one the output is x + scale * (attention + MLP).
    """
    inputs: list[Tensor] = []
    outputs: dict[str, tuple[nn.Module, Tensor]] = {}

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            inputs.extend(x for x in args if isinstance(x, Tensor) and x.shape == hidden.shape)
            if isinstance(output, Tensor) and output.numel() == hidden.numel():
                outputs[name] = (module, output.reshape(hidden.shape))

        return hook

    hooks = [module.register_forward_hook(record(name)) for name, module in block.named_modules() if name]
    try:
        total = run(hidden)
    finally:
        for hook in hooks:
            hook.remove()
    attention = outputs[output_name][1]
    linears = {
        name: output
        for name, (module, output) in outputs.items()
        if isinstance(module, nn.Linear) and name != output_name
    }
    for read in inputs:
        scale = _multiple(read - hidden, attention)
        if scale is not None:
            down = _first_multiple(total - read, linears)
            return BlockPaths(Linear(output_name, scale), down)
    for name, (_, output) in outputs.items():
        scale = _multiple(total - hidden, attention + output)
        if scale is not None and name != output_name:
            down = _first_multiple(total - hidden - scale * attention, linears)
            return BlockPaths(Linear(output_name, scale), down)
    return BlockPaths(None, None)


def _first_multiple(total: Tensor, candidates: dict[str, Tensor]) -> Linear | None:
    for name, output in candidates.items():
        scale = _multiple(total, output)
        if scale is not None:
            return Linear(name, scale)
    return None


def _multiple(whole: Tensor, part: Tensor) -> float | None:
    """The number that takes `part` to `whole`, if there is one that is not 0."""
    norm = part.double().pow(2).sum()
    scale = (whole.double() * part.double()).sum() / norm.clamp_min(torch.finfo(torch.float64).tiny)
    error = (whole - scale * part).double().norm()
    if not error <= _TOLERANCE * whole.double().norm() or scale.abs() < _TOLERANCE:
        return None
    return round(scale.item(), 6)
