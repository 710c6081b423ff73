"""Two processes under gloo against one: the same losses, weights and evaluations; signals, kills and failures.

Starting processes is most of what these tests cost, so one launch trains several jobs, one after the other.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headfold.convert.checkpoint import Checkpoint
from headfold.uptrain.data import PackedRows
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.state import StateDirectory
from headfold.uptrain.train import uptrain

from .conftest import (
    job,
    make_checkpoint,
    make_documents,
    read_metrics,
    run_worker,
    step_losses,
    weights,
    worker_command,
    worker_environment,
    write_jsonl,
)

DISTILLATION = {"distillation": {"weight": 0.6, "temperature": 2.0}}
# Rows of 32 tokens; at this learning rate 50 steps are training, but not yet chaos in the last bits.
FIFTY_STEPS = {"tokens": 50 * 128, "learning_rate": 3e-3, "micro_batch_rows": 1}


def settings(corpus: Path, **overrides: Any) -> UptrainSettings:
    values = {"sequence_length": 32, "tokens": 10 * 128, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 3e-3}
    return UptrainSettings.model_validate({"data": [str(corpus)], "mixed_precision": "no", **values, **overrides})


def uneven_corpus(folder: Path) -> Path:
    """113 tokens: a row of 101 counted tokens and a row of 11."""
    return write_jsonl(folder / "uneven.jsonl", ["~" * 111])


def seven_rows(folder: Path) -> Path:
    """Three files, of which the last row of 32 tokens is the seventh and not full."""
    texts = folder / "three files"
    texts.mkdir()
    for name, length in (("a", 70), ("b", 20), ("c", 115)):
        (texts / f"{name}.txt").write_text("~" * length)
    return texts


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, eval_corpus: Path, student: Path
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Every job, trained in one process (one/NAME) and in two (two/NAME)."""
    folder = tmp_path_factory.mktemp("processes")
    teacher = make_checkpoint(folder / "teacher", seed=5, num_key_value_heads=4)
    untied = make_checkpoint(folder / "untied", tie_word_embeddings=False)
    seven = seven_rows(folder)
    uneven = {"sequence_length": 101, "batch_rows": 2, "tokens": 202, "micro_batch_rows": 1}
    evaluated = {"eval_data": [str(eval_corpus)], "eval_interval": 0.5}
    jobs: dict[str, tuple[UptrainSettings, Path, bool]] = {
        "plain": (settings(corpus, **FIFTY_STEPS, **evaluated), student, False),
        "sharded": (settings(corpus, **FIFTY_STEPS, **evaluated, shard=True), student, False),
        "distilled": (settings(corpus, **DISTILLATION, learning_rate=1e-3), student, True),
        "distilled, sharded": (settings(corpus, **DISTILLATION, learning_rate=1e-3, shard=True), student, True),
        "bf16, sharded": (settings(corpus, mixed_precision="bf16", shard=True), student, False),
        "checkpointing, sharded": (settings(corpus, gradient_checkpointing=True, shard=True), untied, False),
        "uneven": (settings(uneven_corpus(folder), **uneven), student, False),
        "seven": (settings(seven, batch_rows=7, tokens=7 * 32 * 3, eval_data=[str(seven)]), student, False),
        "seven, sharded": (
            settings(seven, batch_rows=7, tokens=7 * 32 * 3, eval_data=[str(seven)], shard=True),
            student,
            False,
        ),
    }
    described: dict[str, list[dict[str, Any]]] = {"one": [], "two": []}
    for where, listed in described.items():
        (folder / where).mkdir()
        for name, (values, model, has_teacher) in jobs.items():
            options: dict[str, Any] = {"teacher": teacher} if has_teacher else {}
            if name == "uneven":
                options["gradients"] = folder / where / "gradients.pt"
            listed.append(job(values, model, folder / where / name, **options))
    run_worker(described["one"], folder / "one")
    run_worker(described["two"], folder / "two", 2)
    return folder, {name: {"settings": values} for name, (values, _, _) in jobs.items()}


AGREEING = ["plain", "sharded", "distilled", "distilled, sharded", "checkpointing, sharded", "seven", "seven, sharded"]


@pytest.mark.parametrize("name", AGREEING)
def test_two_processes_have_the_losses_of_one(runs: tuple[Path, Any], name: str):
    folder, _ = runs
    one, two = (step_losses(folder / where / f"{name}.state") for where in ("one", "two"))
    assert len(one) == len(two) > 0
    assert two == pytest.approx(one, rel=1e-5)
    assert len(one) == (50 if name in ("plain", "sharded") else len(one))


@pytest.mark.parametrize("name", AGREEING)
def test_two_processes_have_the_weights_and_evaluations_of_one(runs: tuple[Path, Any], name: str):
    folder, _ = runs
    one, two = (weights(folder / where / name) for where in ("one", "two"))
    assert one.keys() == two.keys()
    for tensor in one:  # stored in bfloat16: at most the last bit differs
        torch.testing.assert_close(two[tensor].float(), one[tensor].float(), rtol=2**-7, atol=1e-4)
    evaluations = [
        [entry for entry in read_metrics(folder / where / f"{name}.state") if "eval_loss" in entry]
        for where in ("one", "two")
    ]
    for first, second in zip(*evaluations, strict=True):
        assert second == pytest.approx(first, rel=1e-5)


def test_sharded_and_repeated_are_one_training(runs: tuple[Path, Any]):
    folder, _ = runs
    plain, sharded = (step_losses(folder / "two" / f"{name}.state") for name in ("plain", "sharded"))
    assert sharded == pytest.approx(plain, rel=1e-5)


def test_b1_two_processes_have_the_gradients_of_one(runs: tuple[Path, Any]):
    """One rank counts 101 tokens, the other 11."""
    folder, _ = runs
    one, two = (torch.load(folder / where / "gradients.pt", weights_only=True) for where in ("one", "two"))
    entry = read_metrics(folder / "two" / "uneven.state")[0]
    assert entry["counted_tokens"] == 112
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-7)


def test_b2_two_processes_have_the_learning_rates_of_one(runs: tuple[Path, Any]):
    folder, _ = runs
    rates = [
        [(entry["tokens"], entry["learning_rate"]) for entry in read_metrics(path) if "loss" in entry]
        for path in (folder / "one" / "plain.state", folder / "two" / "plain.state", folder / "two" / "sharded.state")
    ]
    assert rates[0] == rates[1] == rates[2]
    assert len({rate for _, rate in rates[0]}) > 5


@pytest.mark.parametrize("name", ["seven", "seven, sharded"])
def test_b4_seven_rows_and_three_files_on_two_processes(runs: tuple[Path, Any], name: str):
    """Equal steps in both, no hang, and every row counted once in training and in evaluation."""
    folder, _ = runs
    state = folder / "two" / f"{name}.state"
    rows = PackedRows(next((state / "packed").glob("train-*.bin")), 32, isolate_documents=True)
    assert len(rows) == 7 and rows.file.num_documents == 3
    entries = read_metrics(state)
    evaluations = [entry for entry in entries if "eval_loss" in entry]
    assert {(entry["eval_rows"], entry["eval_tokens"]) for entry in evaluations} == {(7, rows.file.num_tokens - 1)}
    assert [entry["counted_tokens"] for entry in entries if "loss" in entry] == [rows.file.num_tokens - 1] * 3


@pytest.mark.parametrize("name", ["plain", "sharded", "checkpointing, sharded"])
def test_b11_the_export_of_two_processes_has_full_shapes_and_keeps_ties(runs: tuple[Path, Any], name: str):
    folder, _ = runs
    one, two = (Checkpoint.open(folder / where / name) for where in ("one", "two"))
    assert {n: (e.dtype, e.shape) for n, e in two.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in one.tensors.items()
    }
    assert ("lm_head.weight" in two.tensors) == (name == "checkpointing, sharded")


def test_bf16_sharded_trains(runs: tuple[Path, Any]):
    folder, _ = runs
    one, two = (step_losses(folder / where / "bf16, sharded.state") for where in ("one", "two"))
    assert two == pytest.approx(one, rel=3e-2)
    assert two[-1] < two[0] - 0.3


def test_b12_when_one_process_fails_all_end_with_its_message(tmp_path: Path, corpus: Path, student: Path):
    fault = {"kind": "raise", "at_step": 3, "rank": 1}
    begun = time.monotonic()
    failing = job(settings(corpus, save_interval=0.2), student, tmp_path / "out", fault=fault)
    done = run_worker([failing], tmp_path, 2, check=False)
    assert done.returncode != 0
    assert "headfold: this process has lost its disk" in done.stderr
    assert time.monotonic() - begun < 200  # the time-out of a collective would be half an hour
    assert StateDirectory(tmp_path / "out.state").latest().name == "step-00000002"
    assert not (tmp_path / "out").exists()


def test_b12_killed_by_sigkill_and_by_a_signal_two_processes_go_on_in_one(tmp_path: Path, corpus: Path, student: Path):
    """SIGTERM reaches one rank: both save and end. What they saved sharded, one process reads."""
    values = settings(corpus, save_interval=0.4, shard=True)
    fault = {"kind": "SIGTERM", "at_step": 6, "rank": 1}
    stopped = run_worker([job(values, student, tmp_path / "out", fault=fault)], tmp_path, 2, check=False)
    assert stopped.returncode != 0
    assert "stopped after step 7 of 10" in stopped.stderr and "step-00000007" in stopped.stderr
    uptrain(values, student, tmp_path / "out")
    uptrain(values, student, tmp_path / "unbroken")
    broken, unbroken = (step_losses(tmp_path / f"{name}.state") for name in ("out", "unbroken"))
    assert broken == pytest.approx(unbroken, rel=1e-5)
    for name, tensor in weights(tmp_path / "unbroken").items():
        torch.testing.assert_close(weights(tmp_path / "out")[name].float(), tensor.float(), rtol=2**-7, atol=1e-4)


def test_b3_killed_by_sigkill_in_a_save_a_run_ends_as_if_unbroken(tmp_path: Path, corpus: Path, student: Path):
    values = settings(corpus, save_interval=0.2)
    fault = {"before_rename_to": "step-00000006"}
    killed = run_worker([job(values, student, tmp_path / "out", fault=fault)], tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "out.state" / "saves" / "step-00000006.partial").is_dir()
    assert StateDirectory(tmp_path / "out.state").latest().name == "step-00000004"
    run_worker([job(values, student, tmp_path / "out"), job(values, student, tmp_path / "unbroken")], tmp_path)
    assert step_losses(tmp_path / "out.state") == step_losses(tmp_path / "unbroken.state")
    one, other = weights(tmp_path / "out"), weights(tmp_path / "unbroken")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list((tmp_path / "out.state" / "saves").glob("*.partial"))


@pytest.mark.slow
def test_b12_killed_at_random_moments_a_run_ends_as_if_unbroken(tmp_path: Path, corpus: Path, student: Path):
    """SIGKILL six times, wherever the run happens to be: in a step, a save, a rotation."""
    values = settings(corpus, tokens=600 * 128, save_interval=0.02)
    run_worker([job(values, student, tmp_path / "unbroken")], tmp_path)
    file, metrics = tmp_path / "jobs.json", tmp_path / "out.state" / "metrics.jsonl"
    file.write_text(json.dumps([job(values, student, tmp_path / "out")]), encoding="utf-8")

    def num_steps() -> int:
        return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0

    random_ = random.Random(0)
    for _ in range(6):
        target = num_steps() + random_.randint(30, 90)
        process = subprocess.Popen(worker_command(file), env=worker_environment(), stderr=subprocess.DEVNULL)
        while num_steps() < target:
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(random_.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    run_worker([job(values, student, tmp_path / "out")], tmp_path)
    assert step_losses(tmp_path / "out.state") == step_losses(tmp_path / "unbroken.state")
    one, other = weights(tmp_path / "out"), weights(tmp_path / "unbroken")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_four_processes_sharded_have_the_losses_of_one(tmp_path: Path, student: Path):
    corpus = write_jsonl(tmp_path / "texts.jsonl", make_documents(120))
    values = settings(corpus, **FIFTY_STEPS, shard=True)
    run_worker([job(values, student, tmp_path / "four")], tmp_path, 4)
    uptrain(values, student, tmp_path / "one")
    assert step_losses(tmp_path / "four.state") == pytest.approx(step_losses(tmp_path / "one.state"), rel=1e-5)
