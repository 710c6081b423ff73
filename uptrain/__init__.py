"""Checkpoint and tokens in, checkpoint out: the training that recovers what conversion cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headfold.uptrain.settings import UptrainSettings
    from headfold.uptrain.train import uptrain

_MODULE_OF_NAME = {"UptrainSettings": "settings", "uptrain": "train"}

__all__ = ["UptrainSettings", "uptrain"]


def __getattr__(name: str) -> Any:
    # Reading a recipe needs the settings but not torch, so the training is imported when it is asked for.
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)
