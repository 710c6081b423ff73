"""The training loss: token-normalised cross-entropy and distillation, in chunks of tokens.

Every term is a sum over tokens. The division by the number of counted tokens of the whole step, over all micro-batches
and processes, happens in one place (train.py), so that the gradient does not depend on how the work is spread.

Shapes in one letter code: B rows, T tokens, N tokens of a chunk, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from headfold.uptrain.data import IGNORED, Batch
from headfold.uptrain.model import CausalModel
from headfold.uptrain.settings import Distillation

LOGITS_PER_CHUNK = 1 << 25
"""Elements (128 MiB in float32) of the largest logits tensor. A micro-batch beyond it is taken in chunks of tokens
whose logits are computed again in the backward pass."""


class LossSums(NamedTuple):
    """Sums over the counted tokens of a micro-batch, in nats."""

    loss: torch.Tensor
    """The one to differentiate: the two others mixed."""
    cross_entropy: torch.Tensor
    divergence: torch.Tensor
    """From the teacher, times temperature squared; 0 without a teacher."""


class Objective(nn.Module):
    """The student with its loss, as the one module that is wrapped for several processes."""

    def __init__(
        self,
        student: CausalModel,
        teacher: CausalModel | None = None,
        distillation: Distillation | None = None,
        *,
        logits_per_chunk: int = LOGITS_PER_CHUNK,
    ) -> None:
        super().__init__()
        assert (teacher is None) == (distillation is None)
        self.student = student
        # In a list, so that it is not a submodule: it has no gradients, and it is sharded on its own.
        self._teacher = [] if teacher is None else [teacher]
        self._distillation = distillation
        self._logits_per_chunk = logits_per_chunk

    def forward(self, batch: Batch, *, with_teacher: bool = True) -> LossSums:
        """The sums over a micro-batch. Without the teacher (in evaluations) `loss` is the cross-entropy."""
        hidden = self.student(batch.input_ids, batch.position_ids).flatten(0, 1)
        targets = None
        if self._teacher and with_teacher:
            with torch.no_grad():
                targets = self._teacher[0](batch.input_ids, batch.position_ids).flatten(0, 1)
        labels = batch.labels.flatten()
        size = max(1, self._logits_per_chunk // self.student.model.config.get_text_config().vocab_size)
        if len(labels) <= size:
            return self._chunk(hidden, targets, labels)
        chunks = [
            checkpoint(self._chunk, *parts, use_reentrant=False, preserve_rng_state=False)
            for parts in zip(
                hidden.split(size),
                targets.split(size) if targets is not None else [None] * -(-len(labels) // size),
                labels.split(size),
                strict=True,
            )
        ]
        return LossSums(*(torch.stack(sums).sum() for sums in zip(*chunks, strict=True)))

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor | None, labels: torch.Tensor) -> LossSums:
        """The sums over a chunk: hidden (N, E) of the student, targets (N, E) of the teacher, labels (N)."""
        logits = self.student.logits(hidden).float()
        cross_entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if targets is None or self._distillation is None:
            return LossSums(cross_entropy, cross_entropy.detach(), torch.zeros_like(cross_entropy).detach())
        with torch.no_grad():
            teacher_logits = self._teacher[0].logits(targets).float()
        divergence = forward_divergence(logits, teacher_logits, labels, self._distillation.temperature)
        weight = self._distillation.weight
        loss = divergence if weight == 1 else weight * divergence + (1 - weight) * cross_entropy
        return LossSums(loss, cross_entropy.detach(), divergence.detach())


def forward_divergence(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Sum over the counted tokens of temperature^2 * KL(teacher || student), logits (N, V) in float32, in nats.

    Both distributions are taken at `temperature`; its square keeps the size of the gradients (Hinton, Vinyals and
    Dean, "Distilling the Knowledge in a Neural Network", section 2).
    """
    student = F.log_softmax(logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    per_token = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return per_token.masked_fill(labels == IGNORED, 0.0).sum() * temperature**2
