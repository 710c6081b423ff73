"""Runs `uptrain` for a test, in a process of its own or in one of several, with a fault if the job asks for one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from headfold.convert.errors import HeadfoldError
from headfold.uptrain import train
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.state import StateDirectory


def inject(fault: dict[str, Any]) -> None:
    """Make this process kill itself, or raise, in a step or a save."""
    step, saves = train._step, StateDirectory.save

    def faulty_step(run: train.Run, received: list[int]) -> int:
        if run.position.step == fault.get("at_step") and int(os.environ.get("RANK", 0)) == fault.get("rank", 0):
            if fault["kind"] == "raise":
                raise HeadfoldError("rank 1 has lost its disk")
            os.kill(os.getpid(), getattr(signal, fault["kind"]))
        return step(run, received)

    def faulty_rename(self: Path, target: Path) -> Path:
        if fault.get("at_rename_to") == Path(target).name:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    rename = Path.rename
    train._step = faulty_step
    Path.rename = faulty_rename  # type: ignore[method-assign, assignment]
    assert saves is StateDirectory.save


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "fault" in job:
        inject(job["fault"])
    try:
        train.uptrain(
            UptrainSettings.model_validate(job["settings"]),
            Path(job["student"]),
            Path(job["output"]),
            teacher=Path(job["teacher"]) if "teacher" in job else None,
        )
    except HeadfoldError as error:
        print(f"headfold: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
