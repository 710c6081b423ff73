"""Starts the training stage: in this process, or in one process per device.

Several processes are started by `accelerate launch` on GPUs, so that what `accelerate config` wrote (hosts, ranks,
ports) holds here too. On CPUs `accelerate launch --cpu --num_processes 2` starts a single process without a word
(checked with accelerate 1.15), so there torch's own launcher is called, the one that accelerate uses on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from headfold.convert.errors import HeadfoldError, StoppedError


def is_worker() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def num_processes_for(requested: int | None) -> int:
    """Processes on this host: as many as the recipe says, else one per GPU, else one."""
    if requested is not None:
        return requested
    import torch

    return max(1, torch.cuda.device_count())


def launch_workers(arguments: Sequence[str], num_processes: int, *, mixed_precision: str) -> None:
    """Runs `headfold ARGUMENTS` in `num_processes` processes of this host and waits for them.

    Raises HeadfoldError when a worker failed (its own message stands above), StoppedError when a signal ended them.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        if torch.cuda.is_available():
            _accelerate_launch(arguments, num_processes, mixed_precision)
        else:
            _torch_launch(arguments, num_processes)
    except SignalException as error:
        raise StoppedError("training was stopped; run the same command again to go on.", error.sigval) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise HeadfoldError(
            f"training failed: process {rank} ended with exit code {failure.exitcode}; its message stands above. "
            "Run the same command again to go on from the last complete save."
        ) from error


def _accelerate_launch(arguments: Sequence[str], num_processes: int, mixed_precision: str) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    options = ["--multi_gpu", "--num_processes", str(num_processes), "--mixed_precision", mixed_precision]
    launch_command(launch_command_parser().parse_args([*options, "-m", "headfold.scripts", *arguments]))


def _torch_launch(arguments: Sequence[str], num_processes: int) -> None:
    from torch.distributed import run

    options = ["--standalone", "--nproc-per-node", str(num_processes)]
    run.run(run.parse_args([*options, "-m", "headfold.scripts", *arguments]))
