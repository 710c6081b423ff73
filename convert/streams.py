"""Hidden states of calibration text on their way through a model, layer by layer.

Shapes in one letter code: W windows, B windows of a batch, T tokens, E hidden size.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from headfold.convert.errors import RefusedError
from headfold.convert.families import AttentionLayer
from headfold.convert.files import io_errors
from headfold.convert.walk import AttentionCall, Stop, StreamedModel

NUM_SINKS = 8
"""Positions at the start of a window that no statistic counts: their huge activations would drown all others."""

_SAME = 0.02
"""Relative error up to which a block's output is that of the same computation, on inputs that were kept in 16 bits."""

_BATCH_TOKENS = 4096
_MAX_MEMORY_BYTES = 250_000_000
"""Hidden states of one stream that are larger than this are kept in a file instead."""


class Streams:
    """Streams of hidden states (W, T, E), all of which start as the embedded windows (W, T)."""

    def __init__(self, model: StreamedModel, windows: Tensor):
        """Raises RefusedError for windows that hold nothing but the positions that are not counted."""
        if windows.shape[1] <= 2 * NUM_SINKS:
            raise RefusedError(
                f"calibration windows of {windows.shape[1]} tokens are too short; at least {4 * NUM_SINKS} are needed"
            )
        self.model = model
        self.windows = windows
        per_batch = max(1, _BATCH_TOKENS // windows.shape[1])
        self.batches = [slice(first, first + per_batch) for first in range(0, len(windows), per_batch)]

    @contextmanager
    def embedded(self, num_streams: int) -> Iterator[list[Tensor]]:
        """The streams before the first block; what they need on disk goes when the context ends."""
        hidden_states = self.model.embed(self.windows[batch] for batch in self.batches)
        first = next(hidden_states)
        with ExitStack() as stack:
            streams = [stack.enter_context(self.scratch(first.shape[-1])) for _ in range(num_streams)]
            for batch, hidden in zip(self.batches, chain([first], hidden_states), strict=True):
                for stream in streams:
                    stream[batch] = hidden.to(stream)
            yield streams

    @contextmanager
    def scratch(self, width: int) -> Iterator[Tensor]:
        """Room for (W, T, width) in the dtype of the streams: in memory, or in a file where that is too large."""
        dtype, shape = self.model.hidden_dtype, (*self.windows.shape, width)
        if math.prod(shape) * dtype.itemsize <= _MAX_MEMORY_BYTES:
            yield torch.empty(shape, dtype=dtype)
            return
        with tempfile.TemporaryDirectory(prefix="headfold-") as directory:
            file = Path(directory, "scratch")
            with io_errors(file, "write"), file.open("wb") as handle:
                # Room that is missing is found here, and not by a signal when a page of it is written to.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle.fileno(), 0, math.prod(shape) * dtype.itemsize)
            yield torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)

    def load(self, stream: Tensor, batch: slice) -> Tensor:
        """A batch (B, T, E) of a stream on the device, in float32."""
        return stream[batch].to(self.model.device, torch.float32)

    def advance(self, number: int, *streams: Tensor) -> None:
        """Move streams through a block."""
        for stream in streams:
            for batch in self.batches:
                output = self.model.run(number, self.load(stream, batch))
                assert output is not None
                stream[batch] = output.to(stream)

    def watch(
        self, layer: AttentionLayer, stream: Tensor, listener: Callable[[AttentionCall, Tensor, slice], None]
    ) -> None:
        """Run a layer's attention on a stream. The listener gets its call, what its projections read, and the batch."""
        inputs: list[Tensor] = []
        module = self.model.blocks[layer.index].get_submodule(name_in_block(layer.q.weight))
        with removing(module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))):
            for batch in self.batches:
                inputs.clear()

                def listen(call: AttentionCall, batch: slice = batch) -> None:
                    listener(call, inputs[0], batch)
                    raise Stop

                if self.model.run(layer.index, self.load(stream, batch), listen) is not None:
                    raise RefusedError(
                        f"the attention of layer {layer.index} does not go through transformers' attention interface, "
                        "so that it cannot be calibrated; --method mean needs no calibration"
                    )

    def run_known(self, layer: AttentionLayer, stream: Tensor, features: Tensor) -> Callable[[slice], Tensor]:
        """What runs a batch of a stream through a layer's block, given what its output projection reads, (W, T, H*D).

        The attention itself is left out where the block can be run so, which is tried on the first window.
        """
        projection = name_in_block(layer.o.weight)
        block = self.model.blocks[layer.index]
        output, attention = block.get_submodule(projection), block.get_submodule(projection.rpartition(".")[0])
        returned: list[Any] = []

        def run(batch: slice) -> Tensor:
            moved = self.model.run(layer.index, self.load(stream, batch))
            assert moved is not None
            return moved

        def run_behind(batch: slice) -> Tensor:
            known = output(self.load(features, batch))
            is_alone = isinstance(returned[0], Tensor)
            result = known if is_alone else (known, *[None] * (len(returned[0]) - 1))
            attention.forward = lambda *_, **__: result
            try:
                return run(batch)
            finally:
                del attention.forward

        first = slice(0, 1)
        with removing(attention.register_forward_hook(lambda _, __, result: returned.append(result))):
            expected = run(first)
        is_same = torch.allclose(run_behind(first), expected, rtol=_SAME, atol=_SAME * expected.abs().max().item())
        return run_behind if is_same else run


def name_in_block(stored: str) -> str:
    """The module inside its block that holds a stored parameter: `self_attn.o_proj` for
    `model.layers.0.self_attn.o_proj.weight`."""
    return stored[stored.rindex("layers.") :].split(".", 2)[2].rpartition(".")[0]


@contextmanager
def removing(hook: RemovableHandle) -> Iterator[None]:
    """Removes a hook when the context ends."""
    try:
        yield
    finally:
        hook.remove()
