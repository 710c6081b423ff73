"""One head in place of n: fold and aligned against optimisers, planted solutions and a written-out rotary.

Shapes in one letter code: n heads that are replaced, D head_dim, T tokens.
"""

import itertools

import pytest
import torch

from headfold.convert import merge
from headfold.convert.families import Rotary

ROTARIES = [
    Rotary("half", 12),
    Rotary("interleaved", 12),
    Rotary("half", 4),
    Rotary("interleaved", 8),
    Rotary("none"),
]
HEAD_DIM = 12
NAMES = [f"{rotary.kind}-{rotary.num_channels}" for rotary in ROTARIES]
each_rotary = pytest.mark.parametrize("rotary", ROTARIES, ids=NAMES)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_of(x: torch.Tensor) -> torch.Tensor:
    """E[x x^T] over tokens of stacked heads (T, n, D)."""
    flat = x.flatten(1)
    return flat.T @ flat / len(flat)


def metric_of(num_heads: int, size: int = HEAD_DIM, seed: int = 9) -> torch.Tensor:
    half = randn(num_heads, size, size + 3, seed=seed)
    return half @ half.mT


def rotate(x: torch.Tensor, position: float, rotary: Rotary) -> torch.Tensor:
    """Rotary on (..., D), written out pair by pair."""
    out = x.clone()
    num_pairs = rotary.num_channels // 2
    for pair in range(num_pairs):
        a, b = (pair, pair + num_pairs) if rotary.kind == "half" else (2 * pair, 2 * pair + 1)
        angle = torch.tensor(position / 10 ** (pair / max(1, num_pairs)), dtype=x.dtype)
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return out


def restored(x: torch.Tensor, shared: merge.SharedHead) -> torch.Tensor:
    """Old heads (T, n, D) through the shared head and back."""
    return (x.flatten(1) @ shared.encode.T @ shared.decode.T).view_as(x)


def error(x: torch.Tensor, back: torch.Tensor, metric: torch.Tensor) -> float:
    """E[(x - back)^T metric (x - back)] summed over heads."""
    return torch.einsum("tnd,nde,tne->t", x - back, metric, x - back).mean().item()


def correlated_heads(num_heads: int, num_tokens: int = 60, seed: int = 0) -> torch.Tensor:
    common = randn(num_tokens, 1, 5 * HEAD_DIM, seed=seed)
    mixed = torch.einsum(
        "tnc,ndc->tnd", common.expand(-1, num_heads, -1), randn(num_heads, HEAD_DIM, 5 * HEAD_DIM, seed=seed + 1)
    )
    return mixed + randn(num_tokens, num_heads, HEAD_DIM, seed=seed + 2) + randn(1, num_heads, HEAD_DIM, seed=seed + 3)


def lowest_by_optimiser(loss, starts: list[torch.Tensor]) -> float:
    """The lowest loss(*parameters) that a general optimiser reaches from a start."""
    parameters = [start.clone().requires_grad_() for start in starts]
    optimiser = torch.optim.LBFGS(parameters, max_iter=150, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        value = loss(*parameters)
        value.backward()
        return value

    optimiser.step(closure)
    return loss(*parameters).item()


def near(x: torch.Tensor, seed: int) -> torch.Tensor:
    return x + 0.3 * x.pow(2).mean().sqrt() * randn(*x.shape, seed=seed)


@pytest.mark.parametrize("num_heads", [2, 3])
def test_fold_of_values_loses_the_dropped_eigenvalues_and_an_optimiser_finds_nothing_lower(num_heads):
    x, metric = correlated_heads(num_heads), metric_of(num_heads)
    shared = merge.fold_values(gram_of(x), metric)
    lost = error(x, restored(x, shared), metric)

    weighted = torch.einsum("nde,tne->tnd", torch.linalg.cholesky(metric).mT, x)
    values = torch.linalg.svdvals(weighted.flatten(1)) ** 2 / len(x)
    assert lost == pytest.approx(values[HEAD_DIM:].sum().item(), rel=1e-9)
    assert shared.kept(gram_of(x), metric) == pytest.approx(1 - lost / values.sum().item(), rel=1e-9)

    flat, block = x.flatten(1), torch.block_diag(*metric)

    def loss(encode, decode):
        difference = flat - flat @ encode.T @ decode.T
        return (difference @ block * difference).sum(1).mean()

    found = lowest_by_optimiser(loss, [near(shared.encode, 4), near(shared.decode, 5)])
    assert lost * (1 - 1e-9) <= found <= lost * 1.001
    elsewhere = [randn(*shared.encode.shape, seed=6), randn(*shared.decode.shape, seed=7)]
    assert lowest_by_optimiser(loss, elsewhere) >= lost * (1 - 1e-9)


@each_rotary
def test_fold_of_keys_loses_least_of_all_that_rotary_allows(rotary):
    num_heads = 3
    x = correlated_heads(num_heads)
    metric = merge.key_metric(metric_of(num_heads), rotary)
    shared = merge.fold_keys(gram_of(x), metric, rotary)
    lost = error(x, restored(x, shared), metric)

    # All maps that rotary commutes with: a complex number per pair and head, any matrix on the channels it leaves.
    basis = torch.stack(list(commuting_matrices(rotary)))

    def loss(encoders, decoders):
        key = torch.einsum("nb,bde,tne->td", encoders, basis, x)
        difference = x - torch.einsum("nb,bde,te->tnd", decoders, basis, key)
        return torch.einsum("tnd,nde,tne->t", difference, metric, difference).mean()

    norms = basis.flatten(1).pow(2).sum(1)
    encoders = torch.einsum("dne,bde->nb", shared.encode.view(HEAD_DIM, num_heads, HEAD_DIM), basis) / norms
    decoders = torch.einsum("nde,bde->nb", shared.decode.view(num_heads, HEAD_DIM, HEAD_DIM), basis) / norms
    assert loss(encoders, decoders).item() == pytest.approx(lost, rel=1e-9)
    found = lowest_by_optimiser(loss, [near(encoders, 4), near(decoders, 5)])
    assert lost * (1 - 1e-9) <= found <= lost * 1.001
    elsewhere = [randn(*encoders.shape, seed=6), randn(*decoders.shape, seed=7)]
    assert lowest_by_optimiser(loss, elsewhere) >= lost * (1 - 1e-9)


def commuting_matrices(rotary: Rotary):
    """A basis of the (D, D) matrices that rotary commutes with."""
    num_pairs = rotary.num_channels // 2
    for pair in range(num_pairs):
        a, b = (pair, pair + num_pairs) if rotary.kind == "half" else (2 * pair, 2 * pair + 1)
        for numbers in ([1.0, 0.0, 0.0, 1.0], [0.0, -1.0, 1.0, 0.0]):
            matrix = torch.zeros(HEAD_DIM, HEAD_DIM, dtype=torch.float64)
            matrix[[a, a, b, b], [a, b, a, b]] = torch.tensor(numbers, dtype=torch.float64)
            yield matrix
    for row, column in itertools.product(range(rotary.num_channels, HEAD_DIM), repeat=2):
        matrix = torch.zeros(HEAD_DIM, HEAD_DIM, dtype=torch.float64)
        matrix[row, column] = 1
        yield matrix


@each_rotary
@pytest.mark.parametrize("method", ["fold", "aligned"])
def test_key_maps_commute_with_rotary(rotary, method):
    num_heads = 3
    x = correlated_heads(num_heads)
    if method == "fold":
        shared = merge.fold_keys(gram_of(x), merge.key_metric(metric_of(num_heads), rotary), rotary)
    else:
        shared = merge.align_keys(gram_of(x), num_heads, rotary)
    turned = rotate(x, 1.7, rotary)
    assert torch.allclose(restored(turned, shared), rotate(restored(x, shared), 1.7, rotary), atol=1e-9)


@each_rotary
def test_planted_keys_give_the_old_logits(rotary):
    """Every head is one key under its own invariance; the queries hold the inverse. GQA input: 2 queries a head."""
    num_heads, head_dim = 3, HEAD_DIM
    key, queries = randn(300, head_dim, seed=1) + randn(head_dim, seed=2), randn(300, num_heads, 2, head_dim, seed=3)
    basis = torch.stack(list(commuting_matrices(rotary)))
    turns = torch.einsum("nb,bde->nde", randn(num_heads, len(basis), seed=5), basis)
    keys = torch.einsum("nde,te->tnd", turns, key)
    moved = torch.einsum("nde,tnqd->tnqe", torch.linalg.inv(turns), queries)

    query_gram = torch.einsum("tnqd,tnqe->nde", moved, moved) / len(moved)
    metric = merge.key_metric(query_gram, rotary)
    shared = merge.fold_keys(gram_of(keys), metric, rotary)
    assert shared.kept(gram_of(keys), metric) == pytest.approx(1, abs=1e-9)
    new_key = keys.flatten(1) @ shared.encode.T
    new_queries = torch.einsum("nde,tnqd->tnqe", shared.decode.view(num_heads, head_dim, head_dim), moved)
    old = torch.einsum("tnqd,snd->nqts", rotate(moved, 3.0, rotary), rotate(keys, 1.0, rotary))
    new = torch.einsum("tnqd,sd->nqts", rotate(new_queries, 3.0, rotary), rotate(new_key, 1.0, rotary))
    assert torch.allclose(old, new, atol=1e-8 * old.abs().max().item())
    assert new_key.pow(2).mean().item() == pytest.approx(keys.pow(2).mean().item(), rel=1e-6)


def test_planted_values_are_restored():
    num_heads = 3
    value = randn(300, HEAD_DIM, seed=1) + randn(HEAD_DIM, seed=2)
    mixes = randn(num_heads, HEAD_DIM, HEAD_DIM, seed=3)
    values = torch.einsum("nde,te->tnd", mixes, value)
    output = torch.linalg.inv(mixes).mT  # what reads head h undoes its mix
    shared = merge.fold_values(gram_of(values), output @ output.mT)
    assert torch.allclose(restored(values, shared), values, atol=1e-8)
    new = values.flatten(1) @ shared.encode.T
    assert new.pow(2).mean().item() == pytest.approx(values.pow(2).mean().item(), rel=1e-9)


def test_values_that_nobody_reads_do_not_matter_and_do_not_break():
    num_heads = 2
    x, metric = correlated_heads(num_heads), metric_of(num_heads)
    metric[1] = 0
    shared = merge.fold_values(gram_of(x), metric)
    assert shared.encode.isfinite().all() and shared.decode.isfinite().all()
    assert error(x, restored(x, shared), metric) < 1e-9
    nothing = merge.fold_values(torch.zeros(24, 24), torch.zeros(2, 12, 12))
    assert nothing.encode.isfinite().all() and nothing.decode.isfinite().all()


@each_rotary
def test_dead_pairs_are_not_divided_by_zero(rotary):
    num_heads = 2
    x = correlated_heads(num_heads)
    x[..., 0] = x[..., HEAD_DIM // 2] = x[..., 1] = 0
    query_gram = metric_of(num_heads)
    query_gram[:, :2] = query_gram[:, :, :2] = 0
    for gram, metric in ((gram_of(x), merge.key_metric(query_gram, rotary)), (gram_of(x) * 0, query_gram * 0)):
        for shared in (merge.fold_keys(gram, metric, rotary), merge.align_keys(gram, num_heads, rotary)):
            assert shared.encode.isfinite().all() and shared.decode.isfinite().all()


def test_aligned_values_are_orthogonal_and_undo_planted_rotations():
    num_heads = 4
    turns = torch.linalg.qr(randn(num_heads, HEAD_DIM, HEAD_DIM, seed=3)).Q
    values = torch.einsum("nde,te->tnd", turns, randn(300, HEAD_DIM, seed=1) + 1)
    shared = merge.align_values(gram_of(values), num_heads)
    decode = shared.decode.view(num_heads, HEAD_DIM, HEAD_DIM)
    assert torch.allclose(decode @ decode.mT, torch.eye(HEAD_DIM, dtype=torch.float64).expand_as(decode), atol=1e-9)
    assert torch.allclose(restored(values, shared), values, atol=1e-6)


def test_no_rotation_of_one_head_brings_aligned_values_closer():
    num_heads = 3
    x = correlated_heads(num_heads)
    shared = merge.align_values(gram_of(x), num_heads)
    turned = torch.einsum("nde,tnd->tne", shared.decode.view(num_heads, HEAD_DIM, HEAD_DIM), x)
    energy = turned.sum(1).pow(2).mean()
    for head in range(num_heads):
        for seed in range(5):
            skew = randn(HEAD_DIM, HEAD_DIM, seed=seed)
            other = turned.clone()
            other[:, head] = turned[:, head] @ torch.matrix_exp(0.01 * (skew - skew.T))
            assert other.sum(1).pow(2).mean() < energy
    identity = torch.eye(HEAD_DIM, dtype=torch.float64)
    plain_mean = merge.SharedHead(identity.repeat(1, num_heads) / num_heads, identity.repeat(num_heads, 1))
    metric = identity.expand(num_heads, -1, -1)
    assert shared.kept(gram_of(x), metric) > plain_mean.kept(gram_of(x), metric)


@each_rotary
def test_aligned_keys_are_phases_and_have_the_mean_norm(rotary):
    num_heads = 3
    x = correlated_heads(num_heads)
    shared = merge.align_keys(gram_of(x), num_heads, rotary)
    decode = shared.decode.view(num_heads, HEAD_DIM, HEAD_DIM)
    assert torch.allclose(decode @ decode.mT, torch.eye(HEAD_DIM, dtype=torch.float64).expand_as(decode), atol=1e-9)
    key = x.flatten(1) @ shared.encode.T
    assert key.pow(2).mean().item() == pytest.approx(x.pow(2).mean().item(), rel=1e-9)
