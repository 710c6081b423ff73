"""Two or more checkpoints in, measurements and a report out.

The names below are resolved when they are first asked for, so that the settings can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure import evaluate
    from .report import refuse_report_directory, write_report

_MODULE_OF_NAME = {"evaluate": "measure", "refuse_report_directory": "report", "write_report": "report"}

__all__ = ["evaluate", "refuse_report_directory", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)
