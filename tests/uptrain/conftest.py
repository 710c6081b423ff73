"""A tiny checkpoint with a real tokenizer, texts for it, and ways to train it in this process and in others."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headfold.uptrain.settings import UptrainSettings

WORKER = Path(__file__).parent / "worker.py"
END_OF_TEXT = "<|endoftext|>"


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Documents of a few dozen words each, from a small vocabulary with some structure to learn."""
    random_ = random.Random(seed)
    nouns = ["king", "river", "stone", "horse", "garden", "letter", "winter", "captain", "lamp", "road"]
    verbs = ["saw", "found", "left", "knew", "took", "followed", "feared", "painted"]
    documents = []
    for _ in range(count):
        sentences = []
        for _ in range(random_.randint(2, 12)):
            first, second = random_.sample(nouns, 2)
            sentences.append(f"The {first} {random_.choice(verbs)} the {second}, and the {second} was old.")
        documents.append(" ".join(sentences))
    return documents


def write_jsonl(path: Path, documents: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def make_tokenizer(*, begin_of_text: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, "<s>"] if begin_of_text else [END_OF_TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_documents(50, seed=99), trainer)
    if begin_of_text:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if begin_of_text else END_OF_TEXT, eos_token=END_OF_TEXT
    )


def make_checkpoint(path: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **overrides,
        }
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def read_metrics(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def step_losses(state: Path) -> list[float]:
    return [entry["loss"] for entry in read_metrics(state) if "loss" in entry]


def weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "student")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("texts") / "train.jsonl", make_documents(120))


@pytest.fixture(scope="session")
def eval_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("texts") / "eval.jsonl", make_documents(8, seed=1))


@pytest.fixture
def make_settings(corpus: Path) -> Callable[..., UptrainSettings]:
    """Settings of a run of ten steps of four rows of 32 tokens; what is given replaces them."""

    def make(**overrides: Any) -> UptrainSettings:
        return UptrainSettings.model_validate(
            {
                "data": [str(corpus)],
                "sequence_length": 32,
                "tokens": 10 * 4 * 32,
                "batch_rows": 4,
                "micro_batch_rows": 2,
                "learning_rate": 1e-2,
                "mixed_precision": "no",
                "save_interval": 1.0,
                **overrides,
            }
        )

    return make


def worker_environment() -> dict[str, str]:
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    return {**keep, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def worker_command(jobs: Path, num_processes: int = 1) -> list[str]:
    if num_processes == 1:
        return [sys.executable, str(WORKER), str(jobs)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, *launcher, str(WORKER), str(jobs)]


def job(settings: UptrainSettings, student: Path, output: Path, **options: Any) -> dict[str, Any]:
    """A job for worker.py; `options` are a teacher, a fault to inject, a file for gradients."""
    paths = {"student": student, "output": output, **options}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in paths.items()}
    return {"settings": settings.model_dump(mode="json"), **plain}


def run_worker(
    jobs: list[dict[str, Any]], folder: Path, num_processes: int = 1, *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Train in other processes, job after job, and wait for them."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    command = worker_command(file, num_processes)
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=1200)
    if check:
        assert done.returncode == 0, done.stderr
    return done
