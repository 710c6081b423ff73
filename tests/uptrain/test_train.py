"""The training stage in one process: resume, saves, export, evaluation, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.errors import HeadfoldError, RefusedError, StoppedError
from headfold.uptrain import train
from headfold.uptrain.data import IGNORED, PackedRows
from headfold.uptrain.loss import LossSums
from headfold.uptrain.progress import flops_per_token, keep_metrics
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.state import StateDirectory
from headfold.uptrain.train import uptrain

from .conftest import make_checkpoint, make_documents, read_metrics, step_losses, weights, write_jsonl

Make = Callable[..., UptrainSettings]


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def before_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[train.Run], None]) -> None:
    step = train._step
    monkeypatch.setattr(train, "_step", lambda run, received: (action(run), step(run, received))[1])


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the product catches it, and no clean-up of ours runs on it but `with` blocks."""


# ------------------------------------------------------------------------------------------------------ the whole way


def test_training_lowers_the_loss_and_writes_a_checkpoint_that_transformers_loads(
    tmp_path: Path, student: Path, eval_corpus: Path, make_settings: Make
):
    output = tmp_path / "out"
    settings = make_settings(tokens=40 * 128, eval_data=[str(eval_corpus)], eval_interval=0.5)
    summary = uptrain(settings, student, output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    rows = PackedRows(next((tmp_path / "out.state" / "packed").glob("eval-*.bin")), 32, isolate_documents=True)
    batch = rows.batch(range(len(rows)))
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
    assert summary["eval_loss"]["after"] == pytest.approx(loss.item(), rel=2e-3)  # stored in bfloat16
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"] - 1
    assert summary == json.loads((output / "headfold.json").read_text())["uptrain"]
    assert (summary["tokens"], summary["steps"]) == (40 * 128, 40)


def test_metrics_hold_every_step_and_evaluation(tmp_path: Path, student: Path, eval_corpus: Path, make_settings: Make):
    uptrain(make_settings(eval_data=[str(eval_corpus)], eval_interval=0.5), student, tmp_path / "out")
    entries = read_metrics(tmp_path / "out.state")
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 11))
    assert [entry["tokens"] for entry in steps] == list(range(128, 1281, 128))
    assert all(entry["counted_tokens"] == 128 and not entry["skipped"] for entry in steps)
    assert all(entry["gradient_norm"] > 0 and entry["tokens_per_second"] > 0 for entry in steps)
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [0, 5, 10]


def test_b4_evaluation_counts_every_row_once(tmp_path: Path, student: Path, eval_corpus: Path, make_settings: Make):
    """Micro-batches of 3 do not divide the rows, and the last row is not full."""
    settings = make_settings(eval_data=[str(eval_corpus)], eval_interval=1, micro_batch_rows=3)
    uptrain(settings, student, tmp_path / "out")
    rows = PackedRows(next((tmp_path / "out.state" / "packed").glob("eval-*.bin")), 32, isolate_documents=True)
    entry = next(entry for entry in read_metrics(tmp_path / "out.state") if "eval_loss" in entry)
    assert len(rows) % 3 and (rows.file.num_tokens - 1) % 32
    assert (entry["eval_rows"], entry["eval_tokens"]) == (len(rows), rows.file.num_tokens - 1)
    some = make_settings(eval_data=[str(eval_corpus)], eval_interval=1, eval_rows=5)
    uptrain(some, student, tmp_path / "some")
    assert next(e for e in read_metrics(tmp_path / "some.state") if "eval_loss" in e)["eval_rows"] == 5


def test_b1_accumulation_gives_the_steps_of_the_whole_batch(tmp_path: Path, student: Path, make_settings: Make):
    """4 x 1, 2 x 2, 1 x 4, and 3 + 1: the last window is not full."""
    losses = []
    for size in (4, 2, 1, 3):
        output = tmp_path / f"by-{size}"
        uptrain(make_settings(micro_batch_rows=size, learning_rate=3e-3), student, output)
        losses.append(step_losses(tmp_path / f"by-{size}.state"))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_distillation_brings_the_student_to_the_teacher(tmp_path: Path, student: Path, make_settings: Make):
    teacher = make_checkpoint(tmp_path / "teacher", seed=7, num_key_value_heads=4)
    settings = make_settings(tokens=60 * 128, distillation={"weight": 1.0})
    uptrain(settings, student, tmp_path / "out", teacher=teacher)
    entries = [entry for entry in read_metrics(tmp_path / "out.state") if "loss" in entry]
    assert all(entry["loss"] == entry["divergence"] for entry in entries)
    # the random teacher knows nothing of the text, so only the divergence can fall
    assert entries[-1]["divergence"] < 0.7 * entries[0]["divergence"]
    assert entries[-1]["cross_entropy"] > 5


def test_weights_not_matrices_are_not_decayed(student: Path, make_settings: Make):
    model = AutoModelForCausalLM.from_pretrained(student)
    decayed, others = train._optimizer(model, make_settings(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.ndim == 1 for parameter in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


# ------------------------------------------------------------------------------------------------------------- resume


def test_b3_stopped_in_the_second_epoch_and_again_a_run_ends_as_if_unbroken(
    tmp_path: Path, student: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
):
    """125 steps per epoch; SIGTERM at 200, SIGINT at 260: rows, losses and weights are those of an unbroken run."""
    text = "~" * (125 * 8 - 1)  # a token each, and the one that begins the document
    source = write_jsonl(tmp_path / "text.jsonl", [text])
    settings = UptrainSettings(
        data=[str(source)], sequence_length=8, batch_rows=1, tokens=300 * 8, learning_rate=1e-3, mixed_precision="no"
    )
    drawn: list[list[int]] = []
    rows_of_step = train.rows_of_step
    monkeypatch.setattr(train, "rows_of_step", lambda *a, **k: (drawn.append(rows_of_step(*a, **k)), drawn[-1])[1])
    uptrain(settings, student, tmp_path / "unbroken")
    unbroken, drawn[:] = list(drawn), []
    assert len({row for rows in unbroken[:125] for row in rows}) == 125
    assert PackedRows(
        next((tmp_path / "unbroken.state/packed").glob("*.bin")), 8, isolate_documents=True
    ).file.num_tokens

    stops = {200: signal.SIGTERM, 260: signal.SIGINT}

    def stop(run: train.Run) -> None:
        number = stops.pop(run.position.step + 1, None)
        if number:
            os.kill(os.getpid(), number)

    before_step(monkeypatch, stop)
    for step, number in ((200, signal.SIGTERM), (260, signal.SIGINT)):
        with pytest.raises(StoppedError, match=rf"stopped after step {step} of 300; .*step-00000{step}.*run the same"):
            uptrain(settings, student, tmp_path / "broken")
        assert not (tmp_path / "broken").exists()
        assert signal.getsignal(number) is not None
    uptrain(settings, student, tmp_path / "broken")
    assert drawn == unbroken
    assert step_losses(tmp_path / "broken.state") == step_losses(tmp_path / "unbroken.state")
    assert_same_weights(tmp_path / "broken", tmp_path / "unbroken")


def test_the_exit_code_of_a_stop_is_128_and_the_signal(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    before_step(monkeypatch, lambda run: os.kill(os.getpid(), signal.SIGTERM) if run.position.step == 3 else None)
    with pytest.raises(StoppedError) as caught:
        uptrain(make_settings(), student, tmp_path / "out")
    assert caught.value.exit_code == 128 + signal.SIGTERM


KILLS = {
    "in a step": ("step", 7),
    "before the save is renamed": ("rename", "step-00000006"),
    "before the save is marked": ("replace", "complete.json"),
    "while old saves are removed": ("rmtree", "step-00000002"),
    "before the export is renamed": ("rename", "out"),
}


@pytest.mark.parametrize("moment", KILLS)
def test_b12_killed_at_a_bad_moment_a_run_goes_on_from_its_last_complete_save(
    tmp_path: Path, student: Path, eval_corpus: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch, moment: str
):
    settings = make_settings(save_interval=0.2, keep=2, eval_data=[str(eval_corpus)], eval_interval=0.3)
    uptrain(settings, student, tmp_path / "unbroken")
    kind, where = KILLS[moment]
    with monkeypatch.context() as patch:
        if kind == "step":
            before_step(patch, lambda run: _kill_if(run.position.step == where))
        elif kind == "rmtree":
            rmtree = shutil.rmtree
            patch.setattr(shutil, "rmtree", lambda path, **k: (_kill_if(Path(path).name == where), rmtree(path, **k)))
        else:
            act = getattr(Path, kind)
            seen: list[str] = []

            def faulty(self: Path, target: Path) -> Path:
                seen.append(Path(target).name)
                # the second mark: a save must stand when the next one is cut off
                _kill_if(Path(target).name == where and (kind == "rename" or seen.count(where) == 2))
                return act(self, target)

            patch.setattr(Path, kind, faulty)
        with pytest.raises(Killed):
            uptrain(settings, student, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    saves = tmp_path / "out.state" / "saves"
    (saves / "step-00000099").mkdir()  # left over, without a mark
    uptrain(settings, student, tmp_path / "out")
    assert_same_weights(tmp_path / "out", tmp_path / "unbroken")
    assert step_losses(tmp_path / "out.state") == step_losses(tmp_path / "unbroken.state")
    evaluations = [
        [e for e in read_metrics(tmp_path / f"{name}.state") if "eval_loss" in e] for name in ("out", "unbroken")
    ]
    assert evaluations[0] == evaluations[1]
    assert [path.name for path in saves.iterdir()] == ["step-00000010"]


def _kill_if(condition: bool) -> None:
    if condition:
        raise Killed


def test_a_finished_run_returns_at_once(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    summary = uptrain(make_settings(), student, tmp_path / "out")
    monkeypatch.setattr(train, "setup", lambda *a, **k: pytest.fail("trained again"))
    assert uptrain(make_settings(), student, tmp_path / "out") == summary
    # how the work is spread does not decide the result
    assert uptrain(make_settings(micro_batch_rows=1, save_interval=0.5), student, tmp_path / "out") == summary
    with pytest.raises(RefusedError, match="other settings"):
        uptrain(make_settings(seed=1), student, tmp_path / "out")
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(RefusedError, match=f"damaged .*Remove {re.escape(str(tmp_path / 'out'))} and run again"):
        uptrain(make_settings(), student, tmp_path / "out")


def test_an_output_that_is_something_else_is_refused(tmp_path: Path, student: Path, make_settings: Make):
    (tmp_path / "out").mkdir()
    with pytest.raises(RefusedError, match="not a result of uptraining"):
        uptrain(make_settings(), student, tmp_path / "out")
    with pytest.raises(RefusedError, match="input"):
        uptrain(make_settings(), student, student / "inside")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"learning_rate": 1e-3}, "another learning_rate .*0.01.*0.001"), ({"seed": 3}, "seed"), ({}, "another data")],
)
def test_saves_of_another_run_are_not_gone_on_from(
    tmp_path: Path,
    student: Path,
    make_settings: Make,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    words: str,
):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        before_step(patch, lambda run: _kill_if(run.position.step == 5))
        uptrain(make_settings(save_interval=0.2), student, tmp_path / "out")
    if not change:
        change = {"data": [str(write_jsonl(tmp_path / "other.jsonl", make_documents(120, seed=5)))]}
    with pytest.raises(RefusedError, match=words):
        uptrain(make_settings(save_interval=0.2, **change), student, tmp_path / "out")


def test_two_runs_do_not_work_in_one_directory(tmp_path: Path, student: Path, make_settings: Make):
    state = StateDirectory(tmp_path / "out.state")
    with state:
        state.open()
        with pytest.raises(RefusedError, match="another run is at work"):
            uptrain(make_settings(), student, tmp_path / "out")
    uptrain(make_settings(), student, tmp_path / "out")


def test_metrics_of_steps_that_did_not_happen_are_removed(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "eval_loss": 1}\n{"step": 3}\n{"step": 4}\n{"step": 4, "lo', encoding="utf-8")
    keep_metrics(path, 3)
    assert path.read_text() == '{"step": 0, "eval_loss": 1}\n{"step": 3}\n'
    keep_metrics(path, -1)
    assert path.read_text() == ""


# ------------------------------------------------------------------------------------------------------------- export


def test_b11_export_twice_is_the_same_and_keeps_names_dtypes_and_ties(
    tmp_path: Path, student: Path, make_settings: Make
):
    mixed = tmp_path / "mixed"
    shutil.copytree(student, mixed)
    tensors = load_file(student / "model.safetensors")
    norm = "model.norm.weight"
    tensors[norm] = tensors[norm].float()
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    uptrain(make_settings(), mixed, tmp_path / "out")
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    source, result = Checkpoint.open(mixed), Checkpoint.open(tmp_path / "out")
    assert {n: (e.dtype, e.shape) for n, e in result.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in source.tensors.items()
    }
    assert result.tensors[norm].dtype == "F32" and "lm_head.weight" not in result.tensors
    assert result.config == source.config
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (mixed / "tokenizer.json").read_bytes()
    shutil.rmtree(tmp_path / "out")
    uptrain(make_settings(), mixed, tmp_path / "out")  # from the last save, without a step
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first


def test_the_record_of_the_conversion_is_kept(tmp_path: Path, student: Path, make_settings: Make):
    converted = tmp_path / "converted"
    shutil.copytree(student, converted)
    (converted / "headfold.json").write_text('{"method": "mean", "grouping": "adjacent"}')
    uptrain(make_settings(), converted, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "headfold.json").read_text())
    assert record["method"] == "mean" and record["uptrain"]["steps"] == 10
    assert record["uptrain"]["data"]["sha256"] and record["uptrain"]["versions"]["torch"] == torch.__version__


# ---------------------------------------------------------------------------------------------------------- precision


def test_b13_master_weights_are_float32_and_move_at_a_small_learning_rate(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    """In bfloat16 a step of 1e-6 would be rounded away."""
    seen: list[dict[str, torch.Tensor]] = []

    def look(run: train.Run) -> None:
        seen.append({name: p.detach().clone() for name, p in run.student.model.named_parameters()})

    before_step(monkeypatch, look)
    settings = make_settings(mixed_precision="bf16", learning_rate=1e-6, warmup=0, weight_decay=0)
    uptrain(settings, student, tmp_path / "out")
    assert len(seen) == 10
    assert {tensor.dtype for tensor in seen[-1].values()} == {torch.float32}
    for name, before in seen[0].items():
        moved = (seen[-1][name] - before).abs()
        assert (moved > 0).float().mean() > 0.5, name
        assert moved.max() < 1e-4


def test_bf16_computes_in_bfloat16(tmp_path: Path, student: Path, make_settings: Make):
    uptrain(make_settings(), student, tmp_path / "float32")
    uptrain(make_settings(mixed_precision="bf16"), student, tmp_path / "bf16")
    exact, rounded = (step_losses(tmp_path / f"{name}.state") for name in ("float32", "bf16"))
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=2e-2)


# ----------------------------------------------------------------------------------------------------------- bad steps


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of these steps NaN."""
    sums, step = train._sums, train._step
    current: list[int] = []
    monkeypatch.setattr(train, "_step", lambda run, r: (current.append(run.position.step), step(run, r))[1])

    def poisoned(run: train.Run, batch: Any, **options: Any) -> LossSums:
        result = sums(run, batch, **options)
        if torch.is_grad_enabled() and current[-1] in steps:
            return LossSums(result.loss * math.nan, result.cross_entropy * math.nan, result.divergence)
        return result

    monkeypatch.setattr(train, "_sums", poisoned)


def test_b15_a_step_without_a_finite_loss_is_skipped_and_counted(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    poison(monkeypatch, {2, 3, 6})
    summary = uptrain(make_settings(max_nonfinite_steps=3), student, tmp_path / "out")
    assert summary["skipped_steps"] == 3
    entries = [entry for entry in read_metrics(tmp_path / "out.state") if "skipped" in entry]
    assert [entry["step"] for entry in entries if entry["skipped"]] == [3, 4, 7]
    assert all((entry["loss"] is None) == entry["skipped"] for entry in entries)
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights(tmp_path / "out").values())


def test_b15_too_many_in_a_row_stop_the_run_and_name_the_last_good_save(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    poison(monkeypatch, {5, 6, 7, 8, 9})
    settings = make_settings(max_nonfinite_steps=3, save_interval=0.2, keep=1)
    with pytest.raises(HeadfoldError, match=r"not finite in 3 steps in a row.*step 8.*step-0000000[46]") as caught:
        uptrain(settings, student, tmp_path / "out")
    assert caught.value.exit_code == 1
    save = StateDirectory(tmp_path / "out.state").latest()
    assert save is not None
    assert not (tmp_path / "out").exists()


def test_b15_rotation_never_removes_the_last_complete_save(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    """A save that fails (a full disk) leaves the one before it, and says so."""
    settings = make_settings(save_interval=0.2, keep=1)
    real, calls = dcp.save, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(options)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(dcp, "save", failing)
    with pytest.raises(HeadfoldError, match=r"step-00000006: cannot be saved .*No space left.*step-00000004"):
        uptrain(settings, student, tmp_path / "out")
    monkeypatch.setattr(dcp, "save", real)
    uptrain(settings, student, tmp_path / "out")
    uptrain(settings, student, tmp_path / "unbroken")
    assert_same_weights(tmp_path / "out", tmp_path / "unbroken")


def test_b5_a_step_with_every_label_ignored_changes_nothing_and_is_reported(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    part = train.slice_of_rank
    monkeypatch.setattr(train, "slice_of_rank", lambda rows, *a: [None] * 4 if len(rows) == 4 else part(rows, *a))
    uptrain(make_settings(weight_decay=0.5), student, tmp_path / "out")
    entries = [entry for entry in read_metrics(tmp_path / "out.state") if "loss" in entry]
    assert all((entry["loss"], entry["counted_tokens"], entry["gradient_norm"]) == (0, 0, 0) for entry in entries)
    assert_same_weights(tmp_path / "out", student)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"]
)
def test_an_accelerate_config_that_shards_by_itself_is_refused_with_our_key(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(RefusedError, match=r"accelerate config.*uptrain\.shard"):
        uptrain(make_settings(), student, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trackers": ["no_such_tracker"]}, "no_such_tracker"),
        ({"sequence_length": 512}, "sequence_length is 512.*256"),
        ({"data": ["/no/such/file.txt"]}, "no such file"),
        ({"distillation": {}}, "teacher"),
        ({"tokens": 10**6, "sequence_length": 200, "data": ["{short}"]}, "less than one row"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, student: Path, make_settings: Make, change: dict[str, Any], words: str
):
    short = write_jsonl(tmp_path / "short.jsonl", ["The king saw the river."])
    if change.get("data") == ["{short}"]:
        change = {**change, "data": [str(short)]}
    with pytest.raises(RefusedError, match=words) as caught:
        uptrain(make_settings(**change), student, tmp_path / "out")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, student: Path, make_settings: Make):
    teacher = make_checkpoint(tmp_path / "teacher", vocab_size=321)
    with pytest.raises(RefusedError, match=r"321 tokens and the student 320"):
        uptrain(make_settings(distillation={}), student, tmp_path / "out", teacher=teacher)


def test_attention_that_does_not_isolate_is_refused(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    """An attention function without masks of its own, as transformers allows to register, ignores the boundaries."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("headfold_test_leaky", sdpa_attention_forward)
    leaky = make_settings(attention="headfold_test_leaky")
    with pytest.raises(RefusedError, match="does not keep the documents of a row apart"):
        uptrain(leaky, student, tmp_path / "out")
    uptrain(make_settings(attention="headfold_test_leaky", isolate_documents=False), student, tmp_path / "out")


def test_a_student_without_a_tokenizer_is_refused(tmp_path: Path, student: Path, make_settings: Make):
    bare = tmp_path / "bare"
    shutil.copytree(student, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(RefusedError, match="tokenizer"):
        uptrain(make_settings(), bare, tmp_path / "out")


@pytest.mark.parametrize("record", ["[", "[]", '{"a":' * 200 + "1" + "}" * 200])
def test_a_damaged_record_of_the_student_is_refused_before_training(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch, record: str
):
    shutil.copytree(student, tmp_path / "damaged")
    (tmp_path / "damaged" / "headfold.json").write_text(record)
    monkeypatch.setattr(train, "fit", lambda run: pytest.fail("trained"))
    with pytest.raises(RefusedError, match=r"headfold\.json"):
        uptrain(make_settings(), tmp_path / "damaged", tmp_path / "out")


# ------------------------------------------------------------------------------------------------------------ progress


def test_flops_count_matrices_once_and_half_the_attention(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(path)
    per_layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o, mlp
    assert flops_per_token(model, 100) == 2 * (2 * per_layer + 320 * 32) + 2 * 2 * 4 * 8 * 100


def test_progress_goes_to_stderr_and_nothing_to_stdout(
    tmp_path: Path, student: Path, eval_corpus: Path, make_settings: Make, capfd: pytest.CaptureFixture[str]
):
    uptrain(make_settings(eval_data=[str(eval_corpus)], eval_interval=1), student, tmp_path / "out")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "step 10/10" in captured.err and "eval loss" in captured.err and "tokens/s" in captured.err


def test_trackers_get_the_numbers_of_every_step(
    tmp_path: Path, student: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for tensorboard, which is not a dependency; accelerate itself finds, starts, feeds and ends it."""
    calls: list[tuple[str, Any]] = []

    class Fake(GeneralTracker):
        name = "tensorboard"
        requires_logging_directory = False

        def __init__(self, run_name: str, *_: Any, **__: Any) -> None:
            super().__init__(_blank=True)
            calls.append(("start", run_name))

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            calls.append(("settings", values))

        def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
            calls.append((f"step {step}", values))

        def finish(self) -> None:
            calls.append(("end", None))

    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Fake)
    uptrain(make_settings(trackers=["tensorboard"]), student, tmp_path / "out")
    named = dict(calls)
    assert all(isinstance(value, (int, float, str)) for value in named["settings"].values())
    assert named["step 10"]["loss"] == step_losses(tmp_path / "out.state")[-1]
    assert [name for name, _ in calls if name.startswith("step")] == [f"step {step}" for step in range(1, 11)]
    assert calls[0] == ("start", "headfold") and calls[-1] == ("end", None)


def test_on_a_terminal_one_line_is_redrawn(
    tmp_path: Path, student: Path, eval_corpus: Path, make_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    uptrain(make_settings(eval_data=[str(eval_corpus)], eval_interval=1), student, tmp_path / "out")
    shown = terminal.getvalue()
    for part in ("10/10", "1,280 tokens", "loss ", "lr ", "tokens/s", "eval loss"):
        assert part in shown
