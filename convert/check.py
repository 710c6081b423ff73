"""Does a directory hold a sound checkpoint? Asked of every input and of every output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headfold.convert.checkpoint import Checkpoint, scan
from headfold.convert.errors import CheckpointError, RefusedError
from headfold.convert.families.declared import FAMILIES
from headfold.convert.families.describe import describe
from headfold.convert.families.remap import remap


@dataclass(frozen=True)
class Finding:
    """Something that is wrong (error) or odd (warning) about a checkpoint, in one line."""

    severity: Literal["error", "warning"]
    message: str


def check_checkpoint(path: str | Path) -> list[Finding]:
    """All that is wrong or odd about a checkpoint directory; an empty list if nothing is.

    Files, headers and index are read, the attention layers are compared with the config, embeddings and their ties
    too. A sound model that cannot be converted gets a warning that says why. No tensor data is read, no code is run.
    """
    checkpoint, problems = scan(path)
    findings = [Finding("error", problem) for problem in problems]
    if checkpoint is None or problems:
        return findings
    findings += [Finding("warning", warning) for warning in checkpoint.warnings]
    try:
        checkpoint = remap(checkpoint)
        describe(checkpoint)
    except CheckpointError as error:
        findings.append(Finding("error", str(error)))
    except RefusedError as error:
        findings.append(Finding("warning", str(error)))
    return findings + _check_embeddings(checkpoint)


def verify_checkpoint(path: str | Path) -> Checkpoint:
    """The opened checkpoint. Raises CheckpointError with the first error that `check_checkpoint` finds."""
    for finding in check_checkpoint(path):
        if finding.severity == "error":
            raise CheckpointError(finding.message)
    return Checkpoint.open(path)


def _check_embeddings(checkpoint: Checkpoint) -> list[Finding]:
    """The input embedding against the vocabulary, and the output head against `tie_word_embeddings`."""
    nested = checkpoint.config.get("text_config")
    text = nested if isinstance(nested, dict) else checkpoint.config
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
