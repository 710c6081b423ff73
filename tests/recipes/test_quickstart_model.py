"""The model that ships: really MHA, really trained, really held-out text."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headfold.recipes.schema import SHIPPED

MODEL = SHIPPED / "quickstart"
TEXT = SHIPPED / "quickstart_text"
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """scripts/train_quickstart.py, which is a chore of the repository and not part of the package's interface."""
    spec = importlib.util.spec_from_file_location("train_quickstart", ROOT / "scripts" / "train_quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents(split: str) -> list[str]:
    path = next(TEXT.glob(f"{split}.jsonl*"))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line)["text"] for line in data.decode("utf-8").splitlines()]


def test_it_is_a_small_mha_llama() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["num_attention_heads"] == config["num_key_value_heads"] >= 8
    assert (MODEL / "model.safetensors").stat().st_size <= 10_000_000
    summary = json.loads((MODEL / "train_summary.json").read_text())
    assert summary["num_parameters"] >= 3_000_000


def test_the_three_splits_share_no_document() -> None:
    splits = {split: set(documents(split)) for split in ("train", "uptrain", "eval")}
    assert all(len(texts) > 40 for texts in splits.values())
    assert not splits["train"] & splits["uptrain"]
    assert not splits["train"] & splits["eval"]
    assert not splits["uptrain"] & splits["eval"]


def test_its_perplexity_is_what_its_log_says_and_attention_matters(training: ModuleType) -> None:
    """Permuting the K heads against the Q heads ruins the perplexity: sharing K/V heads is a loss to this model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = json.loads((MODEL / "train_summary.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = training.pack(tokenizer, documents("eval"))
    some = rows[:: max(1, len(rows) // 24)]
    perplexity = math.exp(training.held_out_loss(model, some))
    assert perplexity == pytest.approx(summary["held_out_perplexity"], rel=0.1)
    training.permute_key_heads(model, seed=summary["seed"])
    assert math.exp(training.held_out_loss(model, some)) > 3 * perplexity
