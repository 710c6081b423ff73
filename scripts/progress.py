"""Progress on stderr: a bar that is redrawn on a terminal, a line at each tenth elsewhere, so that logs stay readable."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

Report = Callable[[int, int], None]
"""Called with what is done and the total, in the unit of the bar."""


class ProgressBar:
    """One piece of work on stderr, counted in bytes or in steps."""

    def __init__(self, what: str, unit: Literal["bytes", "steps"] = "steps") -> None:
        counts: list[ProgressColumn] = (
            [DownloadColumn(binary_units=False), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        )
        self._what = what
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *counts,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._tenth = 0

    def __enter__(self) -> Report:
        return self._report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def _report(self, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            tenth = 10 * done // max(total, 1)
            if tenth > self._tenth:
                self._tenth = tenth
                print(f"{self._what}: {tenth * 10} %", file=sys.stderr, flush=True)
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=total)
        self._bar.update(self._task, completed=done, total=total)
