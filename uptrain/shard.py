"""One model over several processes: repeated in each (DDP), or spread over them (FSDP2, `fully_shard`).

Accelerate's FSDP plugin is not used: it does not exist on CPUs and wraps one model, while distillation has two. The
code below is the same under gloo on CPUs and NCCL on GPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class Spread:
    """How a run's models lie over its processes."""

    def __init__(self, device: torch.device, *, shard: bool, mixed_precision: str) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._device = device
        self._mesh: DeviceMesh | None = init_device_mesh(device.type, (dist.get_world_size(),)) if several else None
        self._shard = shard and several
        # Gathered and computed in bfloat16, kept and summed in float32.
        self._policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if mixed_precision == "bf16"
            else MixedPrecisionPolicy()
        )

    def layer(self, module: nn.Module) -> None:
        """Spread one layer, as soon as its weights are there."""
        if self._shard:
            fully_shard(module, mesh=self._mesh, mp_policy=self._policy)

    def whole(self, module: nn.Module, *, trainable: bool = True) -> nn.Module:
        """Spread what is outside of the layers, or repeat a trained module with its gradients averaged."""
        if self._shard:
            # The head works outside of its model's forward, in chunks: what is not in a layer stays gathered until
            # the backward pass, or the next `release`.
            fully_shard(module, mesh=self._mesh, mp_policy=self._policy, reshard_after_forward=False)
            return module
        if self._mesh is not None and trainable:
            devices = [self._device] if self._device.type != "cpu" else None
            repeated = DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
            repeated.broadcast_buffers = False  # they are constants; torch 2.13 renames the argument, not the attribute
            return repeated
        return module


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass sums gradients over the processes: only the last one of a step needs to."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    elif isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = enabled


def release(module: nn.Module) -> None:
    """Give back what a forward pass without a backward pass has left gathered."""
    if isinstance(module, FSDPModule):
        module.reshard()


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in full, in every process; all processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
