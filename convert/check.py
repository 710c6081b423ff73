"""Does a directory hold a sound checkpoint? Asked of every input and of every output."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headfold.convert.checkpoint import Checkpoint, scan
from headfold.convert.errors import CheckpointError, RefusedError, first_line, printable
from headfold.convert.families.declared import FAMILIES, MULTI_QUERY_FAMILIES
from headfold.convert.families.describe import describe
from headfold.convert.families.layout import AttentionLayer
from headfold.convert.families.remap import REMAPPED, remap
from headfold.convert.header import torch_dtype

_NOT_STRUCTURE = ("attn_implementation", "experts_implementation", "fusion_config", "auto_map")
"""Config fields that say how to load or run a model rather than what it is; some could make transformers fetch code."""

_MLP_AXES = {"gate_proj": 0, "up_proj": 0, "fc1": 0, "down_proj": 1, "fc2": 1}
"""The axis of an MLP's weights that has intermediate_size elements."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong (error) or odd (warning) about a checkpoint, in one line."""

    severity: Literal["error", "warning"]
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(self.message))


def check_checkpoint(path: str | Path) -> list[Finding]:
    """All that is wrong or odd about a checkpoint directory; an empty list if nothing is.

    Files, headers and index are read, the attention layers are compared with the config, embeddings and their ties
    too, and for a declared family every name and shape with transformers' class. A sound model that cannot be converted
    gets a warning that says why. No tensor data is read, no code of the checkpoint is run.
    """
    return _check(path, against_class=True)[1]


def verify_checkpoint(path: str | Path, *, against_class: bool = False) -> Checkpoint:
    """The opened checkpoint, checked as by `check_checkpoint`; against transformers' class, which takes seconds to
    load, where that is asked for.

    Raises CheckpointError with the first error.
    """
    checkpoint, findings = _check(path, against_class=against_class)
    for finding in findings:
        if finding.severity == "error":
            raise CheckpointError(finding.message)
    assert checkpoint is not None
    return checkpoint


def _check(path: str | Path, *, against_class: bool) -> tuple[Checkpoint | None, list[Finding]]:
    checkpoint, findings = _check_files(path)
    if checkpoint is None or not against_class or any(finding.severity == "error" for finding in findings):
        return checkpoint, findings
    return checkpoint, findings + _check_against_class(checkpoint)


def _check_files(path: str | Path) -> tuple[Checkpoint | None, list[Finding]]:
    """The checkpoint, if there is one, and what its files, names and shapes show by themselves."""
    checkpoint, problems = scan(path)
    findings = [Finding("error", problem) for problem in problems]
    if checkpoint is None or problems:
        return checkpoint, findings
    findings += [Finding("warning", warning) for warning in checkpoint.warnings]
    target = checkpoint
    try:
        target = remap(checkpoint)
        findings += _check_blocks(target, describe(target))
    except CheckpointError as error:
        findings.append(Finding("error", str(error)))
    except RefusedError as error:
        findings.append(Finding("warning", str(error)))
    return checkpoint, findings + _check_embeddings(target)


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The part of the config that describes the language model."""
    nested = checkpoint.config.get("text_config")
    return nested if isinstance(nested, dict) else checkpoint.config


def _check_blocks(checkpoint: Checkpoint, layers: list[AttentionLayer]) -> list[Finding]:
    """Biases that k or v lacks and q has, and the shapes of MLPs of the usual names against `intermediate_size`."""
    text = _text_config(checkpoint)
    if text.get("model_type") not in FAMILIES:
        return []
    size = text.get("intermediate_size")
    has_one_size = type(size) is int and "per_layer_config" not in text
    for layer in layers:
        for projection in (layer.k, layer.v):
            if (projection.bias is None) != (layer.q.bias is None):
                with_bias, without = (layer.q, projection) if layer.q.bias else (projection, layer.q)
                what = f"{without.weight} has no bias, {with_bias.weight} has one: random numbers would fill it"
                return [Finding("error", f"{checkpoint.path}: {what}")]
        block = layer.q.weight.rsplit(".", 3)[0]
        for name, axis in _MLP_AXES.items() if has_one_size else ():
            entry = checkpoint.tensors.get(f"{block}.mlp.{name}.weight")
            if entry is not None and len(entry.shape) == 2 and entry.shape[axis] != size:
                what = f"config.json says intermediate_size {size}, but {entry.name} has the shape {list(entry.shape)}"
                return [Finding("error", f"{checkpoint.path}: {what}")]
    return []


def _check_embeddings(checkpoint: Checkpoint) -> list[Finding]:
    """The input embedding against the vocabulary, and the output head against `tie_word_embeddings`."""
    text = _text_config(checkpoint)
    entries = [entry for name, entry in checkpoint.tensors.items() if name.endswith("embed_tokens.weight")]
    heads = [entry for name, entry in checkpoint.tensors.items() if name.endswith("lm_head.weight")]
    findings = []
    vocab_size = text.get("vocab_size")
    for entry in entries[:1] + heads[:1]:
        if isinstance(vocab_size, int) and entry.shape[:1] != (vocab_size,):
            findings.append(
                Finding(
                    "error",
                    f"{checkpoint.path}: config.json says vocab_size {vocab_size}, "
                    f"but {entry.name} has the shape {list(entry.shape)}",
                )
            )
    family = FAMILIES.get(str(text.get("model_type")))
    tied = checkpoint.config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is None and family is not None:
        tied = family.ties
    classes = checkpoint.config.get("architectures")
    has_head = isinstance(classes, list) and any(str(name).endswith("ForCausalLM") for name in classes)
    if entries and not heads and has_head and tied is False:
        findings.append(
            Finding(
                "error",
                f"{checkpoint.path}: no lm_head.weight, and tie_word_embeddings is not true in config.json: "
                "the output layer would be random numbers",
            )
        )
    return findings


def _check_against_class(checkpoint: Checkpoint) -> list[Finding]:
    """Every name and shape against the model's class: transformers' own loader is given tensors without memory and says
    which it misses, which it has no use for, and which it expects in another shape."""
    text = _text_config(checkpoint)
    if text.get("model_type") not in {*FAMILIES, *MULTI_QUERY_FAMILIES, *REMAPPED}:
        return []
    if any(part.get("quantization_config") is not None for part in (checkpoint.config, text)):
        return []  # its tensors are others, and transformers would fetch what it needs to run them
    try:
        import torch
        import transformers
    except ImportError:
        return []
    classes = checkpoint.config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    config_class = getattr(model_class, "config_class", None)
    if model_class is None or config_class is None or config_class.model_type != checkpoint.config["model_type"]:
        return []  # code of its own, or none named
    kept = {key: value for key, value in checkpoint.config.items() if key not in _NOT_STRUCTURE and key[:1] != "_"}
    place = f"{checkpoint.path}:"
    try:
        tensors = {
            entry.name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
            for entry in checkpoint.tensors.values()
        }
        with _quiet():
            _, info = model_class.from_pretrained(
                None,
                config=config_class.from_dict(kept),
                state_dict=tensors,
                device_map="meta",
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # nothing is loaded; otherwise a mismatch would be raised, not listed
            )
    except Exception as error:  # whatever a config or tensors that make no sense make transformers raise
        reason = ascii(first_line(error)[:200])
        return [Finding("warning", f"{place} not compared with {name}, which does not take its config.json: {reason}")]
    missing, unread = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    findings = [
        Finding("error", f"{place} {tensor} has the shape {list(found)}, but in {name} it is {list(expected)}")
        for tensor, found, expected in sorted(info["mismatched_keys"])
    ]
    if missing:
        count = f"{len(missing)} such tensors" if len(missing) > 1 else "the only one"
        what = f"{missing[0]} is missing ({count}): {name} would fill it with random numbers"
        findings.append(Finding("error", f"{place} {what}"))
    if unread:
        count = f"{len(unread)} such tensors" if len(unread) > 1 else "the only one"
        findings.append(Finding("warning", f"{place} {unread[0]} is not read by {name} ({count})"))
    return findings


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its report and its progress bar."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
