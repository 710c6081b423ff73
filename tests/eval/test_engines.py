"""vLLM as an engine, against a stand-in that speaks its interface, and the real one where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.eval import engines
from headfold.eval.engines import VllmEngine
from headfold.eval.loading import placement
from headfold.eval.measure import evaluate
from headfold.eval.settings import EvalSettings

from .conftest import make_model

Save = Callable[..., Path]


def stand_in(batched_tokens: int) -> Any:
    """A module vllm whose engine takes prompts in chunks of batched_tokens and decodes whatever has been taken in."""

    class Engine:
        def __init__(self, **options: Any) -> None:
            self.options = options
            cache = types.SimpleNamespace(block_size=16)
            self.vllm_config = types.SimpleNamespace(cache_config=cache)
            self.waiting: dict[str, tuple[int, int]] = {}
            self.running: dict[str, int] = {}

        def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
            assert name not in self.waiting and sampling.ignore_eos and sampling.temperature == 0
            self.waiting[name] = (len(prompt["prompt_token_ids"]), sampling.max_tokens)

        def has_unfinished_requests(self) -> bool:
            return bool(self.waiting or self.running)

        def step(self) -> list[Any]:
            budget = batched_tokens
            for name, (length, tokens) in list(self.waiting.items()):
                if length > budget:
                    break
                budget -= length
                self.running[name] = self.waiting.pop(name) and tokens
            outputs = [types.SimpleNamespace(request_id=name) for name in self.running]
            self.running = {name: left - 1 for name, left in self.running.items() if left > 1}
            return outputs

    module: Any = types.ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM = lambda **options: types.SimpleNamespace(llm_engine=Engine(**options))
    module.SamplingParams = types.SimpleNamespace
    return module


@pytest.fixture
def checkpoint(save: Save) -> Path:
    return save("model", make_model(2))


def loaded(checkpoint: Path) -> VllmEngine:
    return VllmEngine(checkpoint, placement(EvalSettings()), max_sequences=4, max_tokens=20)


def test_engine_vllm_is_refused_where_it_is_not_installed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    with pytest.raises(RefusedError, match="vLLM is not installed here") as caught:
        evaluate(checkpoint, [checkpoint], EvalSettings(engine="vllm"))
    assert caught.value.exit_code == 2


def test_steps_of_vllm_are_counted_where_all_sequences_decode(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts taken in two at a time: the first two decode a step early, and that step is not one of four sequences."""
    monkeypatch.setitem(sys.modules, "vllm", stand_in(batched_tokens=20))
    engine = loaded(checkpoint)
    ticks = iter(range(100))
    monkeypatch.setattr(engines.time, "perf_counter", lambda: float(next(ticks)))
    run = engine.run(torch.ones(4, 10, dtype=torch.long), 6)
    # Step 1 starts two, step 2 the others: the first tokens are there after 2. The early two then end a step early.
    assert run.first_token == 2.0
    assert run.steps == [1.0] * 5
    # 16 slots of 2 layers, K and V, 2 heads of 12 in float32, for 4 sequences.
    assert run.cache_bytes == 4 * 16 * 2 * 2 * 2 * 12 * 4
    assert engine.cache_bytes(17) == 32 * 2 * 2 * 2 * 12 * 4


def test_a_batch_that_vllm_never_runs_at_once_is_a_failure(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", stand_in(batched_tokens=10))
    with pytest.raises(HeadfoldError, match="never decoded 4 sequences of 10 tokens at once"):
        loaded(checkpoint).run(torch.ones(4, 10, dtype=torch.long), 2)


def test_vllm_is_told_not_to_share_prefixes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", stand_in(batched_tokens=100))
    options = loaded(checkpoint)._engine.options
    assert options["enable_prefix_caching"] is False
    assert (options["max_model_len"], options["max_num_seqs"]) == (20, 4)
    assert options["max_num_batched_tokens"] >= 80


def test_a_report_through_vllm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", stand_in(batched_tokens=1000))
    decode = {"batches": [1, 2], "contexts": [8], "new_tokens": 4, "repetitions": 1, "ladder_sequences": 4}
    report = evaluate(checkpoint, [checkpoint], EvalSettings.model_validate({"decode": decode, "engine": "vllm"}))
    assert report.conditions.engine == "vllm"
    assert [(point.batch, point.before.cache_bytes) for point in report.decode] == [(1, 6144), (2, 12288)]
