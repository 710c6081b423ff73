"""Tiny random checkpoints of many families, and what the tests of this folder do with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_MOE: dict[str, Any] = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}

# What differs from the common settings below. head_dim 12 is no power of two, and 6 heads are neither.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "ministral": {"layer_types": ["full_attention", "full_attention"]},
    "ministral3": {},
    "qwen2": {},
    "qwen2_moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "arcee": {},
    "aria_text": {"moe_num_experts": 2, "moe_topk": 1, "moe_num_shared_experts": 1},
    "hyperclovax": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "granitemoeshared": {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16},
    "starcoder2": {},
    "jais2": {},
    "phimoe": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "cwm": {"layer_types": ["full_attention", "full_attention"]},
    "seed_oss": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 12},
    "vaultgemma": {"query_pre_attn_scalar": 12},
    "gemma3_text": {"query_pre_attn_scalar": 12},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "apertus": {},
    "dots1": _MOE,
    "exaone4": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone_moe": {**_MOE, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 2, "moe_topk": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "glm4_moe": {**_MOE, "use_qk_norm": True},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {},
    "flex_olmo": {"num_experts": 2, "num_experts_per_tok": 1},
    "olmoe": {"num_experts": 2, "num_experts_per_tok": 1},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "nemotron": {},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "glm": {},
    "glm4": {},
    "helium": {"head_dim": 12},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 2, "moe_k": 1, "moe_layer_start_index": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "granite_swa": {},
    "granitemoe_swa": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "apertus1p5_text": {},
    "cohere2_moe": {**_MOE, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone": {},
    "hy_v3": _MOE,
    "internlm3": {},
    "iquestcoder": {},
    "minimax_m2": _MOE,
    "solar_open": _MOE,
    # not declared, but recognised
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4},
    "jamba": {**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kolibri1": _MOE,
    "lara_mini": {"layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": _MOE,
    "mellum": _MOE,
    "minimax_m3_vl_text": _MOE,
    "nanochat": {},
}

# Families whose classes know no head_dim, so that it is hidden_size / num_attention_heads.
_DERIVED_HEAD_DIM = ("stablelm", "phimoe", "starcoder2", "phi", "phi3", "jais2", "lfm2", "nemotron", "olmoe", "helium")


def tiny_config(family: str, **overrides: Any) -> Any:
    """A config of 2 layers, 6 heads and head_dim 12, hidden size 48 (or 72 where it must be heads * head_dim)."""
    from transformers import AutoConfig

    hidden_size = 72 if family in _DERIVED_HEAD_DIM else 48
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **FAMILIES[family],
        **overrides,
    }
    if family not in _DERIVED_HEAD_DIM:
        settings.setdefault("head_dim", 12)
    return AutoConfig.for_model(family, **settings)


def tiny_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model all of whose parameters matter: biases and norms are random too, and weights are large."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim > 1 else 0.2
            offset = 1.0 if parameter.ndim == 1 and parameter.mean() == 1 else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def save(model: Any, path: Path, **kwargs: Any) -> Path:
    model.save_pretrained(path, **kwargs)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as stock transformers loads it; a key or shape that differs is an error (A20)."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """(B, T, V) for two fixed rows of 11 tokens."""
    tokens = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def cached_bytes(model: Any, num_tokens: int = 11) -> int:
    """Bytes of K and V that the model itself keeps for a row of tokens."""
    tokens = torch.randint(3, 61, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values))


def expand(path: Path, output: Path, num_key_value_heads: int) -> Path:
    """A GQA checkpoint as the same function with more KV heads: every head is repeated for its query heads.

    An oracle of its own: it knows nothing of headfold, only torch.repeat_interleave.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    old, num_heads = config["num_key_value_heads"], config["num_attention_heads"]
    times = num_key_value_heads // old
    tensors = load_file(path / "model.safetensors")
    expanded = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if "k_layernorm" in parts and "norms" in parts:  # StableLM: a tensor per head
            for copy in range(times):
                head = int(parts[-2]) * times + copy
                expanded[".".join([*parts[:-2], str(head), parts[-1]])] = tensor.clone()
            continue
        if parts[-2] in ("k_proj", "v_proj"):
            tensor = _repeat(tensor, old, times)
        elif parts[-2] == "qkv_proj":
            head_dim = tensor.shape[0] // (num_heads + 2 * old)
            q, k, v = tensor.split([num_heads * head_dim, old * head_dim, old * head_dim])
            tensor = torch.cat([q, _repeat(k, old, times), _repeat(v, old, times)])
        elif (parts[-2] == "k_norm" and tensor.ndim == 2) or (parts[-2] == "k_norm" and config["model_type"] in FLAT):
            tensor = _repeat(tensor, old, times)
        expanded[name] = tensor.contiguous()
    output.mkdir()
    save_file(expanded, output / "model.safetensors", metadata={"format": "pt"})
    config["num_key_value_heads"] = num_key_value_heads
    (output / "config.json").write_text(json.dumps(config))
    return output


HOSTILE = (None, True, 0, -1, 10**12, 0.5, float("nan"), "x", [], [None], {}, {"0": 1})
_OPTIONAL_KEYS = (
    *("head_dim", "per_layer_config", "text_config", "quantization_config", "initializer_range", "clip_qkv"),
    *("sliding_window_pattern", "no_rope_layer_interval", "partial_rotary_factor", "rope_parameters"),
)


def refuses_hostile_configs(path: Path) -> None:
    """Asserts that every key of a config with every hostile value is read, or refused in one line, at once."""
    from dataclasses import replace

    from headfold.convert.checkpoint import Checkpoint
    from headfold.convert.errors import HeadfoldError
    from headfold.convert.families import attention_config, describe
    from headfold.convert.families.remap import remap, remap_config

    checkpoint = Checkpoint.open(path)
    whole = checkpoint.config
    by_rule = {key: value for key, value in whole.items() if key not in ("layer_types", "no_rope_layers")}
    for base in (whole, by_rule):
        for key in {*base, *_OPTIONAL_KEYS} - {"model_type"}:
            for value in HOSTILE:
                config = {**base, key: value}
                for read in (
                    lambda config: attention_config(remap_config(config)).refuse_count(1),
                    lambda config: describe(remap(replace(checkpoint, config=config))),
                ):
                    try:
                        read(config)
                    except HeadfoldError as error:
                        assert str(error).isprintable() and len(str(error)) < 1000, (key, value, error)


FLAT = ("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2")


def _repeat(tensor: torch.Tensor, num_heads: int, times: int) -> torch.Tensor:
    return tensor.unflatten(0, (num_heads, -1)).repeat_interleave(times, 0).flatten(0, 1)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """This module, for its functions: test files cannot import one another."""
    torch.set_num_threads(1)
    return sys.modules[__name__]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of conversions: what they write need not survive a power cut."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def llama(tiny: Any, tmp_path: Path) -> Path:
    """A tiny Llama checkpoint: 2 layers, 6 heads, head_dim 12, hidden size 48, float32."""
    return tiny.save(tiny.tiny_model(tiny.tiny_config("llama")), tmp_path / "llama")
