"""Refits of queries and keys are least squares: against autograd on small problems."""

import pytest
import torch

from headfold.convert.families import Rotary
from headfold.convert.logits import (
    LogitSample,
    conjugate_gradients,
    refit_logits,
    rotate,
)
from headfold.convert.weights import AttentionWeights

W, T, S, H, N, D, E = 5, 14, 6, 4, 2, 6, 10
ROTARIES = [Rotary("half", 6), Rotary("interleaved", 6), Rotary("half", 4), Rotary("interleaved", 2), Rotary("none")]
each_rotary = pytest.mark.parametrize("rotary", ROTARIES, ids=lambda r: f"{r.kind}-{r.num_channels}")


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_conjugate_gradients_solve_every_matrix_of_a_batch():
    half = randn(3, 20, 20, seed=0)
    systems = half @ half.mT + 0.1 * torch.eye(20, dtype=torch.float64)
    target = randn(3, 4, 5, seed=1)
    target[1] = 0
    solution = conjugate_gradients(
        lambda x: (systems @ x.flatten(1)[:, :, None]).view_as(x), target, lambda rest: rest, num_iterations=200
    )
    expected = torch.linalg.solve(systems, target.flatten(1)[:, :, None]).view_as(target)
    assert torch.allclose(solution, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
    assert not solution[1].any()


def sample_and_weights(rotary: Rotary, has_bias: bool) -> tuple[LogitSample, AttentionWeights]:
    inputs = randn(W, T, E, seed=0)
    positions = torch.stack([torch.randperm(T, generator=torch.Generator().manual_seed(w))[:S] for w in range(W)])
    num_pairs = rotary.num_channels // 2
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(num_pairs, dtype=torch.float64)
    rotation = torch.polar(torch.ones_like(angles), angles)
    products = 3 * randn(W, H, S, T, seed=1)
    blind = torch.arange(T) > positions[:, None, :, None]
    sample = LogitSample(inputs, positions, products.masked_fill(blind, -torch.inf), rotation, rotary, 0.5)
    weights = AttentionWeights(
        q=randn(H, D, E, seed=2),
        k=randn(N, D, E, seed=3),
        v=randn(N, D, E, seed=4),
        o=randn(E, H, D, seed=5),
        q_bias=randn(H, D, seed=6) if has_bias else None,
        k_bias=randn(N, D, seed=7) if has_bias else None,
    )
    return sample, weights


def mean_error(sample: LogitSample, q, k, q_bias, k_bias) -> torch.Tensor:
    """The mean squared error of the logits that refit_logits reports, written out query by query."""
    total = torch.zeros((), dtype=torch.float64)
    for window in range(W):
        for head in range(H):
            keys = sample.inputs[window] @ k[head // (H // N)].T + k_bias[head // (H // N)]
            keys = rotate(keys, sample.rotation, sample.rotary)
            for number, at in enumerate(sample.positions[window].tolist()):
                query = q[head] @ sample.inputs[window, at] + q_bias[head]
                query = rotate(query[None], sample.rotation[at : at + 1], sample.rotary)[0]
                target = sample.products[window, head, number, : at + 1]
                weight = 0.75 * (target * sample.scaling).softmax(0) + 0.25 / (at + 1)
                difference = keys[: at + 1] @ query - target
                difference = difference - (weight * difference).sum()
                total = total + (weight * difference.square()).sum()
    return total * sample.scaling**2 / (W * H * S)


def error_of(sample: LogitSample, weights: AttentionWeights) -> float:
    zeros = torch.zeros(H, D, dtype=torch.float64)
    q_bias = zeros if weights.q_bias is None else weights.q_bias
    k_bias = zeros[:N] if weights.k_bias is None else weights.k_bias
    return mean_error(sample, weights.q, weights.k, q_bias, k_bias).item()


@each_rotary
@pytest.mark.parametrize("has_bias", [False, True])
def test_refits_report_the_error_that_is_there_and_lower_it(rotary, has_bias):
    sample, weights = sample_and_weights(rotary, has_bias)
    once, before, after = refit_logits(sample, weights, num_sweeps=1, strength=1e-4, num_iterations=50)
    _, _, more = refit_logits(sample, weights, num_sweeps=3, strength=1e-4, num_iterations=50)
    assert before == pytest.approx(error_of(sample, weights), rel=1e-6)
    assert after == pytest.approx(error_of(sample, once), rel=1e-6)
    assert more < after < before
    assert torch.equal(once.v, weights.v) and torch.equal(once.o, weights.o)


def test_windows_one_at_a_time_give_what_all_at_once_give(monkeypatch):
    sample, weights = sample_and_weights(Rotary("half", D), True)
    whole, *errors = refit_logits(sample, weights, num_sweeps=2, strength=1e-2, num_iterations=8)
    monkeypatch.setattr("headfold.convert.logits._CHUNK_LOGITS", 1)
    parts, *errors_of_parts = refit_logits(sample, weights, num_sweeps=2, strength=1e-2, num_iterations=8)
    assert errors == pytest.approx(errors_of_parts, rel=1e-9)
    for one, two in ((whole.q, parts.q), (whole.k, parts.k), (whole.q_bias, parts.q_bias)):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-9)


@each_rotary
def test_refitted_keys_are_at_the_bottom_of_the_quadratic(rotary):
    """After the last refit, which is that of the keys, nothing that moves them lowers the error."""
    sample, weights = sample_and_weights(rotary, True)
    done, _, _ = refit_logits(sample, weights, num_sweeps=1, strength=1e-9, num_iterations=400)
    k, k_bias = done.k.clone().requires_grad_(), done.k_bias.clone().requires_grad_()
    mean_error(sample, done.q, k, done.q_bias, k_bias).backward()
    start, start_bias = weights.k.clone().requires_grad_(), weights.k_bias.clone().requires_grad_()
    mean_error(sample, done.q, start, done.q_bias, start_bias).backward()
    assert k.grad.norm() < 1e-2 * start.grad.norm()
    # Without rotary a bias of the keys adds the same to all logits of a query: softmax, and so the error, ignores it.
    assert k_bias.grad.norm() < 1e-2 * start_bias.grad.norm() + 1e-12


@each_rotary
def test_given_logits_that_can_be_matched_the_refit_matches_them(rotary):
    """Targets that come from other queries of the same span: one sweep finds them again."""
    sample, weights = sample_and_weights(rotary, False)
    keys = [
        rotate(sample.inputs[w] @ weights.k.mT, sample.rotation, rotary).repeat_interleave(H // N, 0) for w in range(W)
    ]
    maps = torch.eye(D, dtype=torch.float64) + 0.3 * randn(H, D, D, seed=8)
    for window in range(W):
        at = sample.positions[window]
        queries = rotate(sample.inputs[window, at] @ (maps @ weights.q).mT, sample.rotation[at], rotary)
        products = queries @ keys[window].mT
        sample.products[window] = products.masked_fill(~sample.products[window].isfinite(), -torch.inf)
    _, before, after = refit_logits(sample, weights, num_sweeps=2, strength=1e-9, num_iterations=200)
    assert after < 1e-4 * before
