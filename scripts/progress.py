"""Progress on stderr: a bar that is redrawn on a terminal, elsewhere a line at each tenth, as logs want it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar:
    """Called with what is being done, how much of it is done and how much there is, in bytes or in steps."""

    def __init__(self, unit: Literal["bytes", "steps"]) -> None:
        counts: list[ProgressColumn] = (
            [DownloadColumn(binary_units=False), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        )
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *counts,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            tenth = 10 * done // max(total, 1)
            if tenth > self._tenths.get(what, 0):
                self._tenths[what] = tenth
                print(f"{what}: {tenth * 10} %", file=sys.stderr, flush=True)
            return
        if not self._tasks:
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)
