"""Ridge regression by normal equations, against dense solvers on small problems."""

import math

import pytest
import torch

from headfold.convert.least_squares import NormalEquations, solve_with_held_out


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("block", [2, 1000])
def test_normal_equations_solve_ridge_regression_towards_a_prior(monkeypatch, block):
    """Also where the matrices are larger than what is multiplied and solved at a time."""
    monkeypatch.setattr("headfold.convert.least_squares._GRAM_BLOCK", block)
    monkeypatch.setattr("headfold.convert.least_squares._ROWS", block)
    features, targets, prior = randn(50, 6, seed=0), randn(50, 3, seed=1), randn(3, 6, seed=2)
    equations = NormalEquations(6, 3)
    equations.add(features[:20].view(4, 5, 6), targets[:20].view(4, 5, 3))
    equations.add(features[20:], targets[20:])
    strength = 0.3
    ridge = math.sqrt(strength * features.square().sum(0).mean())
    stacked = torch.cat([features, ridge * torch.eye(6, dtype=torch.float64)])
    expected = torch.linalg.lstsq(stacked, torch.cat([targets, ridge * prior.T])).solution.T
    solved = equations.solve(prior, strength)
    assert torch.allclose(solved, expected, atol=1e-9)
    assert equations.error(solved) == pytest.approx((targets - features @ solved.T).square().sum().item(), rel=1e-9)
    assert torch.allclose(equations.solve(prior, 1e9), prior, atol=1e-6)


def test_normal_equations_without_any_signal_keep_the_prior():
    equations = NormalEquations(4, 2)
    equations.add(torch.zeros(3, 4), torch.zeros(3, 2))
    prior = randn(2, 4, seed=0).float()
    assert torch.allclose(equations.solve(prior, 1e-2), prior)


def test_normal_equations_whose_moments_are_rounded_below_zero_are_solved_all_the_same():
    features = randn(40, 1, seed=0) @ randn(1, 30, seed=1) + 1e-9 * randn(40, 30, seed=2)
    equations = NormalEquations(30, 2)
    equations.add(features.float(), randn(40, 2, seed=3).float())
    solved = equations.solve(torch.zeros(2, 30), 1e-12)
    assert solved.isfinite().all() and solved.abs().max() < 10


def ridge(features: torch.Tensor, targets: torch.Tensor, prior: torch.Tensor, strength: float) -> torch.Tensor:
    penalty = strength * features.square().sum(0).mean() * torch.eye(features.shape[1], dtype=torch.float64)
    return torch.linalg.solve(features.T @ features + penalty, features.T @ targets + penalty @ prior.T).T


def test_held_out_rows_choose_how_strongly_a_refit_is_drawn_to_its_prior():
    truth = randn(3, 20, seed=0)

    def rows(count: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, NormalEquations]:
        features = randn(count, 20, seed=seed)
        targets = features @ truth.T + noise * randn(count, 3, seed=seed + 1)
        equations = NormalEquations(20, 3)
        equations.add(features, targets)
        return features, targets, equations

    near = truth + 0.02 * randn(3, 20, seed=9)
    strengths = {}
    for case, prior, noise in (("good prior", near, 3.0), ("bad prior", torch.zeros_like(truth), 1e-3)):
        features, targets, fitted = rows(40, noise, 10)
        others, their_targets, held_out = rows(2000, noise, 20)
        solution, strengths[case] = solve_with_held_out(fitted, held_out, prior)
        errors = {
            strength: (their_targets - others @ ridge(features, targets, prior, strength).T).square().sum().item()
            for strength in (10 ** (half / 2) for half in range(-6, 5))
        }
        assert strengths[case] == min(errors, key=errors.__getitem__)
        everything = torch.cat([features, others]), torch.cat([targets, their_targets])
        assert torch.allclose(solution, ridge(*everything, prior, strengths[case]), atol=1e-9)
    assert strengths == {"good prior": 100.0, "bad prior": 1e-3}


def test_without_held_out_rows_the_strength_is_moderate():
    features, targets, prior = randn(50, 6, seed=0), randn(50, 3, seed=1), randn(3, 6, seed=2)
    fitted = NormalEquations(6, 3)
    fitted.add(features, targets)
    solution, strength = solve_with_held_out(fitted, NormalEquations(6, 3), prior)
    assert strength == 0.1 and torch.allclose(solution, ridge(features, targets, prior, 0.1), atol=1e-9)
