"""The advisor: what each possible number of KV heads costs and saves, from a config alone; with text, what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from headfold.convert.checkpoint import Checkpoint, load_config, resolve_model
from headfold.convert.conversion import changed_shapes, tensor_parallel_sizes
from headfold.convert.errors import HeadfoldError, RefusedError, first_line
from headfold.convert.families import AttentionConfig, AttentionLayer, attention_config, describe
from headfold.convert.families.remap import remap, remap_config
from headfold.convert.header import TensorEntry, TensorSpec, dtype_name
from headfold.kernels import kv_cache_bytes
from headfold.recipes.gpus import GPU_MEMORY_GB, find_gpu

CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 8, 64)
CALIBRATION_TOKENS = 16384
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions")
HEADROOM = 0.1
"""Share of a GPU's memory that is left to activations, the runtime's own memory and fragmentation."""


class CacheSize(BaseModel):
    """The KV cache of `batch` sequences of `context` tokens each."""

    context: int
    batch: int
    bytes: int


class Sequences(BaseModel):
    """How many sequences of `context` tokens fit on the GPU beside the weights."""

    context: int
    num_sequences: int


class Kept(BaseModel):
    """What the shared heads of a layer keep, before any refit (docs/fold.md, equations 2 and 3)."""

    layer: int
    keys: float = Field(description="Share of the keys' energy, as the queries see it.")
    values: float = Field(description="Share of the values' energy, as the output projection sees it.")


class Option(BaseModel):
    """One number of KV heads per layer."""

    num_key_value_heads: int
    cache_bytes_per_token: int
    saving_percent: float = Field(description="Cache memory saved, of what the model as it is needs.")
    weight_bytes: int
    tensor_parallel_sizes: list[int] = Field(description="Numbers of ranks among which the KV heads split evenly.")
    cache: list[CacheSize]
    sequences: list[Sequences] | None = Field(description="None without a GPU.")
    kept: list[Kept] | None = Field(description="Of each layer; None without calibration text.")


class Plan(BaseModel):
    """What `headfold plan` found. Bytes are bytes, contexts are tokens."""

    model: str
    model_type: str
    num_layers: int = Field(description="Layers with attention.")
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_context: int | None = Field(description="max_position_embeddings.")
    cache_dtype: str
    sliding_window_layers: int = Field(description="Layers that keep the last tokens only.")
    num_parameters: int
    parameters_from: str
    gpu: str | None
    gpu_memory_bytes: int | None
    headroom: float = Field(description="Share of the GPU's memory left to activations and the runtime.")
    calibration: str | None = Field(description="The text that was measured on.")
    calibration_tokens: int | None
    options: list[Option]


@dataclass(frozen=True)
class _CachedLayer:
    num_key_value_heads: int
    head_dim: int
    window: int | None


def plan(
    model: str | Path,
    *,
    kv_heads: Sequence[int] | None = None,
    gpu: str | None = None,
    calibration: str | None = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """What each number of KV heads costs and saves: `kv_heads`, or all that divide those there are.

    model: a directory or a hub name; only its config.json is needed. `gpu`: a name from GPU_MEMORY_GB. With
    `calibration`, a text or data set, the model's weights are read as well, and what `fold` would keep at each number
    of KV heads is measured; nothing is written. `progress(done, total)` counts the layers of that. Raises RefusedError
    for models that cannot be converted, numbers that do not divide the heads, and unknown GPUs.
    """
    gpu = find_gpu(gpu) if gpu else None
    path = resolve_model(model, revision, only_config=calibration is None)
    source_config = load_config(path)
    raw_config = remap_config(source_config)
    config = attention_config(raw_config)
    num_heads, num_kv_heads = config.uniform("num_attention_heads"), config.uniform("num_key_value_heads")
    head_dim = config.uniform("head_dim")
    for count in kv_heads or ():
        config.refuse_count(count)
    checkpoint, source = _weights(path, source_config)
    layers = describe(checkpoint)
    windows = _windows(raw_config, config)
    cached = [_CachedLayer(layer.num_key_value_heads, layer.head_dim, windows.get(layer.index)) for layer in layers]
    dtype = _dtype(raw_config, config)
    max_context = next((config.text[name] for name in _CONTEXT_FIELDS if config.text.get(name) is not None), None)
    contexts = _contexts(max_context)
    gpu_bytes = GPU_MEMORY_GB[gpu] * 10**9 if gpu else None

    def cache_bytes(count: int, context: int, batch: int) -> int:
        return sum(
            kv_cache_bytes(
                num_layers=1,
                num_key_value_heads=count,
                head_dim=layer.head_dim,
                num_tokens=context,
                num_sequences=batch,
                cache_dtype=dtype,
                sliding_windows=[layer.window],
            )
            for layer in cached
        )

    counts = sorted(set(kv_heads or config.possible_counts()) | {num_kv_heads}, reverse=True)
    kept, num_calibration_tokens = None, None
    if calibration is not None:
        kept, num_calibration_tokens = _measure_kept(checkpoint, layers, calibration, counts, progress)
    options = []
    for count in counts:
        new_shapes = changed_shapes(checkpoint, layers, count)
        weight_bytes = checkpoint.total_bytes() - sum(checkpoint.tensors[name].nbytes for name in new_shapes)
        weight_bytes += sum(
            TensorSpec(name, checkpoint.tensors[name].dtype, shape).nbytes
            for name, shape in new_shapes.items()
            if shape is not None
        )
        sequences = None
        if gpu_bytes is not None:
            room = int(gpu_bytes * (1 - HEADROOM)) - weight_bytes
            sequences = [
                Sequences(context=context, num_sequences=max(0, room // cache_bytes(count, context, 1)))
                for context in contexts
            ]
        options.append(
            Option(
                num_key_value_heads=count,
                cache_bytes_per_token=cache_bytes(count, 1, 1),
                saving_percent=100 * (1 - count / num_kv_heads),
                weight_bytes=weight_bytes,
                tensor_parallel_sizes=tensor_parallel_sizes(num_heads, count),
                cache=[
                    CacheSize(context=context, batch=batch, bytes=cache_bytes(count, context, batch))
                    for context in contexts
                    for batch in BATCHES
                ],
                sequences=sequences,
                kept=kept[count] if kept else None,
            )
        )
    return Plan(
        model=str(model),
        model_type=config.model_type,
        num_layers=len(layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=max_context if isinstance(max_context, int) else None,
        cache_dtype=dtype,
        sliding_window_layers=sum(layer.window is not None for layer in cached),
        num_parameters=sum(entry.num_elements for entry in checkpoint.tensors.values()),
        parameters_from=source,
        gpu=gpu,
        gpu_memory_bytes=gpu_bytes,
        headroom=HEADROOM,
        calibration=calibration,
        calibration_tokens=num_calibration_tokens,
        options=options,
    )


def _measure_kept(
    checkpoint: Checkpoint,
    layers: list[AttentionLayer],
    calibration: str,
    counts: list[int],
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[int, list[Kept]], int]:
    """What each layer keeps at each count, and the number of tokens that was measured on."""
    from headfold.convert.calibrate import energy_kept, refuse_calibration
    from headfold.convert.windows import read_windows

    if not checkpoint.shards():
        raise RefusedError(f"{checkpoint.path}: no weights here to measure with calibration text; plan without it")
    refuse_calibration(layers)
    windows = read_windows(checkpoint, calibration, num_tokens=CALIBRATION_TOKENS)
    shares = energy_kept(checkpoint, layers, windows, counts=counts, progress=progress)
    kept = {
        count: [
            Kept(layer=layer.index, keys=keys, values=values)
            for layer, (keys, values) in zip(layers, of_layers, strict=True)
        ]
        for count, of_layers in shares.items()
    }
    return kept, windows.numel()


def _contexts(max_context: Any) -> list[int]:
    """The named contexts that the model can have, its longest included."""
    if not isinstance(max_context, int) or max_context <= 0:
        return list(CONTEXTS)
    return sorted({*(context for context in CONTEXTS if context < max_context), max_context})


def _dtype(raw_config: dict[str, Any], config: AttentionConfig) -> str:
    """The dtype in which the weights say they are, and so the cache by default; bfloat16 where nothing is said."""
    for section in (config.text, raw_config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section.get(key), str):
                return str(section[key]).removeprefix("torch.")
    return "bfloat16"


def _weights(path: Path, source_config: dict[str, Any]) -> tuple[Checkpoint, str]:
    """Names, shapes and dtypes of the weights: from their headers if they are here, else from an empty model."""
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return remap(Checkpoint.open(path)), "the headers of the weights"
    return remap(_empty_checkpoint(path, source_config)), "the config, by building the model without memory"


def _empty_checkpoint(path: Path, raw_config: dict[str, Any]) -> Checkpoint:
    import torch
    from transformers import AutoModelForCausalLM

    config = _transformers_config(raw_config)
    dtype = getattr(torch, _dtype(raw_config, attention_config(remap_config(raw_config))), torch.bfloat16)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # whatever a config makes the model's class raise
        raise RefusedError(f"{path}: no model can be built from config.json ({first_line(error)})") from error
    tensors = {}
    for name, parameter in model.named_parameters():
        shape, nbytes = tuple(parameter.shape), parameter.numel() * parameter.element_size()
        tensors[name] = TensorEntry(name, "", dtype_name(parameter.dtype) or "F32", shape, 0, nbytes)
    return Checkpoint(path=path, config=raw_config, tensors=tensors, metadata={}, index=None, fingerprint="")


def _transformers_config(raw_config: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = raw_config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise RefusedError(f"{model_type}: not a model that transformers knows; plan needs its weights to count with")
    try:
        return CONFIG_MAPPING[model_type].from_dict(raw_config)
    except Exception as error:  # validation errors of several libraries
        raise HeadfoldError(f"config.json: transformers does not accept it ({first_line(error)})") from error


def _windows(raw_config: dict[str, Any], config: AttentionConfig) -> dict[int, int]:
    """The sliding window of each layer that has one, as transformers' own cache sees it."""
    from transformers import CONFIG_MAPPING

    if raw_config["model_type"] not in CONFIG_MAPPING:
        return {}
    text = _transformers_config(raw_config).get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    if not isinstance(window, int):
        return {}
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * config.num_layers
    return {index: window for index, kind in enumerate(types) if kind == "sliding_attention"}


def render_plan(result: Plan) -> str:
    """The plan as plain text: a line of facts, and a table with one row per number of KV heads."""
    lines = [
        f"{result.model}: {result.model_type}, {_count(result.num_parameters)} parameters, counted from "
        f"{result.parameters_from}",
        f"{result.num_layers} layers, {result.num_attention_heads} query heads, {result.num_key_value_heads} KV heads, "
        f"head_dim {result.head_dim}",
        f"KV cache in {result.cache_dtype}"
        + (f", {result.sliding_window_layers} layers with a sliding window" if result.sliding_window_layers else ""),
        "",
    ]
    contexts = sorted({size.context for size in result.options[0].cache})
    sizes = [(1, context) for context in contexts] + [(batch, contexts[-1]) for batch in BATCHES[1:]]
    rows = []
    for option in result.options:
        cache = {(size.batch, size.context): size.bytes for size in option.cache}
        rows.append(
            [
                str(option.num_key_value_heads),
                _bytes(option.cache_bytes_per_token),
                f"{option.saving_percent:.3g} %",
                *(_bytes(cache[size]) for size in sizes),
                _bytes(option.weight_bytes),
                ", ".join(map(str, option.tensor_parallel_sizes)),
            ]
        )
    names = [f"{batch} x {context}" for batch, context in sizes]
    lines += _table(["KV heads", "per token", "saving", *names, "weights", "tensor parallel"], rows)
    if result.gpu and result.gpu_memory_bytes:
        lines += [
            "",
            f"Sequences at once on one {result.gpu} beside the weights, with {result.headroom:.0%} of its memory left "
            "to activations and the runtime:",
        ]
        rows = [
            [str(option.num_key_value_heads), *(str(entry.num_sequences) for entry in option.sequences or ())]
            for option in result.options
        ]
        lines += _table(["KV heads", *(f"{context} tokens" for context in contexts)], rows)
    if result.calibration:
        lines += ["", *_render_kept(result)]
    lines += [
        "",
        "8 x 4096: the cache of 8 sequences of 4096 tokens.",
        "tensor parallel: numbers of ranks among which the KV heads split evenly.",
        "With more ranks vLLM keeps copies of KV heads, and transformers' own tensor parallelism fails.",
    ]
    return "\n".join(lines)


def _render_kept(result: Plan) -> list[str]:
    rows = []
    for option in result.options:
        kept = option.kept or []
        worst = min(kept, key=lambda layer: layer.values)
        keys, values = (sum(shares) / len(kept) for shares in zip(*((at.keys, at.values) for at in kept), strict=True))
        rows.append(
            [
                str(option.num_key_value_heads),
                f"{keys:.1%}",
                f"{values:.1%}",
                f"{worst.values:.1%} (layer {worst.layer})",
            ]
        )
    return [
        f"What shared heads would keep of the energy of keys and values (fold, neighbours, before its refits), on "
        f"{result.calibration_tokens:,} tokens of {result.calibration}:",
        *_table(["KV heads", "keys", "values", "least, of values"], rows),
    ]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _bytes(count: int) -> str:
    """Bytes with a binary unit, three digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
