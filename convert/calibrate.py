"""Folds a model's KV heads layer by layer, on what calibration text does in it. The derivation is in docs/fold.md.

Two streams of hidden states walk through the model side by side: the original one, and the converted one, which every
layer receives from the converted layers before it. For each layer, with the weights of its block alone in memory:

1. gather second moments of its queries, keys and values on the converted stream (sharing.py), the logits of some
   queries on the original one (sampling.py), and what the original attention makes of that;
2. share K and V in closed form (merge.py) within the groups (grouping.py);
3. refit queries and keys to the logits, then the output projection, then the last layer of the MLP, so that the
   converted stream comes out where the original one does (logits.py, least_squares.py);
4. move both streams on.

Behind the last layer, the norm there is refitted too (final_norm.py).

Shapes in one letter code: W windows, T tokens, G KV heads, N new KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headfold.convert.errors import RefusedError
from headfold.convert.families import AttentionLayer
from headfold.convert.final_norm import refit_norm
from headfold.convert.fold_layer import LayerFold
from headfold.convert.settings import Grouping, Method
from headfold.convert.sharing import Sharing, gather_statistics
from headfold.convert.streams import NUM_SINKS, Streams
from headfold.convert.walk import StreamedModel
from headfold.convert.weights import AttentionWeights

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint

Folded = tuple[AttentionLayer, dict[str, Tensor], dict[str, Any]]


def refuse_calibration(layers: list[AttentionLayer]) -> None:
    """Raises RefusedError if heads of these layers cannot be turned onto each other, or the layers cannot be run."""
    for layer in layers:
        norm = layer.k_norm or layer.q_norm
        if norm is not None:
            reason = f"{norm.weight} normalises each head after the projection, so that none can be turned onto another"
        elif layer.clip_qkv is not None:
            reason = f"clip_qkv ({layer.clip_qkv}) clips every channel, so that no head can be turned onto another"
        elif "layers." not in layer.q.weight:
            reason = f"its blocks ({layer.q.weight}) are not called layers.N, and calibration knows no others"
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
    sharing = Sharing(num_key_value_heads, method, grouping, seed)
    run = _align if method == "aligned" else _fold
    return run(checkpoint, layers, streams, sharing)


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
            statistics = gather_statistics(layer, weights, streams, original, seed=0)
            for count in counts:
                groups = statistics.groups(count, grouping, "fold")
                kept[count].append(statistics.kept(groups, *statistics.share(groups, "fold")))
            streams.advance(layer.index, original)
            if progress:
                progress(number + 1, len(layers))
    return kept


@torch.no_grad()
def _align(
    checkpoint: Checkpoint, layers: list[AttentionLayer], streams: Streams, sharing: Sharing
) -> Iterator[Folded]:
    with streams.embedded(1) as (original,):
        for layer, _ in _layer_by_layer(streams.model, layers, streams, original):
            if layer.num_key_value_heads != sharing.num_key_value_heads:
                weights = AttentionWeights.read(checkpoint, layer).to(streams.model.device)
                weights, _, record = sharing.share(
                    gather_statistics(layer, weights, streams, original, seed=sharing.seed), weights
                )
                yield layer, _on_cpu(weights.tensors(layer)), record
            streams.advance(layer.index, original)


@torch.no_grad()
def _fold(checkpoint: Checkpoint, layers: list[AttentionLayer], streams: Streams, sharing: Sharing) -> Iterator[Folded]:
    with streams.embedded(3) as (original, converted, target):
        for layer, block in _layer_by_layer(streams.model, layers, streams, original, converted):
            if layer.num_key_value_heads == sharing.num_key_value_heads:
                streams.advance(layer.index, original, converted)
                continue
            layer_fold = LayerFold(layer, block, streams, original, converted, target)
            tensors, record = layer_fold.fold(checkpoint, sharing), layer_fold.record
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


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
