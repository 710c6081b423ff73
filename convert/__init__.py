"""Checkpoint in, checkpoint out: multi-head attention to grouped-query attention, by the tensor."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headfold.convert.conversion import ConversionReport, convert_checkpoint

__all__ = ["ConversionReport", "convert_checkpoint"]


def __getattr__(name: str) -> Any:
    # The floors above use errors, texts and checkpoint directories alone; they should not load the converter for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headfold.convert import conversion

    return getattr(conversion, name)
