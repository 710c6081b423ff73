"""Settings and the schedule that follows from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from headfold.uptrain.schedule import Schedule
from headfold.uptrain.settings import UptrainSettings


def make(**values: Any) -> UptrainSettings:
    return UptrainSettings.model_validate(
        {"data": ["a.txt"], "sequence_length": 512, "batch_rows": 8, "share": 0.05, "pretraining_tokens": 12_000_000}
        | values
    )


def test_a_share_of_the_pretraining_tokens_is_rounded_up_to_whole_steps():
    settings = make()
    assert settings.tokens_per_step == 4096
    assert settings.num_steps == math.ceil(600_000 / 4096) == 147
    assert settings.total_tokens == 147 * 4096


def test_stretches_up_to_one_are_shares_and_above_tokens():
    settings = make(share=None, tokens=409_600)
    assert settings.in_tokens(0.25) == 102_400
    assert settings.in_tokens(1) == 409_600
    assert settings.in_tokens(5000) == 5000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokens": 100}, "once"),
        ({"share": None}, "once"),
        ({"pretraining_tokens": None}, "pretraining_tokens"),
        ({"warmup": 0.6, "decay": 0.6}, "do not fit"),
        ({"warmup": 700_000}, "do not fit"),
        ({"data": []}, "data"),
        ({"learning_rates": 1e-3}, "learning_rates"),
        ({"mixed_precision": "fp16"}, "mixed_precision"),
        ({"distillation": {"weight": 0}}, "weight"),
        ({"eval_interval": 0}, "eval_interval"),
    ],
)
def test_contradictions_and_unknown_keys_are_refused(values: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        make(**values)


def test_every_setting_says_what_it_is_and_its_default():
    for name, field in UptrainSettings.model_fields.items():
        assert field.description, name
        assert field.is_required() or "Default:" in field.description, name


STABLE = Schedule("stable", peak=1.0, final=0.1, total_tokens=1000, warmup_tokens=100, decay_tokens=200)
COSINE = Schedule("cosine", peak=1.0, final=0.1, total_tokens=1000, warmup_tokens=100, decay_tokens=0)


@pytest.mark.parametrize(
    ("schedule", "tokens", "rate"),
    [
        *[(STABLE, 0, 0), (STABLE, 50, 0.5), (STABLE, 100, 1), (STABLE, 799, 1), (STABLE, 900, 0.55)],
        *[(STABLE, 1000, 0.1), (STABLE, 5000, 0.1)],
        *[(COSINE, 0, 0), (COSINE, 100, 1), (COSINE, 550, 0.55), (COSINE, 1000, 0.1), (COSINE, 5000, 0.1)],
        (COSINE, 325, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))),
    ],
)
def test_learning_rate_at_given_tokens(schedule: Schedule, tokens: float, rate: float):
    assert schedule.learning_rate(tokens) == pytest.approx(rate)


def test_a_schedule_without_decay_or_warmup_is_constant():
    schedule = Schedule("stable", peak=1.0, final=0.0, total_tokens=100, warmup_tokens=0, decay_tokens=0)
    assert [schedule.learning_rate(tokens) for tokens in (0, 50, 99)] == [1, 1, 1]


def test_b2_learning_rate_at_a_token_does_not_depend_on_how_the_batch_is_spread():
    """The schedule knows tokens only: twice the rows in half the steps gives the same rate after the same tokens."""
    budget = {"share": None, "tokens": 150 * 4096}
    small, large = (make(batch_rows=rows, **budget).learning_rate_schedule() for rows in (2, 30))
    assert all(small.learning_rate(tokens) == large.learning_rate(tokens) for tokens in range(0, 620_000, 7_001))
    free = {"num_processes": 4, "micro_batch_rows": 2, "shard": True}
    assert make(**free).learning_rate_schedule() == make().learning_rate_schedule()
    assert make(**free).decisive() == make().decisive()
    assert make(seed=1).decisive() != make().decisive()
