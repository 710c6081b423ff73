"""Refits the norm behind the last block, so that its output comes out nearest to the original model's.

Shapes in one letter code: B windows, T tokens, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def refit_norm(norm: nn.Module, streams: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, float, float]:
    """The weight (E) with the least squared error of the norm's output, and that error before and after, relative.

    streams: what the norm reads in the original and in the converted model, (B, T, E) each. Every channel of the output
    is multiplied by the regression coefficient of the original one on it (docs/fold.md, equation 9); the bias stays.
    """
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    products, energy, wanted_energy = torch.zeros(3, len(weight), dtype=torch.float64, device=weight.device)
    offset = None
    for original, converted in streams:
        wanted, found = (norm(x) if bias is None else norm(x) - bias for x in (original, converted))
        products += (wanted * found).sum((0, 1), dtype=torch.float64)
        energy += found.square().sum((0, 1), dtype=torch.float64)
        wanted_energy += wanted.square().sum((0, 1), dtype=torch.float64)
        offset = _offset(norm, original) if offset is None else offset
    assert offset is not None
    gain = torch.where(energy > 0, products / energy, 1.0)
    before = wanted_energy - 2 * products + energy
    after = wanted_energy - 2 * gain * products + gain.square() * energy
    whole = wanted_energy.sum().clamp_min(torch.finfo(torch.float64).tiny)
    refitted = (gain * (weight.double() + offset) - offset).to(weight.dtype)
    return refitted, _root(before.sum() / whole), _root(after.sum() / whole)


def _offset(norm: nn.Module, hidden: Tensor) -> float:
    """1 for norms that multiply by 1 + weight (Gemma's), 0 for those that multiply by the weight itself."""
    zeros = {name: torch.zeros_like(parameter) for name, parameter in norm.named_parameters()}
    return 1.0 if torch.func.functional_call(norm, zeros, (hidden,)).any() else 0.0


def _root(square: Tensor) -> float:
    """Rounding may have left a little less than nothing."""
    return math.sqrt(max(square.item(), 0.0))
