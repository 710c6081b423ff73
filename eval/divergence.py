"""How far a model's next-token distributions are from the MHA model's, token by token.

KL divergence sees what perplexity cannot: a model may give the right tokens the same probability on average and still
behave differently. Reported as llama.cpp reports it for quantisation: mean, median, 99.9th percentile, and the share of
tokens at which both models would pick the same one.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from .schema import Divergence, PositionBin
from .stats import quantile, ratio_with_standard_error

_CHUNK_ENTRIES = 1 << 22  # log-probabilities per chunk and model: small enough for a CPU's cache to matter
NUM_POSITION_BINS = 24


def log_softmax_chunks(*logits: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Splits logits (N, V) of several models into the same row blocks, so that float32 copies stay small."""
    rows = max(1, _CHUNK_ENTRIES // logits[0].shape[-1])
    return list(zip(*(tensor.split(rows) for tensor in logits), strict=True))


class DivergenceMeter:
    """Collects KL(reference || model), in nats, and top-token agreement over the batches of a text."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._agree: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self._windows: list[torch.Tensor] = []

    def add(
        self, reference: torch.Tensor, logits: torch.Tensor, positions: torch.Tensor, windows: torch.Tensor
    ) -> None:
        """Logits (N, V) of both models; positions (N): tokens of context; windows (N): the window of each token."""
        for p_logits, q_logits in log_softmax_chunks(reference, logits):
            log_p = p_logits.float().log_softmax(-1)
            log_q = q_logits.float().log_softmax(-1)
            self._agree.append((log_p.argmax(-1) == log_q.argmax(-1)).cpu())
            # Rounding can leave a sum of near-zero terms just below zero, where KL cannot be.
            self._kl.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).cpu())
        self._positions.append(positions.cpu())
        self._windows.append(windows.cpu())

    def result(self, role: str, units: np.ndarray) -> Divergence:
        """units: (number of windows,), the unit of sampling that each window belongs to, for the standard error."""
        kl = torch.cat(self._kl).double().numpy()
        positions = torch.cat(self._positions).numpy()
        unit_of_token = units[torch.cat(self._windows).numpy()]
        counts = np.bincount(unit_of_token)
        sums = np.bincount(unit_of_token, weights=kl)
        mean, error = ratio_with_standard_error(sums[counts > 0], counts[counts > 0])
        return Divergence(
            role=role,
            mean_kl=mean,
            mean_kl_standard_error=error,
            median_kl=quantile(kl, 0.5),
            p999_kl=quantile(kl, 0.999),
            top_token_agreement=torch.cat(self._agree).double().mean().item(),
            num_tokens=len(kl),
            by_position=_by_position(kl, positions),
        )


def _by_position(kl: np.ndarray, positions: np.ndarray) -> list[PositionBin]:
    """Mean KL in bins of equal width, the last one cut at the longest context."""
    longest = int(positions.max())
    width = -(-longest // NUM_POSITION_BINS)
    bins = (positions - 1) // width
    counts = np.bincount(bins)
    sums = np.bincount(bins, weights=kl)
    return [
        PositionBin(
            first=int(index * width + 1),
            last=int(min((index + 1) * width, longest)),
            mean_kl=float(sums[index] / counts[index]),
            num_tokens=int(counts[index]),
        )
        for index in range(len(counts))
        if counts[index]
    ]
