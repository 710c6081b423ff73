"""KL divergence and top-token agreement against float64 definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from headfold.eval import divergence
from headfold.eval.corpus import Corpus, Document, windows
from headfold.eval.divergence import DivergenceMeter
from headfold.eval.perplexity import score

from .conftest import make_model


def random_logits(num_tokens: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(num_tokens, 50, generator=torch.Generator().manual_seed(seed))


def measured(reference: torch.Tensor, logits: torch.Tensor, block: int = 7):
    meter = DivergenceMeter()
    positions, index = torch.arange(len(logits)) + 1, torch.arange(len(logits)) // 10
    for start in range(0, len(logits), block):
        part = slice(start, start + block)
        meter.add(reference[part], logits[part], positions[part], index[part])
    return meter.result("after", np.arange(len(logits) // 10 + 1))


def test_kl_is_the_expected_log_ratio_under_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_CHUNK_ENTRIES", 150)  # three rows at a time
    p, q = random_logits(200, 0), random_logits(200, 1)
    result = measured(p, q)
    p64, q64 = torch.distributions.Categorical(logits=p.double()), torch.distributions.Categorical(logits=q.double())
    kl = torch.distributions.kl_divergence(p64, q64).numpy()
    assert result.mean_kl == pytest.approx(kl.mean(), rel=1e-5)
    assert result.median_kl == pytest.approx(np.median(kl), rel=1e-5)
    assert result.p999_kl == pytest.approx(np.quantile(kl, 0.999), rel=1e-5)
    assert result.top_token_agreement == pytest.approx((p.argmax(1) == q.argmax(1)).double().mean().item())
    assert result.num_tokens == 200
    by_window = kl.reshape(20, 10).mean(1)
    assert result.mean_kl_standard_error == pytest.approx(by_window.std(ddof=1) / np.sqrt(20), rel=1e-4)


def test_direction() -> None:
    """KL(P || Q) is large where Q is surprised by what P says, not the other way round."""
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -20.0]])
    one = torch.ones(1, dtype=torch.long)
    forward, backward = DivergenceMeter(), DivergenceMeter()
    forward.add(p, q, one, 0 * one)
    backward.add(q, p, one, 0 * one)
    assert forward.result("after", np.zeros(1, int)).mean_kl == pytest.approx(-np.log(2) + 10, rel=1e-4)
    assert backward.result("after", np.zeros(1, int)).mean_kl == pytest.approx(np.log(2), rel=1e-4)


def test_a_model_does_not_diverge_from_itself() -> None:
    logits = random_logits(64, 0).bfloat16()
    result = measured(logits, logits.clone())
    assert (result.mean_kl, result.p999_kl, result.top_token_agreement) == (0.0, 0.0, 1.0)


def test_bins_by_position_hold_every_token_once() -> None:
    p, q = random_logits(100, 0), random_logits(100, 1)
    result = measured(p, q)
    assert sum(bin.num_tokens for bin in result.by_position) == 100
    edges = [(bin.first, bin.last) for bin in result.by_position]
    assert edges[0][0] == 1 and edges[-1][1] == 100
    assert all(a[1] + 1 == b[0] for a, b in pairwise(edges))
    total = sum(bin.mean_kl * bin.num_tokens for bin in result.by_position)
    assert total / 100 == pytest.approx(result.mean_kl)


def test_meters_see_the_scored_tokens_of_both_models() -> None:
    """Through `score`, with padding and overlapping windows: as if each token were looked at alone."""
    before, after = make_model(4, seed=0), make_model(2, seed=1)
    documents = [Document(0, list(range(2, 2 + length))) for length in (5, 30, 41)]
    cut = list(windows(Corpus(documents, [], 0, "<s>", ""), window=16, stride=6, bos="document"))
    meter = DivergenceMeter()
    score([before, after], ["a", "b"], cut, batch_tokens=64, meters=[meter])
    result = meter.result("after", np.arange(len(cut)))
    kl = []
    for window in cut:
        ids = torch.tensor([window.input_ids])
        with torch.no_grad():
            logits = [model(ids).logits[0, -len(window.targets) :].double() for model in (before, after)]
        p, q = (torch.distributions.Categorical(logits=each) for each in logits)
        kl += torch.distributions.kl_divergence(p, q).tolist()
    assert result.num_tokens == len(kl) == 76
    assert result.mean_kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert result.by_position[-1].last == 16
