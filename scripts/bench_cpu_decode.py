"""Decode on a CPU, our attention beside transformers' "sdpa"; and the time to the first token on a prefix hit.

    python -m headfold.scripts.bench_cpu_decode --output docs/results/cpu_decode.json

Both run on the same tensors, in turn, in one process of one thread; times are that thread's CPU time, which other
programs on the machine do not add to. Says nothing about GPUs: there scripts/gpu_check.py measures.

Shape letters: B sequences, T tokens, N keys, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headfold.kernels import DecodeLoop, PagedKVCache, register_attention
from headfold.kernels.attention import headfold_attention, headfold_mask, spans_to_mask

SECONDS_PER_POINT = 2.0


def in_turn(calls: dict[str, Callable[[], Any]], least: int = 9, most: int = 1000) -> dict[str, list[float]]:
    """CPU seconds of each call, run in turn."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.thread_time()
    while (done := len(next(iter(times.values())))) < least or (
        done < most and time.thread_time() - start < SECONDS_PER_POINT
    ):
        for name in list(calls)[:: 1 if done % 2 else -1]:
            before = time.thread_time()
            calls[name]()
            times[name].append(time.thread_time() - before)
    return times


def ratio_interval(seconds: list[float], others: list[float]) -> list[float]:
    """The 95 % interval of the ratio of medians, by the bootstrap over rounds."""
    draw = torch.randint(len(seconds), (2000, len(seconds)), generator=torch.Generator().manual_seed(0))
    medians = (torch.tensor(x, dtype=torch.float64)[draw].median(dim=1).values for x in (seconds, others))
    ratios = torch.div(*medians).sort().values
    return [ratios[49].item(), ratios[-50].item()]


def point(calls: dict[str, Callable[[], Any]], **shape: Any) -> dict[str, Any]:
    times = in_turn(calls)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        **shape,
        "headfold_microseconds": 1e6 * seconds["headfold"],
        "sdpa_microseconds": 1e6 * seconds["sdpa"],
        "ratio": seconds["headfold"] / seconds["sdpa"],
        "ratio_interval": ratio_interval(times["headfold"], times["sdpa"]),
    }


def attention_points() -> list[dict[str, Any]]:
    """One layer's attention for one token, with no padding and with the left padding of a batch."""
    points = []
    shapes = list(itertools.product(((32, 8), (32, 1), (8, 2)), ("float32",), (1, 8), (16, 64, 256, 1024, 4096)))
    shapes += itertools.product(((32, 8), (32, 1)), ("bfloat16",), (1,), (16, 64, 256))
    for (num_heads, num_kv_heads), dtype, batch_size, num_keys in shapes:
        for padded in (False, True) if batch_size > 1 else (False,):
            head_dim = 64 if num_heads == 8 else 128
            module: Any = SimpleNamespace(
                is_causal=True, num_key_value_groups=num_heads // num_kv_heads, training=False
            )
            kind = {"dtype": getattr(torch, dtype)}
            q = torch.randn(batch_size, num_heads, 1, head_dim, **kind)
            k, v = (torch.randn(batch_size, num_kv_heads, num_keys, head_dim, **kind) for _ in range(2))
            spans = mask = None
            if padded:
                padding = torch.arange(num_keys) >= torch.arange(batch_size)[:, None] % (num_keys // 4)
                spans = headfold_mask(
                    batch_size=batch_size, q_length=1, kv_length=num_keys, q_offset=num_keys - 1, attention_mask=padding
                )
                assert spans is not None
                mask = spans_to_mask(spans, num_keys)
            more = {"scaling": head_dim**-0.5, "dropout": 0.0}
            calls = {
                "headfold": lambda: headfold_attention(module, q, k, v, spans, **more)[0],  # noqa: B023
                "sdpa": lambda: sdpa_attention_forward(module, q, k, v, mask, **more)[0],  # noqa: B023
            }
            found, expected = (call().float() for call in calls.values())
            points.append(
                point(
                    calls,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    batch_size=batch_size,
                    num_keys=num_keys,
                    padded=padded,
                    largest_difference=((found - expected).abs().max() / expected.abs().max()).item(),
                )
            )
    return points


def small_model(attention: str) -> LlamaForCausalLM:
    """A random Llama of 4 layers of width 256 in float32, small so that attention and its overhead weigh much."""
    register_attention()
    config = LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


def step_points() -> list[dict[str, Any]]:
    """A whole model's decode step on transformers' own growing cache, masks included."""
    points = []
    model = small_model("sdpa")
    for num_keys, (batch_size, padded) in itertools.product((16, 256, 2048), ((1, False), (4, False), (4, True))):
        ids = torch.randint(2, 97, (batch_size, num_keys))
        mask = torch.ones_like(ids)
        if padded:
            mask[1:, :3] = 0
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)
        grown = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=1)

        # One model and one cache for both: where weights lie in memory makes a difference of two percent.
        def step(attention: str) -> torch.Tensor:
            model.config._attn_implementation = attention
            out = model(ids[:, -1:], attention_mask=grown, cache=cache).logits[:, -1]  # noqa: B023
            cache.crop(-1)  # noqa: B023
            return out

        steppers: dict[str, Callable[[], Any]] = {
            attention: functools.partial(step, attention) for attention in ("headfold", "sdpa")
        }
        found, expected = (step() for step in steppers.values())
        difference = ((found - expected).abs().max() / expected.abs().max()).item()
        points.append(
            point(steppers, batch_size=batch_size, num_keys=num_keys + 1, padded=padded, largest_difference=difference)
        )
    return points


def first_token_seconds(model: Any, prompt: torch.Tensor, seconds: Callable[[Callable[[], Any]], float]) -> dict:
    """Time to the first token of a prompt (1, T): computed whole, and with all but its last page found in the cache.

    `seconds` times a call.
    """
    num_tokens = prompt.shape[1]
    cache = PagedKVCache(
        model.config, num_sequences=1, max_tokens=num_tokens + 16, dtype=model.dtype, device=model.device
    )
    loop = DecodeLoop(model, cache)
    ids = prompt[0].tolist()

    def whole() -> torch.Tensor:
        loop.prefill(prompt)
        cache.free(0)
        return loop.tokens

    def hit() -> torch.Tensor:
        found = cache.attach(0, ids)
        assert found == (num_tokens - 1) // cache.pool.page_size * cache.pool.page_size
        return whole()

    expected = whole().clone()
    without = seconds(whole)
    loop.prefill(prompt)
    cache.publish(0, ids)
    cache.free(0)
    assert torch.equal(hit(), expected)
    return {"prompt_tokens": num_tokens, "whole_prompt_seconds": without, "prefix_found_seconds": seconds(hit)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        result = {
            "machine": f"{platform.machine()} CPU, 1 thread",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "attention": attention_points(),
            "step": step_points(),
            "first_token": [
                first_token_seconds(
                    small_model("headfold"),
                    torch.randint(2, 97, (1, n)),
                    lambda call: statistics.median(in_turn({"": call}, 5)[""]),
                )
                for n in (256, 1024, 4096)
            ],
        }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
