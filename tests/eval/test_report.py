"""What a reader of the report sees."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from headfold.convert.errors import HeadfoldError
from headfold.eval.charts import Axis, Limit, Series, line_chart
from headfold.eval.formats import binary_bytes, count, seconds, significant, trimmed
from headfold.eval.perplexity import summary
from headfold.eval.report import render_html, render_markdown, render_model_card, write_report
from headfold.eval.schema import (
    CacheBytesPerToken,
    Conditions,
    DecodePoint,
    DecodeSetup,
    Divergence,
    Interval,
    Ladder,
    Latency,
    ModelRecord,
    Perplexity,
    PerplexityChange,
    PositionBin,
    Report,
    Rung,
    Speed,
    Spread,
    TaskMetric,
    TextRecord,
    TrainingPoint,
)
from headfold.eval.verdict import verdict

EVIL = '<script>alert("x")</script>|`*evil*`'


def model(role: str, name: str, heads: int, tokens: int | None = None) -> ModelRecord:
    return ModelRecord(
        role=role,
        name=name,
        architecture="LlamaForCausalLM",
        num_parameters=4_720_896,
        weight_bytes=9_441_792,
        num_layers=4,
        num_attention_heads=8,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=512,
        stored_dtype="bfloat16",
        method="mean" if heads < 8 else None,
        grouping="adjacent" if heads < 8 else None,
        uptraining_tokens=tokens,
    )


def speed(batch: int, context: int, step: float, cache: int) -> Speed:
    return Speed(
        time_to_first_token_s=batch * context / 5000,
        time_per_output_token_s=Latency(median=step, p90=1.1 * step, p99=1.3 * step),
        tokens_per_second=batch / step,
        cache_bytes=cache * batch * context,
    )


def make_report(name: str = "quickstart", device: str = "cpu", nats_after: float = 3.64, **without: Any) -> Report:
    """A full report of a conversion from 8 to 2 KV heads; keyword arguments replace or empty its parts."""
    models = [model("before", name, 8), model("converted", "converted", 2), model("after", "uptrained", 2, 600_000)]
    losses = {"before": 3.56, "converted": 4.31, "after": nats_after}
    changes = [
        PerplexityChange(
            role=role,
            log_ratio=losses[role] - 3.56,
            log_ratio_standard_error=0.002,
            ratio=Interval(
                value=math.exp(losses[role] - 3.56),
                low=math.exp(losses[role] - 3.564),
                high=math.exp(losses[role] - 3.556),
            ),
        )
        for role in ("converted", "after")
    ]
    perplexity = Perplexity(
        **{role: math.exp(nats) for role, nats in losses.items()},
        num_tokens=75_000,
        num_words=50_000,
        num_bytes=290_000,
        unit="document",
        num_units=51,
        models=[summary(role, -75_000 * nats, 75_000, 50_000, 290_000) for role, nats in losses.items()],
        changes=changes,
    )
    share = (4.31 - nats_after) / 0.75
    recovered = Interval(value=share, low=share - 0.01, high=share + 0.01)
    points = [
        DecodePoint(
            batch=batch,
            context=context,
            before=speed(batch, context, 0.004 + batch * context * 2e-6, 16384),
            after=speed(batch, context, 0.004 + batch * context * 5e-7, 4096),
            speedup=Spread(median=1 + batch * context / 1e4, low=1.0, high=3.0),
            first_token_speedup=Spread(median=1.02, low=1.0, high=1.04),
        )
        for context in (128, 448)
        for batch in (1, 32)
    ]
    rungs = [
        Rung(sequences=n, before=speed(n, 448, 0.01, 16384) if n < 8 else None, after=speed(n, 448, 0.005, 4096))
        for n in (1, 2, 4, 8)
    ]
    cache = CacheBytesPerToken(before=8192, after=2048, dtype="bfloat16", num_tokens=16)
    tasks = [
        TaskMetric(
            task="arc_easy",
            metric="acc",
            num_items=2376,
            higher_is_better=True,
            before=0.763,
            converted=0.41,
            after=0.751,
            difference=Interval(value=-0.012, low=-0.02, high=0.001),
            num_lost=120,
            num_won=97,
            p_value=0.135,
        )
    ]
    parts: dict[str, Any] = {
        "perplexity": perplexity,
        "recovered_share_interval": recovered,
        "recovered_share": share,
        "divergence": [
            Divergence(
                role=role,
                mean_kl=0.7,
                median_kl=0.4,
                p999_kl=6.0,
                top_token_agreement=0.61,
                num_tokens=75_000,
                by_position=[
                    PositionBin(first=1, last=256, mean_kl=0.8, num_tokens=9),
                    PositionBin(first=257, last=512, mean_kl=0.6, num_tokens=9),
                ],
            )
            for role in ("converted", "after")
        ],
        "decode": points,
        "decode_setup": DecodeSetup(new_tokens=16, repetitions=3),
        "ladder": Ladder(context=448, new_tokens=16, memory_limit_bytes=40_000_000, rungs=rungs),
        "tasks": tasks,
        "training": [TrainingPoint(tokens=n * 100_000, eval_loss=4.3 - n / 10) for n in range(7)],
    }
    parts.update(without)
    return Report(
        created="2026-11-29T15:04:05+00:00",
        verdict=verdict(
            models,
            parts["perplexity"],
            parts["recovered_share_interval"],
            cache,
            parts["decode"],
            parts["tasks"],
            "this CPU",
        ),
        models=models,
        cache_bytes_per_token=cache,
        notes=[],
        conditions=Conditions(
            device=device,
            device_name="A processor",
            dtype="float32",
            engine="transformers",
            attention="sdpa",
            num_threads=2,
            window=512,
            stride=512,
            bos="document",
            bos_token="<s>",
            text_sha256="ab" * 32,
            texts=[
                TextRecord(
                    name=name if name == EVIL else "eval.jsonl",
                    sha256="cd" * 32,
                    num_documents=51,
                    num_skipped=2,
                    num_tokens=75_000,
                    num_words=50_000,
                    num_bytes=290_000,
                )
            ],
            seed=0,
            versions={"headfold": "0.1.0", "torch": "2.13.0"},
            platform="Linux",
        ),
        **parts,
    )


EMPTY = {
    "perplexity": None,
    "recovered_share_interval": None,
    "recovered_share": None,
    "divergence": [],
    "decode": [],
    "decode_setup": None,
    "ladder": None,
    "tasks": [],
    "training": [],
}


class Page(HTMLParser):
    """Tags, their attributes and the visible text of a page; every tag must be closed."""

    VOID = frozenset({"meta", "br", "circle", "line", "path", "polyline"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def test_the_first_screen_says_what_happened() -> None:
    page = Page(render_html(make_report()))
    first = page.text[: page.text.index("75,000 tokens in 51 documents")]
    for words in (
        "quickstart",
        "8 → 2 KV heads",
        "35.16",
        "74.44",
        "38.09",
        "89 %",
        "4×",
        "8 KiB",
        "2 KiB",
        "tokens/s",
    ):
        assert words in first, words
    assert "Uptraining won back 89 % of the loss that going from 8 KV heads to 2 had cost" in first
    assert "95 % interval" in first


def test_at_least_four_charts_and_their_words_for_a_screen_reader() -> None:
    page = Page(render_html(make_report()))
    charts = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(charts) == 6  # training, KL by position, speed at two batches, memory, throughput
    assert page.count("desc") == len(charts)
    for words in (
        "tokens of uptraining",
        "tokens of context",
        "concurrent sequences",
        "memory for the cache: 38.1 MiB",
    ):
        assert words in page.text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    html = render_html(make_report())
    page = Page(html)
    assert page.count("script") == page.count("link") == page.count("img") == page.count("iframe") == 0
    for tag, attributes in page.tags:
        assert not {"src", "href", "xlink:href", "srcset"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert "url(" not in html and "@import" not in html and "http" not in html


def test_light_dark_phone_and_print() -> None:
    html = render_html(make_report())
    assert '<meta name="color-scheme" content="light dark">' in html
    assert "prefers-color-scheme: dark" in html and "@media print" in html and "max-width: 700px" in html
    assert '<html lang="en">' in html and 'name="viewport"' in html


def test_names_from_outside_are_escaped() -> None:
    report = make_report(name=EVIL)
    page = Page(render_html(report))
    assert page.count("script") == 0
    assert EVIL in page.text  # shown, as text
    markdown = render_markdown(report)
    assert "<script>" not in markdown and r"\<script\>" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in rows if "script" in line}
    assert columns and all(number > 2 for number in columns)
    card = yaml.safe_load(render_model_card(report).split("---\n")[1])
    assert card["base_model"] == EVIL


def test_c10_the_report_says_where_the_gain_is() -> None:
    text = Page(render_html(make_report())).text
    assert "A single forward pass gains nothing from the smaller cache" in text
    assert "(1.02 times as fast here)" in text
    assert "1.01 times as fast at batch 1, context 128, and 2.43 times at batch 32, context 448" in text


def test_c8_the_report_says_how_it_was_timed() -> None:
    text = Page(render_html(make_report())).text
    for words in ("preallocated cache", "warm-up left out", "synchronised", "taking turns", "3 repetitions"):
        assert words in text
    assert "(1.00 to 3.00)" in text  # the spread


def test_c3_unit_context_stride_and_hash_are_in_the_report() -> None:
    text = Page(render_html(make_report())).text
    for words in (
        "Per token",
        "512 and 512 tokens (lm-eval's rolling rule)",
        "ab" * 32,
        "cd" * 32,
        "once before each document",
    ):
        assert words in text


def test_what_ran_on_a_cpu_claims_nothing_about_gpus() -> None:
    text = Page(render_html(make_report())).text
    assert "as fast, on a CPU" in text and "no statement about GPUs" in text
    gpu = Page(render_html(make_report(device="cuda"))).text
    assert "as fast, on a GPU" in gpu and "no statement about GPUs" not in gpu


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"decode": [], "decode_setup": None, "ladder": None}, ["Decode speed", "concurrent"]),
        ({"tasks": []}, ["Tasks", "McNemar"]),
        ({"training": []}, ["Perplexity while uptraining"]),
        ({"divergence": []}, ["Divergence"]),
        ({"ladder": None}, ["concurrent"]),
        ({"recovered_share_interval": None, "recovered_share": None}, ["won back"]),
        (EMPTY, ["Perplexity", "Decode", "Tasks", "Divergence"]),
    ],
)
def test_missing_parts_do_not_appear(missing: dict[str, Any], words: list[str]) -> None:
    full, report = make_report(), make_report(**missing)
    for render in (render_html, render_markdown):
        assert all(
            word in render(full) for word in words if word != "Perplexity while uptraining" or render is render_html
        )
        text = Page(render(report)).text if render is render_html else render(report)
        assert not any(word in text for word in words)
        assert "None" not in text and "nan" not in text.split()
    assert "8 KiB" in render_html(report)  # the cache is always there


def test_markdown_tables_are_tables() -> None:
    lines = render_markdown(make_report()).splitlines()
    for before, rule in itertools.pairwise(lines):
        if re.fullmatch(r"\|(-+:?\|)+", rule):
            assert before.count("|") == rule.count("|")
    assert sum(bool(re.fullmatch(r"\|(-+:?\|)+", line)) for line in lines) == 9
    assert "\n\n|---" not in "\n".join(lines)


def test_model_card_has_a_model_index() -> None:
    head, body = render_model_card(make_report()).split("---\n")[1:]
    metadata = yaml.safe_load(head)
    assert metadata["base_model"] == "quickstart"
    (entry,) = metadata["model-index"]
    text, task = entry["results"]
    assert text["dataset"]["name"] == "eval.jsonl"
    assert text["metrics"][0] == {"type": "perplexity", "name": "Perplexity per token", "value": 38.0918}
    assert task["dataset"]["name"] == "arc_easy" and task["metrics"][0]["value"] == 0.751
    assert "Uptraining won back" in body


# ------------------------------------------------------------------------------------------------------------ verdict


def test_verdict_where_nothing_was_won_back() -> None:
    assert "Uptraining added another 12 % of the loss" in make_report(nats_after=4.40).verdict


def test_verdict_where_the_difference_is_within_its_error() -> None:
    assert (
        "not to be told from the original's 35.16 on this text (95 % interval: -0.3 to +0.5)"
        in make_report(nats_after=3.561).verdict
    )


def test_verdict_where_the_model_got_better() -> None:
    text = make_report(nats_after=3.50).verdict
    assert "5.8 % below the original's 35.16 (95 % interval: 5.4 to 6.2)" in text


def test_verdict_where_the_model_is_in_ruins() -> None:
    report = make_report(nats_after=7.7)
    assert "ends at 2,208, 62.8 times the original's 35.16 (95 % interval: 62.6 to 63.1)" in report.verdict
    assert "62.8 (62.6 to 63.1) times the original" in Page(render_html(report)).text


def test_verdict_from_tasks_or_from_nothing_but_memory() -> None:
    only_tasks = make_report(**{**EMPTY, "tasks": make_report().tasks})
    assert "changes acc on arc_easy by -1.2 points (95 % interval: -2.0 to +0.1)" in only_tasks.verdict
    assert make_report(**EMPTY).verdict == "The KV cache takes 4 times less memory."


# ------------------------------------------------------------------------------------------------------------- files


def test_files_are_written_aside_and_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves what stood before, whole, and nothing else."""
    write_report(make_report(), tmp_path / "run")
    names = ["model_card.md", "report.html", "report.json", "report.md"]
    assert sorted(os.listdir(tmp_path / "run")) == names
    stood = {name: (tmp_path / "run" / name).read_bytes() for name in names}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HeadfoldError, match="No space left on device"):
        write_report(make_report(name="other"), tmp_path / "run")
    assert {name: (tmp_path / "run" / name).read_bytes() for name in sorted(os.listdir(tmp_path / "run"))} == stood


def test_report_json_is_complete(tmp_path: Path) -> None:
    report = make_report()
    write_report(report, tmp_path)
    again = Report.model_validate(json.loads((tmp_path / "report.json").read_text()))
    assert render_html(again) == (tmp_path / "report.html").read_text()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadfoldError, match="cannot be written"):
        write_report(make_report(), tmp_path / "file" / "run")


# --------------------------------------------------------------------------------------------------- numbers, charts


def test_numbers_as_people_read_them() -> None:
    assert [significant(x) for x in (0, 0.0123456, 0.5, 9.996, 12.0, 1234.5, 99950)] == [
        "0", "0.0123", "0.500", "10.0", "12.0", "1,230", "100,000",
    ]  # fmt: skip
    assert [trimmed(x) for x in (0.5, 12.0, 1000, 0.0120)] == ["0.5", "12", "1,000", "0.012"]
    assert [binary_bytes(x) for x in (512, 8192, 1536, 2**31)] == ["512 B", "8 KiB", "1.5 KiB", "2 GiB"]
    assert [seconds(x) for x in (2.5, 0.0123, 4.2e-5)] == ["2.50 s", "12.3 ms", "42.0 µs"]
    assert [count(x) for x in (999, 9999, 75312, 1.2e6, 1e10)] == ["999", "9,999", "75.3 k", "1.2 M", "10 B"]


def coordinates(svg: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<polyline points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in lines]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [5.0, 5.0, 5.0], [30.0, 31.0, 30.5], [1e-4, 3.0, 1e6], [7.0]])
def test_charts_keep_their_points_and_words_inside(scale: Any, values: list[float]) -> None:
    points = [(float(index + 1), value) for index, value in enumerate(values)]
    axis = Axis("y", trimmed, scale=scale)
    svg = line_chart("title", [Series("after", "a", points)], Axis("x", count), axis, limit=Limit(values[-1], "here"))
    (places,) = coordinates(svg)
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert all(0 < x < width and 0 < y < height for x, y in places)
    # Higher values stand higher.
    order = sorted(range(len(values)), key=lambda index: values[index])
    assert [places[i][1] for i in order] == sorted((y for _, y in places), reverse=True)
    labels = re.findall(r'<text class="tick end" x="[\d.]+" y="([\d.]+)">([^<]+)', svg)
    heights = [float(y) for y, _ in labels]
    assert len(labels) >= 2 and all(a - b > 11 for a, b in itertools.pairwise(heights))
    assert len({label for _, label in labels}) == len(labels)


def test_tick_labels_of_a_chart_do_not_overlap() -> None:
    counts = [1, 2, 4, 8, 16, 32, 64, 128]
    series = [Series("before", "b", [(float(n), 100.0 * n) for n in counts])]
    svg = line_chart("title", series, Axis("n", count, ticks=counts), Axis("y", count))
    ticks = [(float(x), label) for x, label in re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+">([^<]+)', svg)]
    ends = [(x - 3.3 * len(label), x + 3.3 * len(label)) for x, label in ticks]
    assert len(ticks) >= 5 and all(a[1] < b[0] for a, b in itertools.pairwise(ends))
