"""evaluate(): checkpoints in, a report out."""

from __future__ import annotations

import datetime
import gc
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headfold.convert.check import verify_checkpoint
from headfold.convert.checkpoint import Checkpoint, read_record
from headfold.convert.errors import RefusedError
from headfold.convert.texts import load_tokenizer

from . import decode, loading
from .corpus import ScoringPlan, plan_scoring
from .divergence import DivergenceMeter
from .engines import CacheShape, Engine, TransformersEngine, VllmEngine, cache_shape, refuse_without_vllm
from .perplexity import compare, sampling_units, score
from .schema import CacheBytesPerToken, Conditions, DecodeSetup, ModelRecord, Report, TrainingPoint
from .settings import DecodeSettings, EvalSettings
from .tasks import TaskSuite, compare_tasks
from .verdict import verdict

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and how much there is."""

CACHE_TOKENS = 16
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ENTRY_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_PACKAGES = ("headfold", "torch", "transformers", "lm_eval", "vllm")


def evaluate(
    before: Path,
    afters: Sequence[Path],
    settings: EvalSettings,
    *,
    training_metrics: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measures the MHA model and its conversions under the same settings, and returns the report.

    before: the MHA checkpoint. afters: the checkpoints of one conversion in the order in which they were made; the
    first is the converted one and the last is what came of it. A single one that was not uptrained is both; a single
    one that was uptrained leaves the converted one unknown. training_metrics: uptraining's metrics.jsonl, for its
    curve.

    What cannot be measured is refused before anything is: unsound checkpoints, unlike tokenizers or vocabularies,
    contexts beyond the model's positions, task data that is not there. Raises RefusedError for these, HeadfoldError
    for a measurement that failed, such as one that gave NaN.
    """
    progress = progress or (lambda stage, done, total: None)
    paths = [Path(before), *map(Path, afters)]
    if len(paths) < 2:
        raise RefusedError("eval: give at least one checkpoint to compare with the first.")
    if not (settings.text or settings.tasks or settings.decode):
        raise RefusedError("eval: nothing to measure; give text, tasks or decode.")

    place = loading.placement(settings)
    checkpoints = [verify_checkpoint(path, against_class=True) for path in paths]
    records = [read_record(path) for path in paths]
    roles, converted = _roles(paths, records)
    configs = [loading.load_config(path, place) for path in paths]
    _refuse_unlike_models(paths, configs)
    limits = [config.max_position_embeddings for config in configs if getattr(config, "max_position_embeddings", None)]
    max_positions = min(limits, default=None)
    contexts: list[int] = []
    ladder_context, note = 0, None
    if settings.engine == "vllm":
        refuse_without_vllm()
    if settings.decode is not None:
        contexts, ladder_context, note = decode.usable_contexts(settings.decode, max_positions)
    tokenizers = []
    if settings.text or settings.tasks:
        with loading.quiet():
            tokenizers = [load_tokenizer(path, trust_remote_code=settings.trust_remote_code) for path in paths]
    plan = None
    if settings.text:
        plan = plan_scoring(settings, list(zip(map(str, paths), tokenizers, strict=True)), max_positions)
        _refuse_foreign_tokens(paths[0], plan, configs[0].vocab_size)
    suite = TaskSuite(settings) if settings.tasks else None
    training = _training_curve(training_metrics) if training_metrics is not None else []

    # Divergence needs the logits of all models side by side; everything else takes them one at a time.
    together = plan is not None and settings.divergence
    meters = [DivergenceMeter() for _ in afters] if together else []
    models: list[ModelRecord] = []
    entries_per_token: list[float] = []
    attentions: list[str] = []
    log_likelihoods = np.zeros((len(paths), len(plan.windows) if plan else 0))
    task_results = []
    for group in [list(range(len(paths)))] if together else [[index] for index in range(len(paths))]:
        loaded = [loading.load_model(paths[index], place) for index in group]
        for index, model in zip(group, loaded, strict=True):
            shape = cache_shape(model, CACHE_TOKENS)
            entries_per_token.append(shape.entries_per_token)
            attentions.append(str(loading.text_config(model)._attn_implementation))
            models.append(_model_record(roles[index], checkpoints[index], records[index], model, shape))
        if plan is not None:
            stage = "perplexity" if together else f"perplexity, {roles[group[0]]}"
            log_likelihoods[group] = score(
                loaded,
                [str(paths[index]) for index in group],
                plan.windows,
                batch_tokens=settings.batch_tokens,
                meters=meters,
                progress=_of_stage(progress, stage),
            )
        if suite is not None:
            for index, model in zip(group, loaded, strict=True):
                _of_stage(progress, "tasks")(index, len(paths))
                task_results.append(suite.run(model, tokenizers[index], max_positions))
        del loaded, model
        _free_memory(place.device)

    perplexity = recovered = None
    divergence = []
    if plan is not None:
        resampling = {"bootstrap_samples": settings.bootstrap_samples, "seed": settings.seed}
        perplexity, recovered = compare(plan, roles, log_likelihoods, converted=converted, **resampling)
        units = sampling_units(plan)[1]
        divergence = [meter.result(role, units) for role, meter in zip(roles[1:], meters, strict=False)]
    tasks = []
    if task_results:
        tasks = compare_tasks(
            task_results, converted=converted, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
        )

    points, ladder, setup = [], None, None
    if settings.decode is not None:
        pair = [
            _engine(path, settings, settings.decode, place, max(*contexts, ladder_context))
            for path in (paths[0], paths[-1])
        ]
        points = decode.measure_points(
            pair, settings.decode, contexts, seed=settings.seed, progress=_of_stage(progress, "decode")
        )
        if settings.decode.ladder_sequences:
            ladder = decode.measure_ladder(
                pair,
                settings.decode,
                ladder_context,
                points,
                seed=settings.seed,
                progress=_of_stage(progress, "concurrent sequences"),
            )
        setup = DecodeSetup(new_tokens=settings.decode.new_tokens, repetitions=settings.decode.repetitions)

    dtype = models[0].stored_dtype
    cache = CacheBytesPerToken(
        before=entries_per_token[0] * _ENTRY_BYTES[dtype],
        after=entries_per_token[-1] * _ENTRY_BYTES[dtype],
        dtype=dtype,
        num_tokens=CACHE_TOKENS,
    )
    conditions = _conditions(settings, place, ", ".join(dict.fromkeys(attentions)), plan)
    return Report(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        verdict=verdict(models, perplexity, recovered, cache, points, tasks, device=_device_in_words(conditions)),
        models=models,
        perplexity=perplexity,
        recovered_share=None if recovered is None else recovered.value,
        recovered_share_interval=recovered,
        divergence=divergence,
        cache_bytes_per_token=cache,
        decode=points,
        decode_setup=setup,
        ladder=ladder,
        tasks=tasks,
        training=training,
        notes=[note] if note else [],
        conditions=conditions,
    )


def _engine(
    path: Path, settings: EvalSettings, asked: DecodeSettings, place: loading.Placement, longest_context: int
) -> Engine:
    """The engine that times a model's decoding."""
    if settings.engine != "vllm":
        return TransformersEngine(loading.load_model(path, place))
    return VllmEngine(
        path,
        place,
        max_sequences=max(*asked.batches, asked.ladder_sequences),
        max_tokens=longest_context + asked.new_tokens,
    )


def _roles(paths: Sequence[Path], records: Sequence[dict[str, Any]]) -> tuple[list[str], int | None]:
    """The part that each model plays, and the index of the converted one where it was given."""
    if len(paths) == 2:
        return ["before", "after"], None if "uptrain" in records[1] else 1
    return ["before", "converted", *(path.name for path in paths[2:-1]), "after"], 1


def _refuse_unlike_models(paths: Sequence[Path], configs: Sequence[Any]) -> None:
    """Models whose outputs cannot be compared, and conversions that are not stages of one and the same."""
    for path, config in zip(paths[1:], configs[1:], strict=True):
        if config.vocab_size != configs[0].vocab_size:
            raise RefusedError(
                f"{path}: vocabulary of {config.vocab_size} tokens, that of {paths[0]} has {configs[0].vocab_size}; "
                "such models cannot be compared token by token."
            )
    heads = [getattr(config, "num_key_value_heads", None) for config in configs[1:]]
    if len(set(heads)) > 1:
        found = ", ".join(f"{path} has {count}" for path, count in zip(paths[1:], heads, strict=True))
        raise RefusedError(f"the checkpoints after are not stages of one conversion: KV heads differ ({found}).")


def _refuse_foreign_tokens(path: Path, plan: ScoringPlan, vocab_size: int) -> None:
    highest = max(max(window.input_ids + window.targets) for window in plan.windows)
    if highest >= vocab_size:
        raise RefusedError(
            f"{path}: its tokenizer gives token {highest}, its vocabulary has {vocab_size}; they do not belong "
            "together."
        )


def _model_record(
    role: str,
    checkpoint: Checkpoint,
    record: dict[str, Any],
    model: transformers.PreTrainedModel,
    shape: CacheShape,
) -> ModelRecord:
    config = loading.text_config(model)
    stored = Counter[str]()
    for entry in checkpoint.tensors.values():
        stored[_DTYPES.get(entry.dtype, "")] += entry.nbytes
    del stored[""]
    return ModelRecord(
        role=role,
        name=_name(checkpoint.path),
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=checkpoint.total_bytes(),
        num_layers=shape.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        stored_dtype=stored.most_common(1)[0][0] if stored else "bfloat16",
        method=_text(record.get("method")),
        grouping=_text(record.get("grouping")),
        uptraining_tokens=_count(record.get("uptrain"), "tokens"),
    )


def _name(path: Path) -> str:
    """A directory's own name; for a hub cache (models--OWNER--NAME/snapshots/COMMIT) that of the model."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(section: Any, key: str) -> int | None:
    value = section.get(key) if isinstance(section, dict) else None
    return value if isinstance(value, int) else None


def _training_curve(path: Path) -> list[TrainingPoint]:
    """Evaluations in uptraining's metrics.jsonl. A resumed run may repeat a line; the last one stands."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    points = {}
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:  # a line cut short by a kill
            continue
        if isinstance(values, dict) and values.get("eval_loss") is not None:
            points[values["tokens"]] = TrainingPoint(tokens=values["tokens"], eval_loss=values["eval_loss"])
    return [points[tokens] for tokens in sorted(points)]


def _conditions(
    settings: EvalSettings, place: loading.Placement, attention: str, plan: ScoringPlan | None
) -> Conditions:
    return Conditions(
        device=place.device.type,
        device_name=loading.device_name(place.device),
        dtype=str(place.dtype).removeprefix("torch."),
        engine=settings.engine,
        attention=attention,
        num_threads=torch.get_num_threads(),
        window=plan.window if plan else None,
        stride=plan.stride if plan else None,
        bos=plan.bos if plan else None,
        bos_token=plan.corpus.prefix_token if plan else None,
        text_sha256=plan.corpus.sha256 if plan else None,
        texts=plan.corpus.texts if plan else [],
        seed=settings.seed,
        versions=dict(_versions()),
        platform=platform.platform(),
    )


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _device_in_words(conditions: Conditions) -> str:
    if conditions.device == "cpu":
        return f"this CPU ({conditions.num_threads} threads)"
    return conditions.device_name


def _of_stage(progress: Progress, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(stage, done, total)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
