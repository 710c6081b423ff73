"""Perplexity: the sum of log-likelihoods over the count of tokens, words or bytes, and what changed between models.

Shape letters: B windows, T tokens, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
import transformers

from headfold.convert.errors import HeadfoldError

from .corpus import ScoringPlan, Window
from .divergence import DivergenceMeter, log_softmax_chunks
from .schema import Interval, ModelPerplexity, Perplexity, PerplexityChange, TextPerplexity
from .stats import bootstrap, ratio_with_standard_error

MIN_DOCUMENTS_AS_UNITS = 30


@torch.inference_mode()
def score(
    models: Sequence[transformers.PreTrainedModel],
    names: Sequence[str],
    windows: Sequence[Window],
    *,
    batch_tokens: int,
    meters: Sequence[DivergenceMeter] = (),
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Log-likelihoods (models, windows) in nats: of each window's targets, summed, from a float32 log-softmax.

    Windows are batched by length and padded on the right, where causal attention cannot look, so the result does not
    depend on what shares a batch. `meters`, one per model after the first, also get each pair of logits. `names` are
    for messages. Raises HeadfoldError where a log-likelihood is not finite: that is a failed measurement, never a
    number.
    """
    device = next(models[0].parameters()).device
    result = np.zeros((len(models), len(windows)))
    num_done, num_total = 0, sum(len(window.targets) for window in windows)
    for batch in _batches(windows, batch_tokens):
        input_ids, targets, scored = _tensors([windows[index] for index in batch], device)
        reference: torch.Tensor | None = None
        for row, (model, name) in enumerate(zip(models, names, strict=True)):
            logits = model(input_ids=input_ids, use_cache=False).logits[scored]  # (N, V)
            per_token = torch.zeros(scored.shape, dtype=torch.float64, device=device)  # (B, T)
            per_token[scored] = _target_log_probabilities(logits, targets).double()
            sums = per_token.sum(1).cpu().numpy()
            if not np.isfinite(sums).all():
                bad = windows[batch[int(np.flatnonzero(~np.isfinite(sums))[0])]]
                raise HeadfoldError(
                    f"{name}: log-likelihood of document {bad.document + 1} is {sums[~np.isfinite(sums)][0]}: the "
                    "model's output is not finite. Try dtype float32; if that changes nothing, its weights are "
                    "damaged."
                )
            result[row, batch] = sums
            if not meters:
                continue
            if reference is None:
                reference = logits
                positions = scored.nonzero()[:, 1] + 1  # (N): tokens of context, the prefix included
                window_of_token = torch.tensor(batch, device=device)[scored.nonzero()[:, 0]]
            else:
                meters[row - 1].add(reference, logits, positions, window_of_token)
        num_done += len(targets)
        if progress is not None:
            progress(num_done, num_total)
    return result


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of windows of like length, as many at once as make batch_tokens with their padding, at least one."""
    order = sorted(range(len(windows)), key=lambda index: -len(windows[index].input_ids))
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // len(windows[order[start]].input_ids))
        yield order[start : start + size]
        start += size


def _tensors(batch: Sequence[Window], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input ids (B, T), targets (N) and which positions predict them, bool (B, T), in the same order."""
    length = max(len(window.input_ids) for window in batch)
    input_ids = torch.zeros(len(batch), length, dtype=torch.long)
    scored = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, window in enumerate(batch):
        end = len(window.input_ids)
        input_ids[row, :end] = torch.tensor(window.input_ids)
        scored[row, end - len(window.targets) : end] = True
    targets = torch.tensor([token for window in batch for token in window.targets])
    return input_ids.to(device), targets.to(device), scored.to(device)


def _target_log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(N) float32, from logits (N, V) of any dtype."""
    blocks = log_softmax_chunks(logits, targets[:, None])
    return torch.cat([block.float().log_softmax(-1).gather(1, ids)[:, 0] for block, ids in blocks])


def summary(role: str, log_likelihood: float, num_tokens: int, num_words: int, num_bytes: int) -> ModelPerplexity:
    """Perplexity per token, word and byte, and bits per byte, of one total log-likelihood in nats.

    Per word is None where it is beyond a float, as in text that has no spaces between words. Raises HeadfoldError where
    per token is: such a model is broken.
    """
    nats_per_token = -log_likelihood / num_tokens
    per_token, per_word = _exp(nats_per_token), _exp(-log_likelihood / num_words)
    if per_token is None:
        raise HeadfoldError(
            f"The {role} model's perplexity is beyond a float ({nats_per_token:.0f} nats per token): its output is "
            "broken."
        )
    return ModelPerplexity(
        role=role,
        log_likelihood=log_likelihood,
        per_token=per_token,
        per_word=per_word,
        per_byte=math.exp(-log_likelihood / num_bytes),
        bits_per_byte=-log_likelihood / num_bytes / math.log(2),
        nats_per_token=nats_per_token,
    )


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None


def compare(
    plan: ScoringPlan,
    roles: Sequence[str],
    log_likelihoods: np.ndarray,
    *,
    converted: int | None,
    bootstrap_samples: int,
    seed: int,
) -> tuple[Perplexity, Interval | None]:
    """The perplexity section of a report, and the share of the lost loss that was won back.

    log_likelihoods: (models, windows) in nats, the model before first, the one after last. converted: index of the
    converted model, None where it was not given. The share is (converted - after) / (converted - before) in nats per
    token, None unless all three are there and converting cost something.
    """
    texts = plan.corpus.texts
    tokens_of_window = np.array([len(window.targets) for window in plan.windows])
    num_tokens = int(tokens_of_window.sum())
    num_words, num_bytes = sum(text.num_words for text in texts), sum(text.num_bytes for text in texts)
    models = [
        summary(role, float(row.sum()), num_tokens, num_words, num_bytes)
        for role, row in zip(roles, log_likelihoods, strict=True)
    ]

    unit, unit_of_window = sampling_units(plan)
    tokens = np.bincount(unit_of_window, weights=tokens_of_window)
    losses = [np.bincount(unit_of_window, weights=-row) for row in log_likelihoods]  # nats, by unit
    resampling = {"num_samples": bootstrap_samples, "seed": seed}
    changes = []
    for role, loss in zip(roles[1:], losses[1:], strict=True):
        log_ratio, error = ratio_with_standard_error(loss - losses[0], tokens)
        ratio = bootstrap(
            np.stack([loss - losses[0], tokens], axis=1), lambda sums: np.exp(sums[:, 0] / sums[:, 1]), **resampling
        )
        changes.append(PerplexityChange(role=role, log_ratio=log_ratio, log_ratio_standard_error=error, ratio=ratio))

    recovered = None
    if converted is not None and converted != len(models) - 1 and losses[converted].sum() > losses[0].sum():
        recovered = bootstrap(
            np.stack([losses[0], losses[converted], losses[-1]], axis=1),
            lambda sums: (sums[:, 1] - sums[:, 2]) / (sums[:, 1] - sums[:, 0]),
            **resampling,
        )
    section = Perplexity(
        before=models[0].per_token,
        converted=None if converted is None else models[converted].per_token,
        after=models[-1].per_token,
        num_tokens=num_tokens,
        num_words=num_words,
        num_bytes=num_bytes,
        unit=unit,
        num_units=len(tokens),
        models=models,
        changes=changes,
        by_text=_by_text(plan, roles, log_likelihoods, tokens_of_window) if len(texts) > 1 else [],
    )
    return section, recovered


def _by_text(
    plan: ScoringPlan, roles: Sequence[str], log_likelihoods: np.ndarray, tokens_of_window: np.ndarray
) -> list[TextPerplexity]:
    source = np.array([plan.corpus.documents[window.document].source for window in plan.windows])
    return [
        TextPerplexity(
            name=text.name,
            per_token={
                role: math.exp(-row[source == index].sum() / tokens_of_window[source == index].sum())
                for role, row in zip(roles, log_likelihoods, strict=True)
            },
        )
        for index, text in enumerate(plan.corpus.texts)
        if (source == index).any()
    ]


def sampling_units(plan: ScoringPlan) -> tuple[Literal["document", "window"], np.ndarray]:
    """What is resampled for intervals, documents or, where they are few, windows; and the unit of each window."""
    if len(plan.corpus.documents) >= MIN_DOCUMENTS_AS_UNITS:
        _, unit_of_window = np.unique([window.document for window in plan.windows], return_inverse=True)
        return "document", unit_of_window
    return "window", np.arange(len(plan.windows))
