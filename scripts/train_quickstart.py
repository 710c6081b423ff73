"""Trains the small MHA Llama that the repository ships in recipes/quickstart/.

Run once; its output is committed. Everything follows from the seed and from the shipped training split: the
tokenizer (byte-level BPE), the order of the rows, the initial weights. The same torch version with the same number
of threads gives the same weights.

    python scripts/train_quickstart.py --output recipes/quickstart

Writes the checkpoint, train_log.jsonl (one line per evaluation) and train_summary.json, which holds the held-out
perplexity and the perplexity after a random permutation of the K heads against the Q heads: if attention did not
matter to the model, sharing its K/V heads would prove nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
SEED = 20230522
VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 512
ROWS_PER_STEP = 8
NUM_TRAINING_TOKENS = 12_000_000
PEAK_LEARNING_RATE = 3e-3
END_OF_TEXT = "<|endoftext|>"


def read_split(name: str) -> list[str]:
    """The documents of one shipped split, in file order."""
    path = next((QUICKSTART.parent / "quickstart_text").glob(f"{name}.jsonl*"))
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the training split: no unknown tokens, one special token that ends and begins documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=SEQUENCE_LENGTH,
    )


def pack(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """Rows (N, SEQUENCE_LENGTH + 1) of token ids; every document begins with the end-of-text token."""
    stream: list[int] = []
    for ids in tokenizer(documents, add_special_tokens=False)["input_ids"]:
        stream.append(tokenizer.eos_token_id)
        stream.extend(ids)
    width = SEQUENCE_LENGTH + 1
    num_rows = len(stream) // width
    return torch.tensor(stream[: num_rows * width], dtype=torch.long).view(num_rows, width)


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=SEQUENCE_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.02,
        use_cache=True,
    )


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Mean loss in nats per token over rows (N, T + 1), in float32."""
    model.eval()
    total = sum(loss_of(model, batch).item() * len(batch) for batch in rows.split(8))
    model.train()
    return total / len(rows)


@torch.no_grad()
def permute_key_heads(model: LlamaForCausalLM, seed: int) -> None:
    """Permutes the K heads of every layer against its Q heads, without a fixed point, in place."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        num_heads = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
        order = torch.randperm(num_heads, generator=generator)
        while (order == torch.arange(num_heads)).any():
            order = torch.randperm(num_heads, generator=generator)
        weight = layer.self_attn.k_proj.weight
        heads = weight.view(num_heads, -1, weight.shape[1])
        heads.copy_(heads[order].clone())


def learning_rate(step: int, num_steps: int, num_warmup_steps: int = 100) -> float:
    if step < num_warmup_steps:
        return PEAK_LEARNING_RATE * (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=NUM_TRAINING_TOKENS, help="training tokens")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    documents = read_split("train")
    tokenizer = train_tokenizer(documents)
    train_rows = pack(tokenizer, documents)
    eval_rows = pack(tokenizer, read_split("eval"))
    model = LlamaForCausalLM(model_config(tokenizer))
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {train_rows.numel():,} training tokens", file=sys.stderr)

    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=PEAK_LEARNING_RATE,
        betas=(0.9, 0.95),
        fused=True,
    )
    tokens_per_step = ROWS_PER_STEP * SEQUENCE_LENGTH
    num_steps = arguments.tokens // tokens_per_step
    generator = torch.Generator().manual_seed(SEED)
    order = torch.empty(0, dtype=torch.long)
    arguments.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    mean_loss = 0.0
    with open(arguments.output / "train_log.jsonl", "w", encoding="utf-8") as log:
        for step in range(num_steps):
            if len(order) < ROWS_PER_STEP:
                order = torch.cat([order, torch.randperm(len(train_rows), generator=generator)])
            rows, order = train_rows[order[:ROWS_PER_STEP]], order[ROWS_PER_STEP:]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
            if (step + 1) % 250 == 0 or step + 1 == num_steps:
                entry = {
                    "step": step + 1,
                    "tokens": (step + 1) * tokens_per_step,
                    "train_loss": round(mean_loss, 4),
                    "eval_loss": round(held_out_loss(model, eval_rows), 4),
                    "learning_rate": learning_rate(step, num_steps),
                }
                print(json.dumps(entry), f"{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
                log.write(json.dumps(entry) + "\n")

    model.bfloat16().eval()
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    model.float()
    perplexity = math.exp(held_out_loss(model, eval_rows))
    permute_key_heads(model, seed=SEED)
    summary = {
        "num_parameters": num_parameters,
        "num_training_tokens": num_steps * tokens_per_step,
        "held_out_perplexity": round(perplexity, 3),
        "held_out_perplexity_with_permuted_key_heads": round(math.exp(held_out_loss(model, eval_rows)), 3),
        "sequence_length": SEQUENCE_LENGTH,
        "seed": SEED,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }
    (arguments.output / "train_summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary), file=sys.stderr)


if __name__ == "__main__":
    main()
