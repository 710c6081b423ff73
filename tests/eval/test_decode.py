"""Decode measurements: what is timed and what is not, and the memory of the real cache."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.eval import decode, engines
from headfold.eval.engines import Run, TransformersEngine, cache_shape, preallocated_cache, step
from headfold.eval.settings import DecodeSettings
from headfold.kernels import kv_cache_bytes

from .conftest import make_model


def ignore(done: int, total: int) -> None:
    pass


def points(settings: DecodeSettings, contexts: list[int], models: Any = None):
    both = [TransformersEngine(model) for model in models or (make_model(4), make_model(1))]
    return decode.measure_points(both, settings, contexts, seed=0, progress=ignore)


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_those_of_the_formula(num_key_value_heads: int, dtype: torch.dtype) -> None:
    model = make_model(num_key_value_heads).to(dtype)
    run = TransformersEngine(model).run(torch.ones(3, 10, dtype=torch.long), 4)
    assert run.cache_bytes == kv_cache_bytes(
        num_layers=2,
        num_key_value_heads=num_key_value_heads,
        head_dim=12,
        num_tokens=14,
        cache_dtype=dtype,
        num_sequences=3,
    )
    shape = cache_shape(model, 16)
    assert (shape.num_layers, shape.num_key_value_heads, shape.head_dim) == (2, num_key_value_heads, 12)
    assert shape.entries_per_token == 2 * 2 * num_key_value_heads * 12


def test_cache_bytes_of_layers_with_a_window() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=6,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    run = TransformersEngine(model).run(torch.ones(2, 10, dtype=torch.long), 4)
    expected = kv_cache_bytes(
        num_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        num_tokens=14,
        cache_dtype="float32",
        num_sequences=2,
        sliding_windows=[6, 6],
    )
    assert (
        run.cache_bytes
        == expected
        < kv_cache_bytes(
            num_layers=2, num_key_value_heads=2, head_dim=8, num_tokens=14, cache_dtype="float32", num_sequences=2
        )
    )


def test_steps_over_the_preallocated_cache_give_the_models_own_tokens() -> None:
    model = make_model(2)
    prompt = torch.randint(2, 320, (3, 9), generator=torch.Generator().manual_seed(0))
    cache = preallocated_cache(model, 3, 16)
    fed, tokens = prompt, prompt
    with torch.inference_mode():
        for _ in range(6):
            fed = step(model, fed, cache)
            expected = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            assert torch.equal(fed, expected)
            tokens = torch.cat([tokens, fed], dim=1)


def test_c8_what_the_clock_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is synchronised around prefill and each step; allocation and warm-up are outside; models alternate."""
    events: list[str] = []
    ticks = itertools.count()
    models = [make_model(4), make_model(1)]
    name = {id(models[0]): "before", id(models[1]): "after"}
    real_step, real_cache = engines.step, engines.preallocated_cache

    def clock(device: torch.device) -> float:
        events.append("clock")
        return float(next(ticks))

    def watched_step(model: Any, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        events.append(f"{name[id(model)]} {input_ids.shape[1]}")
        return real_step(model, input_ids, cache)

    def cache(*arguments: Any) -> Any:
        with monkeypatch.context() as unwatched:
            unwatched.setattr(engines, "step", real_step)
            events.append("allocate")
            return real_cache(*arguments)

    monkeypatch.setattr(engines, "clock", clock)
    monkeypatch.setattr(engines, "step", watched_step)
    monkeypatch.setattr(engines, "preallocated_cache", cache)
    (point,) = points(DecodeSettings(batches=[2], contexts=[5], new_tokens=2, repetitions=2), [5], models)

    def run(which: str, num_steps: int) -> list[str]:
        return ["allocate", "clock", f"{which} 5", "clock", *[f"{which} 1", "clock"] * num_steps]

    warmup = run("before", decode.WARMUP_STEPS) + run("after", decode.WARMUP_STEPS)
    turns = run("before", 2) + run("after", 2) + run("after", 2) + run("before", 2)
    assert events == warmup + turns
    # The fake clock moves by one at each look.
    assert point.before.time_to_first_token_s == 1.0
    assert point.before.time_per_output_token_s.model_dump() == {"median": 1.0, "p90": 1.0, "p99": 1.0}
    assert point.after.tokens_per_second == 2.0
    assert point.speedup.model_dump() == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_c8_the_spread_is_that_of_ratios_within_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down by half between repetitions leaves the ratios where they were."""

    def interleaved(*_: Any) -> list[list[Run]]:
        return [
            [
                Run(2.0, [4.0, 4.0], 8),
                Run(4.0, [8.0, 8.0], 8),
                Run(2.0, [4.4, 4.4], 8),
            ],
            [
                Run(1.0, [2.0, 2.0], 2),
                Run(2.0, [4.0, 4.0], 2),
                Run(1.0, [2.0, 2.0], 2),
            ],
        ]

    monkeypatch.setattr(decode, "_interleaved", interleaved)
    (point,) = points(DecodeSettings(batches=[2], contexts=[5]), [5])
    assert point.speedup.model_dump() == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.2})
    assert point.first_token_speedup.median == 2.0
    assert point.before.tokens_per_second == pytest.approx(2 * 6 / 32.8)
    assert point.before.time_per_output_token_s.p99 == pytest.approx(8.0)
    assert (point.before.cache_bytes, point.after.cache_bytes) == (8, 2)


def test_every_batch_is_measured_at_every_context() -> None:
    found = points(DecodeSettings(batches=[2, 1], contexts=[4, 8], new_tokens=2, repetitions=1), [4, 8])
    assert [(point.context, point.batch) for point in found] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    for point in found:
        speeds = (point.before, point.after)
        assert all(math.isfinite(s.tokens_per_second) and s.tokens_per_second > 0 for s in speeds)
        assert point.before.cache_bytes == 4 * point.after.cache_bytes
        assert point.before.bandwidth_share is None  # claimed on GPUs only


def test_contexts_beyond_the_models_positions_are_cut() -> None:
    settings = DecodeSettings(contexts=[128, 32, 600], new_tokens=4)
    assert decode.usable_contexts(settings, None) == ([32, 128, 600], 600, None)
    note = "Decode contexts of 128, 600 tokens were cut to 60: the model has 64 positions."
    assert decode.usable_contexts(settings, 64) == ([32, 60], 60, note)
    ladder = settings.model_copy(update={"contexts": [32], "ladder_context": 61})
    assert decode.usable_contexts(ladder, 64) == ([32], 60, note.replace("128, 600", "61"))
    with pytest.raises(RefusedError, match="new_tokens: 4 tokens leave no room for a context within the model's 4"):
        decode.usable_contexts(settings, 4)


def ladder(settings: DecodeSettings, known: Any = ()):
    both = [TransformersEngine(model) for model in (make_model(4), make_model(1))]
    return decode.measure_ladder(both, settings, 6, known, seed=0, progress=ignore)


def test_the_ladder_ends_where_each_models_memory_does() -> None:
    """Room for 9 sequences of the model before holds 36 of the model after: rungs of 8 and 32."""
    settings = DecodeSettings(new_tokens=2, repetitions=1, ladder_sequences=64)
    per_sequence = kv_cache_bytes(num_layers=2, num_key_value_heads=4, head_dim=12, num_tokens=8, cache_dtype="float32")
    limit = settings.model_copy(update={"memory_limit_gib": 9 * per_sequence / 2**30})
    result = ladder(limit)
    assert [rung.sequences for rung in result.rungs] == [1, 2, 4, 8, 16, 32]
    assert [rung.before is not None for rung in result.rungs] == [True] * 4 + [False] * 2
    assert all(rung.after is not None for rung in result.rungs)
    assert result.memory_limit_bytes == 9 * per_sequence
    for rung in result.rungs[:4]:
        assert rung.before is not None and rung.before.cache_bytes == rung.sequences * per_sequence


def test_the_ladder_goes_on_without_a_model_that_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decode._interleaved

    def short_of_memory(models: Any, batch: int, *rest: Any) -> Any:
        if batch >= (4 if len(models) == 2 else 8):
            raise torch.OutOfMemoryError("out of memory")
        return real(models, batch, *rest)

    monkeypatch.setattr(decode, "_interleaved", short_of_memory)
    result = ladder(DecodeSettings(new_tokens=2, repetitions=1, ladder_sequences=16))
    assert [(r.sequences, r.before is not None, r.after is not None) for r in result.rungs] == [
        (1, True, True),
        (2, True, True),
        (4, False, True),
    ]
    with pytest.raises(HeadfoldError, match="batch 8 with context 5 does not fit") as caught:
        points(DecodeSettings(batches=[8], contexts=[5]), [5])
    assert caught.value.exit_code == 1


def test_the_ladder_takes_what_was_measured_already(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DecodeSettings(batches=[2], new_tokens=2, repetitions=1, ladder_sequences=2)
    (known,) = points(settings, [6])
    result = ladder(settings, [known])
    assert [rung.sequences for rung in result.rungs] == [1, 2]
    assert (result.rungs[1].before, result.rungs[1].after) == (known.before, known.after)


def test_bytes_that_a_step_reads() -> None:
    untied, tied = make_model(2), make_model(2, tie_word_embeddings=True)
    run = Run(1.0, [1.0] * 4, cache_bytes=1000)
    weights = sum(p.numel() for p in untied.parameters()) - untied.get_input_embeddings().weight.numel()
    # Of 10 slots, 6 are filled by the prompt and on average 2 more by the steps.
    assert decode.bytes_per_step(TransformersEngine(untied), run, 6) == 4 * weights + 800
    all_weights = sum(p.numel() for p in tied.parameters())
    assert decode.bytes_per_step(TransformersEngine(tied), run, 6) == 4 * all_weights + 800


def test_copy_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_COPY_BYTES", 1 << 16)
    ticks = itertools.count()
    monkeypatch.setattr(decode, "clock", lambda device: float(next(ticks)))
    assert decode.copy_bandwidth(torch.device("cpu")) == 2 * (1 << 16)
