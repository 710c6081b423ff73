"""From one checkpoint directory to another with fewer KV heads.

Shapes in one letter code: H query heads, G KV heads, N new KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

import gc
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from headfold.convert.check import verify_checkpoint
from headfold.convert.checkpoint import (
    BLOCK_BYTES,
    Checkpoint,
    CheckpointWriter,
    load_config,
    other_files,
    read_record,
    refuse_output,
    resolve_model,
    row_blocks,
)
from headfold.convert.errors import CheckpointError, RefusedError, printable
from headfold.convert.families import AttentionLayer, HeadNorm, Projection, attention_config, describe
from headfold.convert.families import with_num_key_value_heads as edited_config
from headfold.convert.families.remap import remap, remap_config
from headfold.convert.files import expanded
from headfold.convert.settings import ConvertSettings, Grouping, Method
from headfold.convert.texts import text_fingerprint
from headfold.kernels import kv_cache_bytes

if TYPE_CHECKING:
    import torch

    Merge = Callable[[torch.Tensor, int], torch.Tensor]

_Text = Annotated[str, AfterValidator(printable)]  # paths are bytes, and JSON and terminals are not

_CACHE_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ConversionReport(BaseModel):
    """What a conversion did. Counts are per layer; a list where layers differ."""

    source: _Text
    output: _Text
    model_type: str
    remapped_from: str | None = Field(description="The source's model type, where it was re-mapped to another class.")
    method: str
    grouping: str
    num_layers: int
    num_attention_heads: int | list[int]
    num_key_value_heads_before: int | list[int]
    num_key_value_heads: int
    head_dim: int | list[int]
    cache_dtype: str = Field(description="The dtype of the weights, in which a cache is kept by default.")
    cache_bytes_per_token_before: int
    cache_bytes_per_token: int
    weight_bytes_before: int
    weight_bytes: int
    tensor_parallel_sizes: list[int] = Field(description="Numbers of ranks among which the KV heads split evenly.")
    left_out_files: list[_Text] = Field(description="Weights in other formats beside the source, not carried over.")
    warnings: list[_Text]
    advice: str | None = Field(description="What would have lost less, where there is such a thing.")
    layers: list[dict[str, Any]] = Field(description="Statistics of each layer, where the method has any.")
    seconds: float

    def render(self) -> str:
        """The report in a few lines of plain text."""
        share = 100 * (1 - self.cache_bytes_per_token / self.cache_bytes_per_token_before)
        sizes = ", ".join(map(str, self.tensor_parallel_sizes))
        lines = [
            f"{self.source} -> {self.output}"
            + (f", re-mapped exactly from {self.remapped_from} to {self.model_type}" if self.remapped_from else ""),
            f"  KV heads per layer   {_counts(self.num_key_value_heads_before)} -> {self.num_key_value_heads}"
            f"   ({self.num_layers} layers, {_counts(self.num_attention_heads)} query heads, method {self.method})",
            f"  KV cache per token   {self.cache_bytes_per_token_before:,} -> {self.cache_bytes_per_token:,} bytes"
            f"   ({share:.3g} % less, {self.cache_dtype})",
            f"  weights              {self.weight_bytes_before / 1e9:.4g} -> {self.weight_bytes / 1e9:.4g} GB"
            f"   in {self.seconds:.1f} s",
            f"  tensor parallel      {sizes} ranks split the KV heads evenly; with more, vLLM keeps copies of them and "
            "transformers' own tensor parallelism fails",
        ]
        if self.left_out_files:
            lines.append(f"  left out             {', '.join(self.left_out_files)} (weights of the unconverted model)")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, f"  {self.advice}"] if self.advice else lines)


def convert_checkpoint(
    model: str | Path,
    output: str | Path,
    *,
    num_key_value_heads: int,
    method: Method | None = None,
    grouping: Grouping = "adjacent",
    calibration: str | None = None,
    calibration_tokens: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    force: bool = False,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write `output`: the checkpoint `model` (directory or hub name) with num_key_value_heads (N) KV heads per layer.

    MHA and GQA inputs alike; N = 1 is MQA, N = G leaves every weight as it is. The arguments are those of
    ConvertSettings. `progress(done, total)` is called with bytes written.

    Raises RefusedError or CheckpointError before anything is written (an unusable input, an N that does not divide the
    heads, an output that exists without `force`), HeadfoldError if writing fails; then nothing stands at `output`.
    """
    started = time.monotonic()
    try:
        settings = ConvertSettings(
            num_key_value_heads=num_key_value_heads,
            method=method,
            grouping=grouping,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise RefusedError(": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])) from error
    path = resolve_model(model, revision)
    try:
        attention_config(remap_config(load_config(path))).refuse_count(num_key_value_heads)
    except RefusedError:
        if any(path.glob("*.safetensors")):
            verify_checkpoint(path)  # perhaps the count would be right, and the config is wrong
        raise
    # transformers' class is loaded for calibration anyway.
    source = verify_checkpoint(path, against_class=settings.calibration is not None)
    checkpoint = remap(source)
    layers = describe(checkpoint)
    _, left_out = other_files(checkpoint.path, checkpoint.shards())
    old_record = read_record(checkpoint.path)
    initial_std = _initial_std(checkpoint) if settings.method == "random" else 0.0
    refuse_output(checkpoint.path, Path(output).absolute(), force=force)
    shapes = changed_shapes(checkpoint, layers, num_key_value_heads)

    written = shapes.keys() - _dropped(shapes)
    windows = folded = None
    if settings.calibration is not None and shapes:
        from headfold.convert.calibrate import fold_layers, refuse_calibration
        from headfold.convert.windows import read_windows

        assert settings.method is not None
        refuse_calibration(layers)
        windows = read_windows(
            checkpoint,
            settings.calibration,
            num_tokens=settings.calibration_tokens,
            trust_remote_code=settings.trust_remote_code,
        )
        folded = fold_layers(
            checkpoint,
            layers,
            windows,
            num_key_value_heads=num_key_value_heads,
            method=settings.method,
            grouping=settings.grouping,
            seed=settings.seed,
            trust_remote_code=settings.trust_remote_code,
        )
        written = {name for layer in layers for name in _block_tensors(checkpoint, layer)} - _dropped(shapes)
        written.update(name for name, entry in checkpoint.tensors.items() if len(entry.shape) == 1)  # the final norm
    statistics: list[dict[str, Any]] = []
    with CheckpointWriter(checkpoint, output, shapes=shapes, force=force, progress=progress) as writer:
        writer.copy_unwritten(expected=written)
        if folded is not None:
            for layer, tensors, layer_statistics in folded:
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
                statistics.append({"layer": layer.index, **layer_statistics})
                written.difference_update(_block_tensors(checkpoint, layer))
                writer.copy_unwritten(expected=written)  # the rest of the block, so that progress is that of the layers
        elif shapes:
            with _one_thread():
                _merge_weights(checkpoint, layers, settings, writer, initial_std)
        record = _record(model, revision, source, old_record, layers, settings, windows, statistics)
        writer.finish(edited_config(checkpoint.config, num_key_value_heads), record)
        weight_bytes = writer.total_bytes
    return _report(
        model,
        output,
        source.config["model_type"],
        checkpoint,
        layers,
        settings,
        weight_bytes,
        left_out,
        statistics,
        started,
    )


def tensor_parallel_sizes(num_attention_heads: int, num_key_value_heads: int) -> list[int]:
    """The numbers of ranks among which both query and KV heads split evenly."""
    common = math.gcd(num_attention_heads, num_key_value_heads)
    return [size for size in range(1, common + 1) if common % size == 0]


def changed_shapes(
    checkpoint: Checkpoint, layers: list[AttentionLayer], num_new: int
) -> dict[str, tuple[int, ...] | None]:
    """The new shape of every tensor whose shape changes; None for those of heads that go."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    for layer in layers:
        num_gone = (layer.num_key_value_heads - num_new) * layer.head_dim
        if not num_gone:
            continue
        for projection in (layer.k, layer.v):
            for name in (projection.weight, projection.bias):
                if name is not None:
                    old = shapes.get(name) or checkpoint.tensors[name].shape
                    shapes[name] = (old[0] - num_gone, *old[1:])
        if layer.k_norm is not None:
            shapes.update(_changed_norm_shapes(layer.k_norm, layer, num_new))
    return shapes


def _changed_norm_shapes(norm: HeadNorm, layer: AttentionLayer, num_new: int) -> dict[str, tuple[int, ...] | None]:
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name in filter(None, (norm.weight, norm.bias)):
        if "{head}" in name:
            shapes.update({name.format(head=head): None for head in range(num_new, layer.num_key_value_heads)})
            shapes.update({name.format(head=head): (layer.head_dim,) for head in range(num_new)})
        elif norm.kind == "per_head":
            shapes[name] = (num_new, layer.head_dim)
        elif norm.kind == "flat":
            shapes[name] = (num_new * layer.head_dim,)
    return shapes


def _dropped(shapes: Mapping[str, tuple[int, ...] | None]) -> set[str]:
    return {name for name, shape in shapes.items() if shape is None}


def _block_tensors(checkpoint: Checkpoint, layer: AttentionLayer) -> Iterator[str]:
    """The tensors of a layer's block: all of `model.layers.0.` for `model.layers.0.self_attn.o_proj.weight`."""
    head, number, _ = layer.o.weight.rpartition(f".{layer.index}.")
    return (name for name in checkpoint.tensors if name.startswith(head + number))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch compute in one thread: merging is all memory, and the other cores are busy with copying."""
    torch = _imported_torch()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _imported_torch() -> ModuleType:
    """torch, loaded without searches for garbage among the many objects that come with it and stay."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch
    finally:
        if is_enabled:
            gc.enable()
    return torch


def _initial_std(checkpoint: Checkpoint) -> float:
    """The standard deviation of the model's random weights before it was trained."""
    std = attention_config(checkpoint.config).text.get("initializer_range")
    if std is None:
        return 0.02  # the default of nearly every class
    if type(std) not in (int, float) or not 0 <= std < math.inf:
        raise CheckpointError(f"{checkpoint.path}: initializer_range is {ascii(std)[:40]}, no standard deviation")
    return float(std)


def _merge_weights(
    checkpoint: Checkpoint,
    layers: list[AttentionLayer],
    settings: ConvertSettings,
    writer: CheckpointWriter,
    initial_std: float,
) -> None:
    """mean, first and random: K and V of each layer by blocks of heads, weights and biases and per-head norms alike."""
    num_new = settings.num_key_value_heads
    for layer in layers:
        if layer.num_key_value_heads == num_new:
            continue
        query_rows = layer.num_attention_heads * layer.head_dim if layer.is_fused else 0
        for position, projection in enumerate((layer.k, layer.v)):
            for name in (projection.weight, projection.bias):
                if name is None:
                    continue
                std = initial_std if name == projection.weight else 0.0
                first_row = query_rows + position * num_new * layer.head_dim if layer.is_fused else 0
                merge = _merge_function(settings, f"{name}/{position}", std)
                _merge_rows(checkpoint, name, projection, layer, num_new, merge, writer, first_row)
                if layer.is_fused and position == 0:
                    _copy_rows(checkpoint, name, query_rows, writer)
        if layer.k_norm is not None and layer.k_norm.kind != "shared":
            _merge_norm(checkpoint, layer.k_norm, layer, settings, writer)


def _merge_function(settings: ConvertSettings, name: str, std: float) -> Merge:
    """heads (G, ...), N -> (N, ...). What is random depends on the seed and the tensor's name alone."""
    import torch

    from headfold.convert import merge

    if settings.method == "random":
        digest = hashlib.sha256(f"{settings.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return partial(merge.random, std=std, generator=generator)
    return merge.first if settings.method == "first" else merge.mean


def _merge_rows(
    checkpoint: Checkpoint,
    name: str,
    projection: Projection,
    layer: AttentionLayer,
    num_new: int,
    merge: Merge,
    writer: CheckpointWriter,
    first_row: int,
) -> None:
    """Merge the heads of one tensor (rows G*D from projection.first_row on) into rows N*D from `first_row` on."""
    import torch

    entry = checkpoint.tensors[name]
    row_bytes = entry.nbytes // entry.shape[0]
    rows_per_group = layer.num_key_value_heads // num_new * layer.head_dim
    num_groups_per_block = max(1, BLOCK_BYTES // (rows_per_group * row_bytes))
    for group in range(0, num_new, num_groups_per_block):
        num_groups = min(num_groups_per_block, num_new - group)
        start = projection.first_row + group * rows_per_group
        rows = checkpoint.read(name, (start, start + num_groups * rows_per_group))
        # In float64 the mean of equal float32 heads is that head to the last bit, for groups of 3, 5, 6 ... as well.
        wide = rows.double() if rows.dtype == torch.float32 else rows
        merged = merge(wide.unflatten(0, (-1, layer.head_dim)), num_groups)
        writer.write(name, merged.flatten(0, 1), first_row=first_row + group * layer.head_dim)


def _copy_rows(checkpoint: Checkpoint, name: str, num_rows: int, writer: CheckpointWriter) -> None:
    """The first rows of a fused tensor, which are q's, as they are."""
    for rows in row_blocks(checkpoint.tensors[name], 0, num_rows):
        writer.write(name, checkpoint.read(name, rows), first_row=rows[0])


def _merge_norm(
    checkpoint: Checkpoint,
    norm: HeadNorm,
    layer: AttentionLayer,
    settings: ConvertSettings,
    writer: CheckpointWriter,
) -> None:
    """The norm of K, one row of D weights per head. Fresh ones (method random) are what models start from: 1 and 0."""
    import torch

    num_new, num_old = settings.num_key_value_heads, layer.num_key_value_heads
    for name, start_value in ((norm.weight, 1.0), (norm.bias, 0.0)):
        if name is None:
            continue
        if "{head}" in name:
            heads = torch.stack([checkpoint.read(name.format(head=head)) for head in range(num_old)])
        else:
            heads = checkpoint.read(name).reshape(num_old, layer.head_dim)
        if settings.method == "random":
            merged = torch.full((num_new, layer.head_dim), start_value)
        else:
            merged = _merge_function(settings, name, 0.0)(heads, num_new)
        if "{head}" in name:
            for head in range(num_new):
                writer.write(name.format(head=head), merged[head])
        else:
            writer.write(name, merged.reshape(-1) if norm.kind == "flat" else merged)


def _record(
    model: str | Path,
    revision: str | None,
    checkpoint: Checkpoint,
    old_record: dict[str, Any],
    layers: list[AttentionLayer],
    settings: ConvertSettings,
    windows: torch.Tensor | None,
    statistics: list[dict[str, Any]],
) -> dict[str, Any]:
    """The contents of headfold.json."""
    calibration = None
    if settings.calibration is not None and windows is not None:
        calibration = {
            "source": settings.calibration,
            "sha256": text_fingerprint(settings.calibration),
            "windows": windows.shape[0],
            "window_tokens": windows.shape[1],
        }
    from_hub = not expanded(model).is_dir()
    source: dict[str, Any] = {
        "name": str(model),
        "revision": checkpoint.path.name if from_hub else revision,
        "sha256": checkpoint.fingerprint,
        "model_type": checkpoint.config["model_type"],
    }
    if old_record:  # what had been done to it before
        source["record"] = old_record
    return {
        "headfold": _version("headfold"),
        "source": source,
        "method": settings.method,
        "grouping": settings.grouping,
        "seed": settings.seed,
        "calibration": calibration,
        "num_attention_heads": _one_or_all([layer.num_attention_heads for layer in layers]),
        "num_key_value_heads": {
            "before": _one_or_all([layer.num_key_value_heads for layer in layers]),
            "after": settings.num_key_value_heads,
        },
        "layers": statistics,
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in ("torch", "transformers")},
        },
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _report(
    model: str | Path,
    output: str | Path,
    source_type: str,
    checkpoint: Checkpoint,
    layers: list[AttentionLayer],
    settings: ConvertSettings,
    weight_bytes: int,
    left_out: list[str],
    statistics: list[dict[str, Any]],
    started: float,
) -> ConversionReport:
    num_new = settings.num_key_value_heads
    num_heads = [layer.num_attention_heads for layer in layers]
    dtype = _CACHE_DTYPES[checkpoint.tensors[layers[0].k.weight].dtype]

    def cache_bytes(kv_heads: list[int]) -> int:
        return sum(
            kv_cache_bytes(
                num_layers=1, num_key_value_heads=count, head_dim=layer.head_dim, num_tokens=1, cache_dtype=dtype
            )
            for layer, count in zip(layers, kv_heads, strict=True)
        )

    return ConversionReport(
        source=str(model),
        output=str(output),
        model_type=attention_config(checkpoint.config).model_type,
        remapped_from=None if source_type == checkpoint.config["model_type"] else source_type,
        method=str(settings.method),
        grouping=settings.grouping,
        num_layers=len(layers),
        num_attention_heads=_one_or_all(num_heads),
        num_key_value_heads_before=_one_or_all([layer.num_key_value_heads for layer in layers]),
        num_key_value_heads=num_new,
        head_dim=_one_or_all([layer.head_dim for layer in layers]),
        cache_dtype=dtype,
        cache_bytes_per_token_before=cache_bytes([layer.num_key_value_heads for layer in layers]),
        cache_bytes_per_token=cache_bytes([num_new] * len(layers)),
        weight_bytes_before=checkpoint.total_bytes(),
        weight_bytes=weight_bytes,
        tensor_parallel_sizes=tensor_parallel_sizes(
            math.gcd(*(layer.num_attention_heads for layer in layers)), num_new
        ),
        left_out_files=left_out,
        warnings=checkpoint.warnings,
        advice=_advice(layers, settings),
        layers=statistics,
        seconds=time.monotonic() - started,
    )


def _advice(layers: list[AttentionLayer], settings: ConvertSettings) -> str | None:
    if settings.method != "mean" or all(layer.num_key_value_heads == settings.num_key_value_heads for layer in layers):
        return None
    from headfold.convert.calibrate import refuse_calibration

    try:
        refuse_calibration(layers)
    except RefusedError:
        return None
    return "with --calibration TEXT, method fold would lose far less before any training; docs/fold.md has the figures"


def _one_or_all(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts


def _counts(counts: int | list[int]) -> str:
    return str(counts) if isinstance(counts, int) else " or ".join(map(str, sorted(set(counts))))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
