"""Runs `uptrain` for a test, job after job, in a process of its own or in one of several, with a fault if asked to."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState

from headfold.convert.errors import HeadfoldError
from headfold.uptrain import train
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.shard import whole_tensor


def inject(fault: dict[str, Any]) -> None:
    """Make one process signal itself or raise at the start of a step, or kill itself before a rename."""
    step, rename = train._step, Path.rename

    def faulty_step(run: train.Run, received: list[int]) -> int:
        if run.position.step == fault.get("at_step") and int(os.environ.get("RANK", 0)) == fault.get("rank", 0):
            if fault["kind"] == "raise":
                raise HeadfoldError("this process has lost its disk")
            os.kill(os.getpid(), getattr(signal, fault["kind"]))
        return step(run, received)

    def faulty_rename(self: Path, target: Path) -> Path:
        if fault.get("before_rename_to") == Path(target).name:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    train._step = faulty_step
    Path.rename = faulty_rename  # type: ignore[method-assign, assignment]


def dump_gradients(path: Path) -> None:
    """Write the gradients of the first step, as the optimizer gets them but for clipping."""
    total_norm = torch.nn.utils.get_total_norm

    def dumping_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
        whole = [whole_tensor(gradient) for gradient in gradients]
        if not path.exists() and int(os.environ.get("RANK", 0)) == 0:
            torch.save(whole, path)
        return total_norm(gradients)

    torch.nn.utils.get_total_norm = dumping_norm


def main() -> None:
    # One process group for all jobs: a second one would find the first one's addresses in the launcher's store.
    PartialState.destroy_process_group = lambda self, group=None: None  # type: ignore[method-assign]
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        if "fault" in job:
            inject(job["fault"])
        if "gradients" in job:
            dump_gradients(Path(job["gradients"]))
        try:
            train.uptrain(
                UptrainSettings.model_validate(job["settings"]),
                Path(job["student"]),
                Path(job["output"]),
                teacher=Path(job["teacher"]) if job.get("teacher") else None,
            )
        except HeadfoldError as error:
            print(f"headfold: {error}", file=sys.stderr)
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
