"""Tiny checkpoints with a real tokenizer, and text for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "to",
    "see",
    "it",
    "while",
    "old",
    "men",
    "read",
    "long",
    "tales",
    "by",
    "the",
    "sea",
    "at",
    "night",
]
POSITIONS = 64


def sentence(seed: int, num_words: int) -> str:
    """Words in a reproducible order."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (num_words,), generator=generator).tolist())


def make_tokenizer(*, adds_bos: bool = False, num_merges: int = 60, **special: str | None) -> Any:
    """A byte-level BPE tokenizer; with adds_bos it puts <s> in front by itself, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2 + 256 + num_merges,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(seed, 50) for seed in range(20)], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", **special}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: token for name, token in names.items() if token}
    )


def make_model(num_key_value_heads: int, seed: int = 0, **config: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": 12,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **config})).eval()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Saves a model as a checkpoint directory with a tokenizer and, when given, a headfold.json."""

    def save(name: str, model: Any, tokenizer: Any = None, record: dict[str, Any] | None = None) -> Path:
        path = tmp_path / name
        model.save_pretrained(path)
        (tokenizer or make_tokenizer()).save_pretrained(path)
        if record is not None:
            (path / "headfold.json").write_text(json.dumps(record))
        return path

    return save


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """JSON lines with 40 documents of 5 to 160 words, an empty one and a null among them."""
    path = tmp_path / "text.jsonl"
    texts: list[str | None] = [sentence(seed, 5 + 4 * seed) for seed in range(40)]
    texts[3:3] = ["", None]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
