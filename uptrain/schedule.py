"""Learning rates as a function of tokens seen, so that they do not depend on the number of processes or the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0 to `peak`, then constant and linear decay to `final` (stable), or half a cosine to it."""

    kind: Literal["stable", "cosine"]
    peak: float
    final: float
    total_tokens: int
    warmup_tokens: float
    decay_tokens: float

    def learning_rate(self, tokens: float) -> float:
        """The learning rate after `tokens` tokens. Beyond `total_tokens` it stays at `final`."""
        if tokens < self.warmup_tokens:
            return self.peak * tokens / self.warmup_tokens
        length = self.decay_tokens if self.kind == "stable" else self.total_tokens - self.warmup_tokens
        left = max(0.0, self.total_tokens - tokens)
        if left >= length:
            return self.peak if tokens < self.total_tokens else self.final
        remaining = left / length
        if self.kind == "cosine":
            remaining = 0.5 * (1 - math.cos(math.pi * remaining))
        return self.final + (self.peak - self.final) * remaining
