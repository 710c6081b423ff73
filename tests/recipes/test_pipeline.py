"""The stages in order on the shipped model, with a small budget: what is done again, what is skipped, what goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.recipes import pipeline
from headfold.recipes.schema import load_recipe

SMALL = [
    "uptrain.tokens=4096",
    "uptrain.share=null",
    "uptrain.sequence_length=64",
    "uptrain.batch_rows=8",
    "uptrain.micro_batch_rows=4",
    "uptrain.mixed_precision=no",
    "uptrain.eval_rows=8",
    "uptrain.save_interval=0.25",
    "eval.max_text_tokens=1500",
    "eval.window=128",
    "eval.decode=null",
    "eval.bootstrap_samples=100",
    "gates.min_recovered_share=null",
]


def run_here(directory: Path, *overrides: str) -> list[str]:
    """All stages in this process. Returns what was said."""
    said: list[str] = []
    run = pipeline.RunDirectory(directory, load_recipe("quickstart", [*SMALL, *overrides]))
    pipeline.convert(run, said.append, lambda done, total: None)
    pipeline.uptrain(run, said.append)
    pipeline.evaluate(run, said.append, lambda stage, done, total: None)
    pipeline.report(run)
    pipeline.check_gates(run)
    return said


def skipped(said: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in said if line.endswith("skipped")]


def report_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "small"
    assert skipped(run_here(directory)) == []
    return directory


def test_a_run_leaves_what_the_design_promises(finished: Path) -> None:
    for name in ("report.json", "report.md", "report.html", "eval/report.json", "run.json", "converted/headfold.json"):
        assert (finished / name).is_file(), name
    assert json.loads((finished / "uptrained" / "config.json").read_text())["num_key_value_heads"] == 2
    report = report_of(finished)
    perplexity = report["perplexity"]
    assert perplexity["before"] < perplexity["after"] < perplexity["converted"]
    assert 0 < report["recovered_share"] < 1
    assert report["cache_bytes_per_token"]["before"] == 4 * report["cache_bytes_per_token"]["after"]
    assert not list(finished.rglob("*.partial-*"))


def test_what_is_complete_and_unchanged_is_skipped_and_only_that(finished: Path) -> None:
    assert skipped(run_here(finished)) == ["convert", "uptrain", "eval"]
    assert skipped(run_here(finished, "uptrain.keep=5")) == ["convert", "uptrain", "eval"]
    assert skipped(run_here(finished, "eval.seed=1")) == ["convert", "uptrain"]
    before = load_file(finished / "uptrained" / "model.safetensors")
    said = run_here(finished, "eval.seed=1", "uptrain.learning_rate=1e-4")
    assert skipped(said) == ["convert"]
    kept = load_file(finished / "uptrained.former" / "model.safetensors")
    after = load_file(finished / "uptrained" / "model.safetensors")
    assert all((kept[name] == before[name]).all() for name in before)
    assert any((after[name] != before[name]).any() for name in before)


def test_a_removed_output_is_made_again(finished: Path) -> None:
    (finished / "eval" / "report.json").unlink()
    assert "eval" not in skipped(run_here(finished, "eval.seed=1", "uptrain.learning_rate=1e-4"))
    assert (finished / "eval" / "report.json").is_file()


def test_a_gate_that_is_missed_fails_the_run(finished: Path) -> None:
    run = pipeline.RunDirectory(finished, load_recipe("quickstart", [*SMALL, "gates.max_perplexity_ratio=1.0001"]))
    with pytest.raises(HeadfoldError, match=r"gates\.max_perplexity_ratio") as caught:
        pipeline.check_gates(run)
    assert caught.value.exit_code == 1


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RefusedError, match="choose another --output"):
        pipeline.RunDirectory(tmp_path, load_recipe("quickstart"))
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RefusedError, match="damaged"):
        pipeline.RunDirectory(tmp_path, load_recipe("quickstart"))


def command(directory: Path, *overrides: str) -> list[str]:
    settings = [*SMALL, *overrides]
    return [
        sys.executable,
        "-m",
        "headfold.scripts",
        "uptrain",
        "quickstart",
        "--output",
        str(directory),
        "--set",
        *settings,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_two_processes_are_started_and_agree_with_one(tmp_path: Path) -> None:
    for name, processes in (("one", 1), ("two", 2)):
        overrides = (f"uptrain.num_processes={processes}", "uptrain.tokens=2048")
        done = subprocess.run(command(tmp_path / name, *overrides), env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    metrics = [
        [json.loads(line) for line in (tmp_path / name / "uptrained.state" / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    losses = [[entry["loss"] for entry in entries if "loss" in entry] for entries in metrics]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_sigterm_ends_a_run_with_143_and_the_same_command_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    long = ("uptrain.tokens=65536", "uptrain.save_interval=0.05")
    process = subprocess.Popen(command(directory, *long), env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = directory / "uptrained.state" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_text().count('"loss"') < 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 143, stderr
    assert "run the same command again" in stderr and "Traceback" not in stderr
    assert not (directory / "uptrained").exists()
    stopped_after = metrics.read_text().count('"loss"')
    done = subprocess.run(command(directory, *long), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, 129)) and 3 <= stopped_after < 128
