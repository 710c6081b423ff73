"""Checkpoints as models in memory, loaded the same way on both sides."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from headfold.convert.errors import CheckpointError, RefusedError, first_line

from .settings import EvalSettings


@dataclass(frozen=True)
class Placement:
    """Where and in what form models run. `attention` is transformers' attn_implementation; None: its own choice, which
    is "sdpa" for classes that have it."""

    device: torch.device
    dtype: torch.dtype
    attention: str | None
    trust_remote_code: bool = False


def placement(settings: EvalSettings) -> Placement:
    """Resolves the defaults of device, dtype and attention. Raises RefusedError for a device that is not there."""
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RefusedError(f"device {name!r} cannot be used here: {first_line(error)}") from error
    default = "float32" if device.type == "cpu" else "bfloat16"
    return Placement(
        device, getattr(torch, settings.dtype or default), _attention(settings.engine), settings.trust_remote_code
    )


def _attention(engine: str) -> str | None:
    if engine != "headfold":
        return None
    from headfold.kernels.attention import ATTN_IMPLEMENTATION, register_attention

    register_attention()
    return ATTN_IMPLEMENTATION


def load_model(path: Path, place: Placement) -> transformers.PreTrainedModel:
    """The checkpoint's causal language model, ready for inference. Raises CheckpointError if weights do not fit."""
    loader: Any = transformers.AutoModelForCausalLM
    with quiet():
        try:
            model, info = loader.from_pretrained(
                path,
                dtype=place.dtype,
                attn_implementation=place.attention,
                trust_remote_code=place.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # whatever a config that makes no sense makes transformers raise
            raise CheckpointError(f"{path}: transformers cannot load this model: {first_line(error)}") from error
    # transformers fills what is missing with random numbers and goes on; a measurement must not.
    for kind in ("missing_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[kind])):
            raise CheckpointError(f"{path}: {len(keys)} {kind.replace('_', ' ')} in its weights, {keys[0]} first.")
    return model.to(place.device).eval()


def text_config(model: transformers.PreTrainedModel) -> Any:
    """The part of a model's config that describes its decoder."""
    return model.config.get_text_config(decoder=True)


def load_config(path: Path, place: Placement) -> Any:
    """The config of the checkpoint's decoder. Raises RefusedError if transformers does not know it."""
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(
                path, trust_remote_code=place.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # likewise
            raise RefusedError(f"{path}: transformers cannot read its config: {first_line(error)}") from error
    return config.get_text_config(decoder=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and notices off the terminal."""
    logger = logging.getLogger("transformers")
    level, bars = logger.level, transformers.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


def device_name(device: torch.device) -> str:
    """The device in words, as precisely as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def available_bytes(device: torch.device) -> int | None:
    """Memory that the device has free, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
