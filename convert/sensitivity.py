"""What the rest of a block makes of an error in its attention's output: the metric in which value heads are shared.

Shapes in one letter code: B windows, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NUM_PROBES = 4
_READ_SHARE = 0.9
"""Weight of what the block's other layers read, beside the residual stream itself, which later blocks read."""


def output_metric(
    block: nn.Module, run: Callable[[Tensor], Any], hidden: Tensor, output_name: str, *, first_token: int, seed: int
) -> Tensor:
    """G (E, E), float64, of mean diagonal 1: e^T G e is what an error e of the output projection costs.

    hidden (B, T, E): what the block reads; tokens count from `first_token` on. G = (1 - a) I + a E[J^T J] with a = 0.9,
    where J is the Jacobian, by the projection's output, of what the linear layers behind it that read the hidden state
    make of it (the gate and up projections, a router); estimated with random probes. Norms in between are part of J,
    so that tokens where the stream is small weigh more. G = I where no plain linear layer reads the attention's output:
    in parallel blocks, and in mixtures whose experts are stacked.
    """
    size = hidden.shape[-1]
    identity = torch.eye(size, dtype=torch.float64, device=hidden.device)
    generator = torch.Generator(hidden.device).manual_seed(seed)
    starts: list[Tensor] = []
    reads: list[Tensor] = []

    def start(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        starts.append(output.detach().requires_grad_())
        return starts[0]

    def read(_: nn.Module, __: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor):  # a linear layer in name alone, such as the routers of some mixtures
            return None
        if output.requires_grad:
            reads.append(output)
        return output.detach()  # what comes behind it, the MLP's last layer say, reads no hidden state

    hooks = [block.get_submodule(output_name).register_forward_hook(start)]
    hooks += [
        module.register_forward_hook(read)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name != output_name
    ]
    try:
        with torch.enable_grad():
            run(hidden)
    finally:
        for hook in hooks:
            hook.remove()
    if not reads:
        return identity
    products = torch.zeros_like(identity)
    for _ in range(_NUM_PROBES):
        probes = [torch.randn(output.shape, generator=generator, device=hidden.device) for output in reads]
        (gradient,) = torch.autograd.grad(reads, starts, probes, retain_graph=True)
        rows = gradient.view(hidden.shape)[:, first_token:].flatten(0, 1)
        products += (rows.T @ rows).double()
    return (1 - _READ_SHARE) * identity + _READ_SHARE * products / products.diagonal().mean()
