"""The decode loop: generate's tokens from every cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from headfold.kernels import DecodeLoop, KVCache, PagedKVCache, register_attention

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Gemma2Config(**SMALL, head_dim=16, sliding_window=8)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(KVCache, {}), (KVCache, {"cache_dtype": "int8"}), (PagedKVCache, {"page_size": 4}), (None, {})],
)
def test_tokens_of_generate(config, kind, options):
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="headfold", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.2)
    ids = torch.randint(2, 97, (2, 13), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def make():
        return (kind or KVCache)(model.config, num_sequences=2, max_tokens=30, **options)

    expected = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, cache=make())[
        :, 13:
    ]
    cache = make()
    loop = DecodeLoop(model, cache)
    if kind is None:  # a cache that holds the beginning of the prompt
        loop.prefill(ids[:, :6], mask[:, :6])
    found = [loop.prefill(ids, mask).clone()]
    found += [loop.step().clone() for _ in range(11)]
    assert torch.equal(torch.cat(found, dim=1), expected)
    assert cache.get_seq_length() == 13 + 11
