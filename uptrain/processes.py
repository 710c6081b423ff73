"""What the processes of one run say to each other: who works first, and that all end when one does."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.uptrain.settings import UptrainSettings

Result = TypeVar("Result")

_REFUSED_PLUGINS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism of its own",
}
_SECONDS_TO_SPEAK = 3
"""How long the other processes wait for the main process to say why all of them end."""


@contextmanager
def started(settings: UptrainSettings, tracker_folder: Path) -> Iterator[Accelerator]:
    """Accelerate's process state: device, precision, trackers. After a run in a single process another may start there.

    Raises RefusedError for what an accelerate config or the recipe asks for and cannot have here.
    """
    for variable, name in _REFUSED_PLUGINS.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise RefusedError(
                f"the accelerate config turns on {name}; turn it off there (`accelerate config`): here the recipe key "
                "uptrain.shard spreads a model over the processes"
            )
    available = sorted(str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers())
    for tracker in settings.trackers:
        if tracker not in available:
            raise RefusedError(
                f"uptrain.trackers: {tracker} is not installed or not one of accelerate's; "
                f"available here: {', '.join(available) or 'none'}"
            )
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=settings.mixed_precision,
        log_with=settings.trackers or None,
        project_dir=str(tracker_folder),
    )
    clean = False
    try:
        yield accelerator
        clean = True
    finally:
        # After a failure the other processes may be anywhere: theirs is not the time to close a group together.
        if clean or accelerator.num_processes == 1:
            accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def main_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """The result of `work`, done by the main process while the others wait, however long it takes.

    A HeadfoldError of `work` ends all processes.
    """
    if accelerator.num_processes == 1:
        return work()
    # Not the default group: its watchdog takes an hour of tokenizing for a hang.
    patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
    outcome: list[Result | HeadfoldError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except HeadfoldError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0, group=patient)
    dist.destroy_process_group(patient)
    if isinstance(outcome[0], HeadfoldError):
        fail_together(accelerator, outcome[0])
    return outcome[0]  # type: ignore[return-value]


def fail_together(accelerator: Accelerator, error: HeadfoldError) -> NoReturn:
    """End every process with an error that all of them have; the main process alone says it.

    The launcher ends all processes as soon as one has ended, so the others give the main process time to speak.
    """
    if accelerator.is_main_process:
        raise error
    time.sleep(_SECONDS_TO_SPEAK)
    raise SystemExit(error.exit_code)
