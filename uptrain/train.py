"""The training stage, to be read in one sitting: setup(), fit(), finish(), and `uptrain` that calls them in turn.

Every process of a run executes this module. Accelerate says which process this is, on which device and in which
precision; shard.py lays the models over the processes; data.py gives the rows of a step; state.py keeps what a killed
run goes on from.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from headfold.convert.check import verify_checkpoint
from headfold.convert.checkpoint import RECORD_FILE, Checkpoint, CheckpointWriter, read_record, refuse_output
from headfold.convert.errors import CheckpointError, HeadfoldError, RefusedError, StoppedError
from headfold.convert.texts import load_tokenizer
from headfold.uptrain import processes
from headfold.uptrain.data import IGNORED, Batch, PackedRows, pack, rows_of_step, slice_of_rank
from headfold.uptrain.loss import LossSums, Objective
from headfold.uptrain.model import CausalModel, load_model
from headfold.uptrain.progress import Reporter, TokenCounter, flops_per_token, peak_flops
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.shard import Spread, release, set_gradient_sync, whole_tensor
from headfold.uptrain.state import Position, StateDirectory, training_tensors

COMPARED_VERSIONS = ("headfold", "torch", "transformers", "accelerate")


@dataclass
class Run:
    """Everything that one process of a run works with."""

    settings: UptrainSettings
    accelerator: Accelerator
    source: Checkpoint
    """The student as it was."""
    output: Path
    state: StateDirectory
    student: CausalModel
    objective: nn.Module
    """The student with its loss, wrapped for the processes."""
    optimizer: torch.optim.Optimizer
    rows: PackedRows
    eval_rows: PackedRows | None
    position: Position
    reporter: Reporter


def uptrain(
    settings: UptrainSettings,
    student: Path,
    output: Path,
    *,
    teacher: Path | None = None,
    state_dir: Path | None = None,
) -> dict[str, Any]:
    """Train the checkpoint `student` and write the result to `output`. Returns the "uptrain" section of headfold.json.

    teacher: the unconverted checkpoint, for distillation. state_dir (OUTPUT.state by default) holds packed rows,
    metrics.jsonl and saves: a call that finds saves there goes on from the last complete one, to the same result. A
    call that finds its finished output returns at once.

    Runs in every process that a launcher started, or in this one alone. Raises RefusedError for what cannot be
    trained, StoppedError after SIGINT or SIGTERM (the run is saved and can go on), HeadfoldError when training fails.
    """
    output, state_dir = Path(output), Path(state_dir or f"{output}.state")
    finished = _finished(settings, student, output)
    if finished is not None:
        return finished
    if settings.distillation is not None and teacher is None:
        raise RefusedError("uptrain.distillation needs the unconverted model as its teacher, and none was given")
    with processes.started(settings, state_dir) as accelerator, StateDirectory(state_dir) as state:
        run = setup(settings, accelerator, state, student=student, teacher=teacher, output=output)
        fit(run)
        return finish(run)


def setup(
    settings: UptrainSettings,
    accelerator: Accelerator,
    state: StateDirectory,
    *,
    student: Path,
    teacher: Path | None,
    output: Path,
) -> Run:
    """Data, models, optimizer, and the state of the last complete save if there is one."""
    device = accelerator.device

    def prepare() -> list[Path | None]:
        """What one process does for all: check the inputs, lock the state, tokenize."""
        source = verify_checkpoint(student)
        read_record(source.path)  # a damaged one should not come to light when everything is done
        refuse_output(source.path, output, force=False)
        _refuse_models(settings, source, verify_checkpoint(teacher) if settings.distillation and teacher else None)
        state.open()
        return _pack(settings, source, state)

    packed, packed_eval = processes.main_first(accelerator, prepare)
    assert packed is not None
    open_rows = partial(
        PackedRows, sequence_length=settings.sequence_length, isolate_documents=settings.isolate_documents
    )
    rows = open_rows(packed)
    eval_rows = None if packed_eval is None else open_rows(packed_eval)

    source = Checkpoint.open(student)
    teacher_source = Checkpoint.open(teacher) if settings.distillation and teacher else None
    spread = Spread(device, shard=settings.shard, mixed_precision=settings.mixed_precision)
    load_options = {"device": device, "attention": settings.attention, "after_layer": spread.layer}
    model = load_model(source, dtype=torch.float32, trainable=True, **load_options)
    # Flash attention takes restarting positions for document boundaries only in a single row.
    flatten = settings.isolate_documents and "flash" in str(model.config._attn_implementation)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    student_model, teacher_model = CausalModel(model, flatten_rows=flatten), None
    flops = 3 * flops_per_token(model, settings.sequence_length)
    if teacher_source is not None:
        # Frozen, so it needs no float32 master copy.
        dtype = torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float32
        frozen = load_model(teacher_source, dtype=dtype, trainable=False, **load_options).eval()
        flops += flops_per_token(frozen, settings.sequence_length)
        teacher_model = CausalModel(frozen, flatten_rows=flatten)
        spread.whole(teacher_model, trainable=False)
    objective = spread.whole(Objective(student_model, teacher_model, settings.distillation))
    objective.train()

    run = Run(
        settings=settings,
        accelerator=accelerator,
        source=source,
        output=output,
        state=state,
        student=student_model,
        objective=objective,
        optimizer=_optimizer(model, settings),
        rows=rows,
        eval_rows=eval_rows,
        position=Position(identity=_identity(settings, source, teacher_source, rows)),
        reporter=Reporter(
            accelerator,
            state.metrics,
            num_steps=settings.num_steps,
            tokens_per_step=settings.tokens_per_step,
            flops_per_step=flops * settings.tokens_per_step,
            peak_flops=peak_flops(device, settings.mixed_precision),
        ),
    )
    if settings.isolate_documents:
        _check_isolation(run)
    save = processes.main_first(accelerator, state.latest)
    if save is not None:
        run.position = processes.main_first(accelerator, lambda: state.position(save, run.position.identity))
        state.load(save, training_tensors(model, run.optimizer), accelerator)
        run.reporter.say(f"going on from {save}")
    plain = {
        key: value if isinstance(value, (int, float, str)) else json.dumps(value)
        for key, value in run.position.identity.items()
    }
    accelerator.init_trackers("headfold", config=plain)
    return run


def fit(run: Run) -> None:
    """Train to the end of the budget; evaluate and save on the way."""
    settings, position = run.settings, run.position
    several = run.accelerator.num_processes > 1
    with run.reporter.from_step(position.step), _signals(several_processes=several) as received:
        if position.step == 0:
            _evaluate(run)
        while position.step < settings.num_steps:
            signal_number = _step(run, received)
            before, now = (step * settings.tokens_per_step for step in (position.step - 1, position.step))
            last = position.step == settings.num_steps
            if last or _passes(now, before, settings.in_tokens(settings.eval_interval)):
                _evaluate(run)
            failed = position.skipped_in_a_row >= settings.max_nonfinite_steps
            if not failed and (
                last or signal_number or _passes(now, before, settings.in_tokens(settings.save_interval))
            ):
                _save(run)
            if failed:
                message = (
                    f"the loss was not finite in {position.skipped_in_a_row} steps in a row, the last of them step "
                    f"{position.step}; {run.state.advice()}; "
                    "if it recurs, lower uptrain.learning_rate"
                )
                processes.fail_together(run.accelerator, HeadfoldError(message))
            if signal_number and not last:
                message = f"stopped after step {position.step} of {settings.num_steps}; {run.state.advice()}"
                processes.fail_together(run.accelerator, StoppedError(message, signal_number))


def _step(run: Run, received: list[int]) -> int:
    """One optimizer step. Returns the number of the signal that any process has received, or 0."""
    settings, accelerator, position, step = run.settings, run.accelerator, run.position, run.position.step
    rows = rows_of_step(step, batch_rows=settings.batch_rows, num_rows=len(run.rows), seed=settings.seed)
    mine = slice_of_rank(rows, accelerator.process_index, accelerator.num_processes)
    size = settings.micro_batch_rows
    batches = [run.rows.batch(mine[start : start + size]) for start in range(0, len(mine), size)]
    counted = accelerator.reduce(_counted(batches).to(accelerator.device), "sum")
    # Dropout, where a model has it, depends on the step alone: a resumed run draws what the unbroken one drew.
    seed = np.random.SeedSequence([settings.seed, step, accelerator.process_index]).generate_state(1)[0]
    torch.manual_seed(int(seed))

    totals = _zeros(4, accelerator.device)
    for index, batch in enumerate(batches):
        set_gradient_sync(run.objective, index == len(batches) - 1)
        sums = _sums(run, batch)
        # Gradients are averaged over the processes, the loss is a mean over the tokens of all: multiply back.
        (sums.loss * (accelerator.num_processes / counted.clamp(min=1))).backward()
        totals[:3] += torch.stack([value.detach() for value in sums])
    totals[3] = len(received)
    loss, cross_entropy, divergence, num_received = accelerator.reduce(totals, "sum").tolist()

    gradients = [p.grad for p in run.student.parameters() if p.grad is not None]
    norm = whole_tensor(nn.utils.get_total_norm(gradients))
    num_counted = int(counted)
    learning_rate = settings.learning_rate_schedule().learning_rate((step + 0.5) * settings.tokens_per_step)
    finite = math.isfinite(loss) and math.isfinite(norm.item())
    if finite and num_counted:
        nn.utils.clip_grads_with_norm_(run.student.parameters(), settings.gradient_clip, norm)
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)

    position.step += 1
    position.skipped_steps += not finite
    position.skipped_in_a_row = 0 if finite else position.skipped_in_a_row + 1
    values: dict[str, Any] = {
        "step": position.step,
        "tokens": position.step * settings.tokens_per_step,
        "loss": loss / max(num_counted, 1) if finite else None,
        "cross_entropy": cross_entropy / max(num_counted, 1),
        "learning_rate": learning_rate,
        "gradient_norm": norm.item(),
        "counted_tokens": num_counted,
        "skipped": not finite,
    }
    if settings.distillation:
        values["divergence"] = divergence / max(num_counted, 1)
    run.reporter.step(values)
    if not num_received:
        return 0
    number = torch.tensor(received[:1] or [0], device=accelerator.device)
    return int(accelerator.gather(number).max())


@torch.no_grad()
def _evaluate(run: Run) -> None:
    """Mean cross-entropy over the evaluation rows, each counted once on any number of processes."""
    if run.eval_rows is None:
        return
    accelerator, size = run.accelerator, run.settings.micro_batch_rows
    num_rows = min(len(run.eval_rows), run.settings.eval_rows or len(run.eval_rows))
    mine = slice_of_rank(range(num_rows), accelerator.process_index, accelerator.num_processes)
    totals = _zeros(3, accelerator.device)
    run.objective.eval()
    for start in range(0, len(mine), size):
        rows = mine[start : start + size]
        batch = run.eval_rows.batch(rows)
        totals[0] += _sums(run, batch, with_teacher=False).cross_entropy
        totals[1] += _counted([batch])
        totals[2] += sum(row is not None for row in rows)
    run.objective.train()
    release(run.objective)
    loss, num_counted, num_evaluated = accelerator.reduce(totals, "sum").tolist()
    run.reporter.evaluation(
        {
            "step": run.position.step,
            "tokens": run.position.step * run.settings.tokens_per_step,
            "eval_loss": loss / max(num_counted, 1),
            "eval_tokens": int(num_counted),
            "eval_rows": int(num_evaluated),
        }
    )


def finish(run: Run) -> dict[str, Any]:
    """Write the trained checkpoint, every tensor in the dtype it came in. Returns its "uptrain" record."""
    summary = _summary(run)
    parameters = dict(run.student.model.named_parameters(remove_duplicate=False))
    record = read_record(run.source.path)
    main = run.accelerator.is_main_process
    with CheckpointWriter(run.source, run.output) if main else nullcontext() as writer:
        for name in run.source.tensors:
            if name in parameters:
                tensor = whole_tensor(parameters[name])
                if writer is not None:
                    writer.write(name, tensor)

        def publish() -> None:
            assert writer is not None
            writer.copy_unwritten()
            writer.finish(run.source.config, {**record, "uptrain": summary})
            run.state.rotate(keep=1)

        processes.main_first(run.accelerator, publish)
    return summary


# ------------------------------------------------------------------------------------------------------ their parts


def _sums(run: Run, batch: Batch, *, with_teacher: bool = True) -> LossSums:
    with run.accelerator.autocast():
        return run.objective(batch.to(run.accelerator.device), with_teacher=with_teacher)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """For sums over many tokens; float32 where float64 does not exist."""
    return torch.zeros(count, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)


def _counted(batches: list[Batch]) -> torch.Tensor:
    return torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()


def _save(run: Run) -> None:
    tensors = training_tensors(run.student.model, run.optimizer)
    run.state.save(run.position, tensors, run.accelerator, keep=run.settings.keep)
    run.reporter.restart_clock()


def _passes(now: int, before: int, interval: float) -> bool:
    """Whether a multiple of `interval` lies in (before, now]."""
    return now // interval > before // interval


def _optimizer(model: nn.Module, settings: UptrainSettings) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        fused=True,
    )


def _pack(settings: UptrainSettings, source: Checkpoint, state: StateDirectory) -> list[Path | None]:
    """The packed files for training and, if asked for, evaluation."""
    options: dict[str, Any] = {
        "folder": state.packed,
        "tokenizer": load_tokenizer(source.path),
        "text_field": settings.text_field,
        "sequence_length": settings.sequence_length,
        "vocab_size": _text_config(source)["vocab_size"],
        "progress": TokenCounter(),
    }
    num_rows = settings.num_steps * settings.batch_rows
    return [
        pack(settings.data, name="train", split=settings.split, max_rows=num_rows, **options),
        pack(settings.eval_data, name="eval", split=settings.split, max_rows=settings.eval_rows, **options)
        if settings.eval_data
        else None,
    ]


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return checkpoint.config.get("text_config", checkpoint.config)


def _refuse_models(settings: UptrainSettings, source: Checkpoint, teacher: Checkpoint | None) -> None:
    longest = _text_config(source).get("max_position_embeddings")
    if isinstance(longest, int) and settings.sequence_length > longest:
        raise RefusedError(
            f"uptrain.sequence_length is {settings.sequence_length}, but the model has positions for {longest} tokens"
        )
    if teacher is not None and _text_config(teacher).get("vocab_size") != _text_config(source).get("vocab_size"):
        raise RefusedError(
            f"the teacher knows {_text_config(teacher).get('vocab_size')} tokens and the student "
            f"{_text_config(source).get('vocab_size')}: distillation needs one vocabulary"
        )


@torch.no_grad()
def _check_isolation(run: Run) -> None:
    """Raises RefusedError if the loss of a document depends on the document before it in the row."""
    half = min(16, run.settings.sequence_length // 2)
    tokens = torch.arange(1, 2 * half + 1) % _text_config(run.source)["vocab_size"]
    positions = torch.arange(half).repeat(2)
    labels = torch.where(torch.arange(2 * half) < half, IGNORED, tokens)
    other = torch.where(torch.arange(2 * half) < half, tokens.roll(1), tokens)
    run.objective.eval()
    first, second = (
        _sums(run, Batch(ids[None], labels[None], positions[None]), with_teacher=False).cross_entropy.item()
        for ids in (tokens, other)
    )
    run.objective.train()
    release(run.objective)
    if not math.isclose(first, second, rel_tol=1e-5):
        attention = run.student.model.config._attn_implementation
        raise RefusedError(
            f"{run.source.path}: with attention {attention}, this model does not keep the documents of a row apart; "
            "choose another uptrain.attention, or set uptrain.isolate_documents to false"
        )


def _identity(
    settings: UptrainSettings, source: Checkpoint, teacher: Checkpoint | None, rows: PackedRows
) -> dict[str, Any]:
    return {
        **settings.decisive(),
        "student": _student_identity(source),
        "teacher": None if teacher is None else teacher.fingerprint,
        "data": rows.file.sha256,
    }


def _student_identity(source: Checkpoint) -> str:
    """sha256 of the headers and of the record of how the student was made, which holds its time."""
    record = source.path / RECORD_FILE
    return hashlib.sha256(source.fingerprint.encode() + (record.read_bytes() if record.is_file() else b"")).hexdigest()


def _finished(settings: UptrainSettings, student: Path, output: Path) -> dict[str, Any] | None:
    """The record of a finished output of the same student and settings; RefusedError if something else is there."""
    if not output.exists():
        return None
    try:
        record = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))["uptrain"]
        made_from, made_with = record["student"]["identity"], record["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RefusedError(f"{output}: exists and is not a result of uptraining; choose another output") from None
    if made_from != _student_identity(Checkpoint.open(student)) or made_with != settings.decisive():
        raise RefusedError(
            f"{output}: is the result of uptraining another student or with other settings; "
            "choose another output, or remove it"
        )
    try:
        Checkpoint.open(output)
    except CheckpointError as error:
        raise RefusedError(
            f"{output}: damaged ({error}). Remove {output} and run again: it is made anew from the last save"
        ) from error
    return record


def _summary(run: Run) -> dict[str, Any]:
    evaluations = []
    if run.state.metrics.exists():
        entries = [json.loads(line) for line in run.state.metrics.read_text(encoding="utf-8").splitlines()]
        evaluations = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    return {
        "student": {"name": run.source.path.name, "identity": run.position.identity["student"]},
        "tokens": run.settings.total_tokens,
        "steps": run.settings.num_steps,
        "skipped_steps": run.position.skipped_steps,
        "eval_loss": {"before": evaluations[0], "after": evaluations[-1]} if evaluations else None,
        "data": {
            "sources": [Path(source).name for source in run.settings.data],
            "sha256": run.rows.file.sha256,
            "tokens": run.rows.file.num_tokens,
            "documents": run.rows.file.num_documents,
            "skipped_texts": run.rows.file.num_skipped,
        },
        "seed": run.settings.seed,
        "settings": run.settings.decisive(),
        "num_processes": run.accelerator.num_processes,
        "versions": {name: version(name) for name in COMPARED_VERSIONS},
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


@contextmanager
def _signals(*, several_processes: bool) -> Iterator[list[int]]:
    """The SIGINT and SIGTERM that arrive, for the end of the step. A second one ends a single process at once.

    In several processes the launcher passes on what the terminal has already sent to all, so there it is ignored.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        if not several_processes:
            signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, receive)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
