"""What the report shows: sections of text, figures and tables, computed from report.json for all its renderings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from .charts import Axis, Limit, Series, line_chart, sample
from .formats import binary_bytes, count, percent, seconds, significant, trimmed
from .schema import (
    Conditions,
    DecodePoint,
    Divergence,
    Interval,
    Perplexity,
    PerplexityChange,
    Report,
    Rung,
    Speed,
    TextPerplexity,
    TextRecord,
)
from .verdict import headline_point


@dataclass(frozen=True)
class Table:
    """Cells are text, numbers already written. The first columns hold words, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1


@dataclass(frozen=True)
class Figure:
    """One or more charts over the same models."""

    title: str
    caption: str
    charts: Sequence[Markup]
    legend: Sequence[tuple[str, str, Markup]] = ()
    """Role, label and mark of each model."""


@dataclass(frozen=True)
class Section:
    title: str
    lead: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Bar:
    """One of two or three values side by side; `share` of the longest, 0 to 1."""

    role: str
    label: str
    value: str
    share: float


@dataclass(frozen=True)
class Card:
    """A result of the first screen: the figure that counts, what it is made of, and its uncertainty or place."""

    title: str
    figure: str
    unit: str
    bars: Sequence[Bar]
    detail: str


def view(report: Report) -> dict[str, Any]:
    """The names that the templates use."""
    before, after = report.models[0], report.models[-1]
    return {
        "report": report,
        "name": before.name,
        "change": f"{before.num_key_value_heads} → {after.num_key_value_heads} KV heads",
        "date": report.created[:10],
        "asked": _asked(report),
        "quality": _quality_card(report),
        "cards": [card for card in (_speed_card(report), _cache_card(report)) if card],
        "sections": [
            section for section in (_quality(report), _decode(report), _tasks(report), _conditions(report)) if section
        ],
    }


def _labels(report: Report) -> dict[str, str]:
    """How each model is called, by role."""
    trained = report.models[-1].uptraining_tokens is not None or report.model("converted") is not None
    known = {"before": "Original", "converted": "Converted", "after": "Uptrained" if trained else "Converted"}
    return {model.role: known.get(model.role, model.name) for model in report.models}


def _asked(report: Report) -> list[tuple[str, str]]:
    """What was asked for: term and words."""
    before, after, where = report.models[0], report.models[-1], report.conditions
    asked = [
        (
            "Conversion",
            f"{before.num_key_value_heads} KV heads to {after.num_key_value_heads}"
            + (f" by {after.method}" if after.method else "")
            + (f", {after.grouping} heads grouped" if after.grouping else ""),
        )
    ]
    if after.uptraining_tokens is not None:
        asked.append(("Uptraining", f"{count(after.uptraining_tokens)} tokens"))
    if where.texts:
        names = ", ".join(text.name for text in where.texts)
        asked.append(("Text", f"{names}, {count(sum(text.num_tokens for text in where.texts))} tokens"))
    asked.append(("Measured on", _device(report)))
    return asked


def _device(report: Report) -> str:
    where = report.conditions
    threads = f", {where.num_threads} thread{'s' * (where.num_threads != 1)}" if where.device == "cpu" else ""
    return f"{_kind(report)} ({where.device_name}{threads}), {where.dtype}"


def _kind(report: Report) -> str:
    return {"cpu": "CPU", "cuda": "GPU"}.get(report.conditions.device, report.conditions.device)


def _with_interval(interval: Interval, number: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return number(interval.value)
    return f"{number(interval.value)} ({number(interval.low)} to {number(interval.high)})"


# --------------------------------------------------------------------------------------------------- the first screen


def _quality_card(report: Report) -> dict[str, Any] | None:
    """Perplexity at each stage, and how much of the lost loss came back."""
    perplexity = report.perplexity
    if perplexity is None:
        return None
    labels = _labels(report)
    values = {"before": perplexity.before, "converted": perplexity.converted, "after": perplexity.after}
    recovered = report.recovered_share_interval
    return {
        "stages": [
            (role, labels[role], significant(value, 4))
            for role, value in values.items()
            if value is not None and role in labels
        ],
        "change": _change(perplexity.changes[-1].ratio),
        "recovered": None if recovered is None else _with_interval(recovered, lambda share: f"{100 * share:.0f} %"),
        "recovered_share": None if recovered is None else min(max(recovered.value, 0.0), 1.0),
    }


def _change(ratio: Interval) -> str:
    """A perplexity ratio against the original: in percent, or as a factor where it is large."""
    if ratio.value < 2:
        return f"{_with_interval(ratio, lambda value: f'{100 * (value - 1):+.1f} %')} against the original"
    return f"{_with_interval(ratio, lambda value: f'{value:.1f}')} times the original"


def _speed_card(report: Report) -> Card | None:
    if not report.decode:
        return None
    point = headline_point(report.decode)
    labels = _labels(report)
    sides = (("before", point.before.tokens_per_second), ("after", point.after.tokens_per_second))
    longest = max(value for _, value in sides)
    return Card(
        title="Decode speed",
        figure=f"{point.speedup.median:.2f}×",
        unit=f"as fast, on a {_kind(report)}",
        bars=[Bar(role, labels[role], f"{significant(value)} tokens/s", value / longest) for role, value in sides],
        detail=f"{_point(point)}; {point.speedup.low:.2f} to {point.speedup.high:.2f} over repetitions",
    )


def _cache_card(report: Report) -> Card:
    cache = report.cache_bytes_per_token
    labels = _labels(report)
    sides = (("before", cache.before), ("after", cache.after))
    longest = max(value for _, value in sides)
    return Card(
        title="KV cache per token",
        figure=f"{trimmed(cache.before / cache.after)}×",
        unit="smaller",
        bars=[Bar(role, labels[role], binary_bytes(value), value / longest) for role, value in sides],
        detail=f"counted in the real cache, in {cache.dtype}",
    )


def _point(point: DecodePoint) -> str:
    return f"batch {point.batch}, context {point.context:,}"


# ----------------------------------------------------------------------------------------------------------- sections


def _quality(report: Report) -> Section | None:
    perplexity = report.perplexity
    if perplexity is None:
        return None
    lead = (
        f"{perplexity.num_tokens:,} tokens in {perplexity.num_units:,} {perplexity.unit}s, each scored once, on at "
        f"most {report.conditions.window:,} tokens of context. Lower is better. Intervals are 95 %, from resampling "
        f"{perplexity.unit}s: they speak of this text, not of another training run."
    )
    figures = [figure for figure in (_training_figure(report), _position_figure(report)) if figure]
    tables = [_perplexity_table(perplexity, _labels(report))]
    if perplexity.by_text:
        tables.append(_text_table(perplexity.by_text, _labels(report)))
    if report.divergence:
        tables.append(_divergence_table(report.divergence, _labels(report)))
    return Section("Quality", [lead], figures, tables)


def _perplexity_table(perplexity: Perplexity, labels: dict[str, str]) -> Table:
    added = {change.role: _plus_minus(change) for change in perplexity.changes}
    return Table(
        "Perplexity. Nats added: mean ln(perplexity ratio) to the original, per token, with its standard error.",
        ["Model", "Per token", "Per word", "Per byte", "Bits per byte", "Nats per token", "Nats added"],
        [
            [
                labels[model.role],
                significant(model.per_token, 4),
                "–" if model.per_word is None else significant(model.per_word, 4),
                significant(model.per_byte, 4),
                f"{model.bits_per_byte:.4f}",
                f"{model.nats_per_token:.4f}",
                added.get(model.role, "–"),
            ]
            for model in perplexity.models
        ],
    )


def _plus_minus(change: PerplexityChange) -> str:
    error = change.log_ratio_standard_error
    return f"{change.log_ratio:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def _text_table(by_text: Sequence[TextPerplexity], labels: dict[str, str]) -> Table:
    roles = list(by_text[0].per_token)
    return Table(
        "Perplexity per token on each text.",
        ["Text", *(labels[role] for role in roles)],
        [[text.name, *(significant(text.per_token[role], 4) for role in roles)] for text in by_text],
    )


def _divergence_table(divergence: Sequence[Divergence], labels: dict[str, str]) -> Table:
    return Table(
        "Divergence of next-token distributions from the original's (KL, nats), and how often both would choose the "
        "same token.",
        ["Model", "Mean KL", "Median KL", "99.9th percentile", "Same top token"],
        [
            [
                labels[each.role],
                significant(each.mean_kl),
                significant(each.median_kl),
                significant(each.p999_kl),
                percent(each.top_token_agreement),
            ]
            for each in divergence
        ],
    )


def _training_figure(report: Report) -> Figure | None:
    points = [(float(point.tokens), math.exp(point.eval_loss)) for point in report.training if point.eval_loss < 700]
    if len(points) < 2:
        return None
    highest, lowest = max(y for _, y in points), min(y for _, y in points)
    chart = line_chart(
        "Perplexity against uptraining tokens",
        [Series("after", "Perplexity", points)],
        Axis("tokens of uptraining", count),
        Axis("perplexity", partial(trimmed, digits=5), scale="log" if highest > 8 * lowest else "linear"),
    )
    return Figure(
        "Perplexity while uptraining",
        "On the evaluation rows of the training itself, which are cut differently from the text of the tables below.",
        [chart],
    )


def _position_figure(report: Report) -> Figure | None:
    if not report.divergence or len(report.divergence[0].by_position) < 2:
        return None
    labels = _labels(report)
    chart = line_chart(
        "KL divergence from the original model by position",
        [
            Series(each.role, labels[each.role], [((p.first + p.last) / 2, p.mean_kl) for p in each.by_position])
            for each in report.divergence
        ],
        Axis("tokens of context", count),
        Axis("KL, nats", trimmed, from_zero=True),
    )
    return Figure(
        "Divergence from the original by position",
        "Mean KL, in nats. A curve that rises would mean that errors pile up along the context.",
        [chart],
        _legend(report, [each.role for each in report.divergence]),
    )


def _decode(report: Report) -> Section | None:
    if not report.decode:
        return None
    labels, setup = _labels(report), report.decode_setup
    first, best = min(report.decode, key=lambda p: p.batch * p.context), headline_point(report.decode)
    prefill = sorted({f"{point.first_token_speedup.median:.2f}" for point in report.decode}, key=float)
    lead = [
        "A single forward pass gains nothing from the smaller cache, only from smaller K and V projections: it "
        "computes. Scoring text and the time to first token are such passes "
        f"({' to '.join(prefill[:: max(len(prefill) - 1, 1)])} times as fast here). The gain is in decoding, where "
        "every step reads the whole cache, so that it grows with batch and "
        f"context. Here decoding was {first.speedup.median:.2f} times as fast at {_point(first)}, and "
        f"{best.speedup.median:.2f} times at {_point(best)}."
    ]
    if report.conditions.device == "cpu":
        lead.append("These are times of a CPU, and no statement about GPUs, where other limits hold.")
    assert setup is not None
    lead.append(
        f"Medians over {setup.repetitions} repetitions of {setup.new_tokens} steps, the models taking turns; "
        "preallocated cache; warm-up left out; the device synchronised around each step. Speed-up: median of the "
        "ratios within a repetition, lowest to highest."
    )
    figures = [figure for figure in (_speed_figure(report), *_ladder_figures(report)) if figure]
    header = [
        "Batch",
        "Context",
        "Tokens per second",
        "Speed-up",
        "Time per token",
        "p99",
        "Time to first token",
        "Cache",
    ]
    rows = [
        [
            f"{point.batch}",
            f"{point.context:,}",
            _pair(point, lambda side: significant(side.tokens_per_second)),
            f"{point.speedup.median:.2f}× ({point.speedup.low:.2f} to {point.speedup.high:.2f})",
            _pair(point, lambda side: seconds(side.time_per_output_token_s.median)),
            _pair(point, lambda side: seconds(side.time_per_output_token_s.p99)),
            _pair(point, lambda side: seconds(side.time_to_first_token_s)),
            _pair(point, lambda side: binary_bytes(side.cache_bytes)),
        ]
        for point in report.decode
    ]
    if any(point.before.peak_memory_bytes for point in report.decode):
        header.append("Peak memory")
        for row, point in zip(rows, report.decode, strict=True):
            row.append(_pair(point, lambda side: binary_bytes(side.peak_memory_bytes or 0)))
    if any(point.before.bandwidth_share for point in report.decode):
        header.append("Share of copy bandwidth")
        for row, point in zip(rows, report.decode, strict=True):
            row.append(_pair(point, lambda side: percent(side.bandwidth_share or 0, 0)))
    tables = [Table(f"{labels['before']} → {labels['after'].lower()}, by batch and context.", header, rows)]
    if report.ladder is not None and report.ladder.rungs:
        tables.append(_ladder_table(report))
    return Section("Decode speed and memory", lead, figures, tables)


def _pair(point: DecodePoint, words: Callable[[Speed], str]) -> str:
    return f"{words(point.before)} → {words(point.after)}"


def _legend(report: Report, roles: Sequence[str]) -> list[tuple[str, str, Markup]]:
    labels = _labels(report)
    return [(role, labels[role], sample(role)) for role in roles]


def _speed_figure(report: Report) -> Figure | None:
    """Tokens per second against context, a chart per batch; against batch where there is one context."""
    labels = _labels(report)
    legend = _legend(report, ["before", "after"])
    batches = sorted({point.batch for point in report.decode})
    contexts = sorted({point.context for point in report.decode})
    if len(contexts) > 1:
        groups = [(f"Batch {batch}", [point for point in report.decode if point.batch == batch]) for batch in batches]
        axis = Axis("tokens of context", count, scale="log", ticks=contexts)
    elif len(batches) > 1:
        groups = [(f"Context {contexts[0]:,}", report.decode)]
        axis = Axis("sequences at once", count, scale="log", ticks=batches)
    else:
        return None
    charts = []
    for title, points in groups:
        xs = [float(point.context if len(contexts) > 1 else point.batch) for point in points]
        sides = {
            "before": [point.before.tokens_per_second for point in points],
            "after": [point.after.tokens_per_second for point in points],
        }
        series = [Series(role, labels[role], list(zip(xs, ys, strict=True))) for role, ys in sides.items()]
        charts.append(line_chart(title, series, axis, Axis("tokens/s", count, from_zero=True), width=300))
    return Figure("Decode speed", "Tokens per second over all sequences; higher is better.", charts, legend)


def _ladder_figures(report: Report) -> list[Figure]:
    """Cache memory and throughput against concurrent sequences."""
    ladder, labels = report.ladder, _labels(report)
    if ladder is None or len(ladder.rungs) < 2:
        return []
    axis = Axis("concurrent sequences", count, ticks=[rung.sequences for rung in ladder.rungs])
    sides = {
        "before": [(float(rung.sequences), rung.before) for rung in ladder.rungs if rung.before],
        "after": [(float(rung.sequences), rung.after) for rung in ladder.rungs if rung.after],
    }
    roles = [role for role, points in sides.items() if points]
    memory = [Series(role, labels[role], [(n, float(side.cache_bytes)) for n, side in sides[role]]) for role in roles]
    throughput = [
        Series(role, labels[role], [(n, side.tokens_per_second) for n, side in sides[role]]) for role in roles
    ]

    highest = max(y for each in memory for _, y in each.points)
    limit = None
    if ladder.memory_limit_bytes is not None and ladder.memory_limit_bytes < 2 * highest:
        limit = Limit(ladder.memory_limit_bytes, f"memory for the cache: {binary_bytes(ladder.memory_limit_bytes)}")
        highest = max(highest, ladder.memory_limit_bytes)
    step = 2.0 ** math.ceil(math.log2(highest / 5))  # a round number of bytes
    memory_axis = Axis("KV cache", binary_bytes, ticks=[step * k for k in range(math.ceil(highest / step) + 1)])
    return [
        Figure(
            "Memory for concurrent sequences",
            f"Bytes of the real cache in {report.conditions.dtype}; each sequence has {ladder.context:,} tokens of "
            f"context and room for {ladder.new_tokens} more.",
            [line_chart("KV cache against concurrent sequences", memory, axis, memory_axis, limit=limit)],
            _legend(report, roles),
        ),
        Figure(
            "Throughput for concurrent sequences",
            f"Tokens per second over all sequences, at {ladder.context:,} tokens of context.",
            [
                line_chart(
                    "Tokens per second against concurrent sequences",
                    throughput,
                    axis,
                    Axis("tokens/s", count, from_zero=True),
                )
            ],
            _legend(report, roles),
        ),
    ]


def _ladder_table(report: Report) -> Table:
    ladder, labels = report.ladder, _labels(report)
    assert ladder is not None

    def pair(rung: Rung, words: Callable[[Speed], str]) -> str:
        return " → ".join("does not fit" if side is None else words(side) for side in (rung.before, rung.after))

    return Table(
        f"{labels['before']} → {labels['after'].lower()}, by concurrent sequences of {ladder.context:,} tokens.",
        ["Sequences", "Cache", "Tokens per second", "p99 per token", "Time to first token"],
        [
            [
                f"{rung.sequences}",
                pair(rung, lambda side: binary_bytes(side.cache_bytes)),
                pair(rung, lambda side: significant(side.tokens_per_second)),
                pair(rung, lambda side: seconds(side.time_per_output_token_s.p99)),
                pair(rung, lambda side: seconds(side.time_to_first_token_s)),
            ]
            for rung in ladder.rungs
        ],
    )


def _tasks(report: Report) -> Section | None:
    if not report.tasks:
        return None
    labels = _labels(report)
    with_converted = any(metric.converted is not None for metric in report.tasks) and "converted" in labels
    rows = []
    for metric in report.tasks:
        p_value = (
            ""
            if metric.p_value is None
            else f"{metric.num_lost} / {metric.num_won}, p = {significant(metric.p_value, 2)}"
        )
        converted = [] if not with_converted or metric.converted is None else [f"{metric.converted:.4f}"]
        rows.append(
            [
                f"{metric.task}, {metric.metric} {'↑' if metric.higher_is_better else '↓'}",
                f"{metric.num_items:,}",
                f"{metric.before:.4f}",
                *converted,
                f"{metric.after:.4f}",
                _with_interval(metric.difference, lambda value: f"{value:+.4f}"),
                p_value,
            ]
        )
    header = ["Task and metric", "Items", labels["before"], *(["Converted"] if with_converted else []), labels["after"]]
    header += ["Difference", "Lost / won"]
    caption = (
        "Tasks of lm-eval. Differences are paired, item by item, with their 95 % interval. Lost / won: items that "
        "only the original, or only the new model, got right, with McNemar's exact p-value."
    )
    return Section("Tasks", tables=[Table(caption, header, rows)])


def _conditions(report: Report) -> Section:
    where = report.conditions
    facts = [["Device", _device(report)], ["Attention", f"{where.attention}, engine {where.engine}"]]
    if where.window is not None and where.stride is not None:
        is_lm_eval = where.window == where.stride and where.bos == "document"
        rule = " (lm-eval's rolling rule)" if is_lm_eval else ""
        facts += [
            ["Window and stride", f"{where.window:,} and {where.stride:,} tokens{rule}"],
            ["BOS rule", _bos_rule(where)],
            ["Hash of the scored text", f"sha256 {where.text_sha256}"],
        ]
    versions = ", ".join(f"{name} {number}" for name, number in where.versions.items())
    facts += [["Seed", str(where.seed)], ["Platform", where.platform], ["Versions", versions]]
    tables = [
        _model_table(report),
        Table("Conditions, the same for all models.", ["Condition", "Value"], facts, num_text_columns=2),
    ]
    if where.texts:
        tables.append(_source_table(where.texts))
    return Section("How it was measured", report.notes, tables=tables)


def _bos_rule(where: Conditions) -> str:
    if where.bos == "none":
        return "no token before a document, whose first token is context only"
    return f"{where.bos_token} once before each {where.bos}"


def _model_table(report: Report) -> Table:
    labels = _labels(report)
    return Table(
        "Models.",
        [
            "Model",
            "Name",
            "Class",
            "Layers",
            "Query heads",
            "KV heads",
            "Head size",
            "Parameters",
            "Weights",
            "Stored as",
        ],
        [
            [
                labels[model.role],
                model.name,
                model.architecture,
                f"{model.num_layers}",
                f"{model.num_attention_heads}",
                f"{model.num_key_value_heads}",
                f"{model.head_dim}",
                count(model.num_parameters),
                binary_bytes(model.weight_bytes),
                model.stored_dtype,
            ]
            for model in report.models
        ],
        num_text_columns=3,
    )


def _source_table(texts: Sequence[TextRecord]) -> Table:
    return Table(
        "Texts.",
        ["Text", "Documents", "Skipped", "Tokens", "Words", "Bytes", "sha256"],
        [
            [
                text.name,
                f"{text.num_documents:,}",
                f"{text.num_skipped:,}",
                f"{text.num_tokens:,}",
                f"{text.num_words:,}",
                f"{text.num_bytes:,}",
                text.sha256,
            ]
            for text in texts
        ],
    )


# --------------------------------------------------------------------------------------------------------- model card


def model_index(report: Report) -> dict[str, Any]:
    """The metadata of a model card: https://huggingface.co/docs/hub/model-cards#evaluation-results."""
    before, after = report.models[0], report.models[-1]
    results = []
    if report.perplexity is not None:
        names = ", ".join(text.name for text in report.conditions.texts)
        model = report.perplexity.models[-1]
        original = f"Perplexity per token of {before.name}"
        metrics = [
            {"type": "perplexity", "name": "Perplexity per token", "value": round(model.per_token, 4)},
            {"type": "bits_per_byte", "name": "Bits per byte", "value": round(model.bits_per_byte, 6)},
            {"type": "perplexity", "name": original, "value": round(report.perplexity.before, 4)},
        ]
        results.append(_result(names, metrics))
    by_task: dict[str, list[dict[str, Any]]] = {}
    for metric in report.tasks:
        value = {"type": metric.metric, "name": metric.metric, "value": round(metric.after, 6)}
        by_task.setdefault(metric.task, []).append(value)
    results += [_result(task, metrics) for task, metrics in by_task.items()]
    return {
        "base_model": before.name,
        "tags": ["headfold", "grouped-query-attention"],
        "model-index": [{"name": after.name, "results": results}],
    }


def _result(dataset: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": dataset, "name": dataset},
        "metrics": metrics,
    }
