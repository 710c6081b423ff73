"""What a run leaves on disk to go on from: saves of weights and optimizer, each complete or not there at all.

    STATE/packed/                  token files
    STATE/metrics.jsonl
    STATE/saves/step-00000100/     one save; complete.json, written last, says that it is complete

Saves are in the format of torch.distributed.checkpoint: every process writes its part, and any number of processes
can read it. On several hosts STATE must be on a file system that all of them share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from headfold.convert.checkpoint import io_errors, lock_directory, sync_directory
from headfold.convert.errors import HeadfoldError, RefusedError, first_line

_MARK = "complete.json"
_SAVE = re.compile(r"step-\d{8,}")


@dataclass
class Position:
    """How far a run is: all that a save holds beside tensors."""

    step: int = 0
    """Steps that are done."""
    skipped_steps: int = 0
    """Those among them whose loss was not finite, so that they changed nothing."""
    skipped_in_a_row: int = 0
    identity: dict[str, Any] = field(default_factory=dict)
    """What decides the result: settings, student, teacher, data. A run goes on only where these are the same."""


class StateDirectory:
    """The directory that a run resumes from. One run at a time works in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packed = path / "packed"
        self.metrics = path / "metrics.jsonl"
        self._saves = path / "saves"
        self._lock: int | None = None

    def open(self) -> None:
        """Lock the directory for this process and clear away what killed runs have left unfinished."""
        with io_errors(self.path, "write", RefusedError):
            self._saves.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path)
            if self._lock is None and os.name == "posix":
                raise RefusedError(f"{self.path}: another run is at work in it; wait for it or end it")
            complete = self._complete()
            for path in self._saves.iterdir():
                if path not in complete:
                    shutil.rmtree(path)

    def __enter__(self) -> StateDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _complete(self) -> list[Path]:
        """Complete saves, oldest first."""
        return sorted(
            path for path in self._saves.glob("step-*") if _SAVE.fullmatch(path.name) and (path / _MARK).is_file()
        )

    def latest(self) -> Path | None:
        """The last complete save."""
        complete = self._complete()
        return complete[-1] if complete else None

    def save(
        self, position: Position, tensors: dict[str, torch.Tensor], accelerator: Accelerator, *, keep: int
    ) -> None:
        """Write a save aside, rename it, mark it complete, and only then remove the oldest beyond `keep`."""
        final = self._saves / f"step-{position.step:08d}"
        aside = final.with_suffix(".partial")
        try:
            with _without_notes():
                dcp.save(tensors, checkpoint_id=aside, no_dist=accelerator.num_processes == 1)
        except (CheckpointException, OSError) as error:
            raise HeadfoldError(f"{final}: cannot be saved ({_cause(error)}); {self.advice()}") from error
        if accelerator.is_main_process:
            with io_errors(final, "write"):
                if final.exists():  # left over without its mark
                    shutil.rmtree(final)
                aside.rename(final)
                _write_aside(final / _MARK, json.dumps(asdict(position), indent=2) + "\n")
                sync_directory(self._saves)
            self.rotate(keep)
        accelerator.wait_for_everyone()

    def rotate(self, keep: int) -> None:
        """Remove all complete saves but the last `keep`."""
        for path in self._complete()[:-keep]:
            (path / _MARK).unlink()  # from here on it is no save any more, wherever the removal ends
            shutil.rmtree(path)

    def position(self, save: Path, identity: dict[str, Any]) -> Position:
        """How far `save` is. Raises RefusedError when it belongs to a run of another identity."""
        try:
            position = Position(**json.loads((save / _MARK).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RefusedError(
                f"{save / _MARK}: damaged ({error}); remove {save} to go on from an earlier save"
            ) from error
        for key in identity.keys() | position.identity.keys():
            before, now = position.identity.get(key), identity.get(key)
            if before != now:
                raise RefusedError(
                    f"{self.path}: holds a run with another {key} (before {before!r}, now {now!r}); "
                    "go on with the same one, or remove the directory to start anew"
                )
        return position

    def load(self, save: Path, tensors: dict[str, torch.Tensor], accelerator: Accelerator) -> None:
        """Read a save into tensors that exist, in place."""
        try:
            with _without_notes():
                dcp.load(tensors, checkpoint_id=save, no_dist=accelerator.num_processes == 1)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise HeadfoldError(
                f"{save}: cannot be read ({_cause(error)}); remove it to go on from an earlier one"
            ) from error

    def advice(self) -> str:
        """Where the run stands, for error messages."""
        latest = self.latest()
        if latest is None:
            return "there is no complete save to go on from"
        return f"the last complete save is {latest}; run the same command again to go on from it"


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and AdamW's state by name, the tensors themselves: what is read into them is read into the run."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:  # as AdamW makes it in its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        tensors[f"weights.{name}"] = parameter.detach()
        tensors.update({f"optimizer.{key}.{name}": value for key, value in state.items()})
    return tensors


@contextmanager
def _without_notes() -> Iterator[None]:
    """torch.distributed.checkpoint warns of a single process even where it is asked for one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _write_aside(path: Path, text: str) -> None:
    aside = path.with_suffix(".partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def _cause(error: BaseException) -> str:
    """The first line of what went wrong; of the first process's failure if several have one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)
