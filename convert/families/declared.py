"""The families that are known: how each one's attention differs from Llama's, as data.

Every line was read off, and every family is tested on, the modelling code of transformers 5.24: logits before and after
a conversion, and the rotary style by transforming K and Q in a way that only the right style leaves without effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headfold.convert.families.layout import RotaryKind


def _sliding_layers(text: dict[str, Any], layer: int) -> bool:
    """Cohere2, EXAONE 4: only the layers with a sliding window rotate (all of them where there is no window)."""
    window, pattern = text.get("sliding_window", 4096), text.get("sliding_window_pattern", 4)
    if window is None:
        return True
    types = text.get("layer_types")
    if isinstance(types, list) and layer < len(types):
        return types[layer] == "sliding_attention"
    return not (isinstance(pattern, int) and pattern) or (layer + 1) % pattern != 0


def _cohere2_layers(text: dict[str, Any], layer: int) -> bool:
    return _sliding_layers({**text, "sliding_window": text.get("sliding_window") or 4096}, layer)


def _smollm3_layers(text: dict[str, Any], layer: int) -> bool:
    """SmolLM3: `no_rope_layers` holds 1 for the layers that do rotate."""
    layers = text.get("no_rope_layers")
    if isinstance(layers, list) and layer < len(layers):
        return bool(layers[layer])
    interval = text.get("no_rope_layer_interval")
    return (layer + 1) % (interval if isinstance(interval, int) and interval else 4) != 0


@dataclass(frozen=True)
class Family:
    """How a family stores its attention. The defaults are Llama's."""

    rotary: RotaryKind = "half"
    partial_rotary: float | None = None
    """The share of channels that rotate where the config does not say; None: the family always rotates all."""
    rotary_layers: Callable[[dict[str, Any], int], bool] | None = None
    """Whether a layer rotates at all, from the (text) config and the layer's number; None: all layers do."""
    layers: str = "layers"
    """What the list of layers is called on disk."""
    attention: str = "self_attn"
    module: str | None = None
    """The attention module in transformers, `{index}` for its layer, where it is not called what it is on disk."""
    output: str = "o_proj"
    fused: str | None = None
    """The tensor that holds q, k and v as three blocks of rows."""
    head_dim: int | None = None
    """head_dim where the config does not say; None: hidden_size / num_attention_heads."""
    norm: Literal["shared", "per_head", "flat"] | None = None
    """The kind of the norm on q and k, where the checkpoint has one."""
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    clips: bool = False
    """Whether the config's clip_qkv is heeded."""
    extra: tuple[str, ...] = ()
    """Other tensors of the attention module, none of which depends on the KV heads."""
    ties: bool = False
    """tie_word_embeddings where the config does not say."""
    is_hybrid: bool = False
    """Whether some layers have something else in place of attention."""


_LLAMA = Family()
_GEMMA = Family(head_dim=256, ties=True)
_QK_NORM = Family(norm="shared")
_Q, _K = "q_layernorm", "k_layernorm"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "ministral", "qwen2", "qwen2_moe", "arcee", "aria_text", "hyperclovax"), _LLAMA
    ),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "jais2", "phimoe"), _LLAMA),
    **dict.fromkeys(("ministral3", "cwm", "seed_oss", "internlm3", "iquestcoder"), Family(head_dim=128)),
    "exaone": Family(
        layers="h", attention="attn.attention", module="model.layers.{index}.self_attn", output="out_proj"
    ),
    **dict.fromkeys(("gemma", "gemma2", "vaultgemma"), _GEMMA),
    "starcoder2": Family(ties=True),
    "gemma3_text": Family(head_dim=256, norm="shared", ties=True),
    **dict.fromkeys(("qwen3", "hy_v3"), Family(head_dim=128, norm="shared")),
    **dict.fromkeys(("qwen3_moe", "apertus", "apertus1p5_text", "dots1"), _QK_NORM),
    **dict.fromkeys(("exaone4", "exaone_moe"), Family(norm="shared", rotary_layers=_sliding_layers)),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        Family(norm="shared", q_norm="query_layernorm", k_norm="key_layernorm"),
    ),
    "lfm2": Family(output="out_proj", norm="shared", q_norm=_Q, k_norm=_K, ties=True, is_hybrid=True),
    "glm4_moe": Family(partial_rotary=0.5, norm="shared"),
    "olmo": Family(clips=True),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), Family(norm="flat")),
    "olmoe": Family(norm="flat", clips=True),
    "minimax_m2": Family(partial_rotary=1.0, norm="flat", head_dim=128),
    "solar_open": Family(partial_rotary=1.0, head_dim=128),
    "phi": Family(partial_rotary=0.5, output="dense", norm="shared", q_norm=_Q, k_norm=_K),
    "phi3": Family(partial_rotary=1.0, fused="qkv_proj"),
    "nemotron": Family(partial_rotary=0.5),
    "stablelm": Family(partial_rotary=0.25, norm="per_head", q_norm=_Q, k_norm=_K),
    "cohere": Family(rotary="interleaved", norm="per_head", ties=True),
    "cohere2": Family(rotary="interleaved", rotary_layers=_cohere2_layers, ties=True),
    **dict.fromkeys(("glm", "glm4"), Family(rotary="interleaved", partial_rotary=0.5, head_dim=128)),
    "helium": Family(rotary="interleaved", head_dim=128),
    "ernie4_5": Family(rotary="interleaved", head_dim=128, ties=True),
    "ernie4_5_moe": Family(rotary="interleaved", ties=True),
    "smollm3": Family(rotary_layers=_smollm3_layers, ties=True),
    "gpt_oss": Family(head_dim=64, extra=("sinks",)),
    "granite_swa": Family(extra=("sinks",), ties=True),
    "granitemoe_swa": Family(extra=("sinks",)),
}

# Their classes have one KV head or all of them, and no number in between.
MULTI_QUERY_FAMILIES: dict[str, Family] = {
    "gpt_bigcode": Family(rotary="none", layers="h", attention="attn", fused="c_attn", output="c_proj", ties=True),
    "falcon": Family(
        rotary_layers=lambda text, layer: not text.get("alibi"),
        layers="h",
        attention="self_attention",
        fused="query_key_value",
        output="dense",
        ties=True,
    ),
}

# Families whose classes have no field for the number of KV heads. Their configs take `num_key_value_heads` without a
# word and build full multi-head attention, so a converted checkpoint would not load, or load as something else.
_NO_FIELD = "its class in transformers has no field for the number of KV heads (a cache of 8 or 4 bits is smaller too)"
WITHOUT_KV_FIELD: dict[str, str] = {
    **dict.fromkeys(
        ("gpt-sw3", "openai-gpt", "gpt_neo", "bloom", "mpt", "codegen", "persimmon", "fuyu", "biogpt"),
        _NO_FIELD,
    ),
    **dict.fromkeys(
        ("xglm", "ctrl", "cpmant", "xlm", "xlnet", "reformer", "modernbert-decoder", "hrm_text"), _NO_FIELD
    ),
    **dict.fromkeys(("gpt_neox", "gptj", "gpt2", "opt"), f"{_NO_FIELD}; it has to be re-mapped first"),  # see remap.py
    "gpt_neox_japanese": _NO_FIELD,
    "dbrx": "its q, k and v are fused in a layout that is not supported",
    "phi4_multimodal": "its attention carries LoRA branches on a fused q, k and v",
}

# Families in which something other than K and V depends on the KV heads, or whose cache is not made of K and V heads.
UNSUPPORTED: dict[str, str] = {
    "doge": "its mask depends on every V head (dt_proj)",
    "diffllama": "differential attention splits its V heads in two halves",
    "jetmoe": "its attention is a mixture of experts",
    "zamba": "its attention layers share their weights",
    "zamba2": "its attention layers share their weights",
    "gemma3n_text": "later layers reuse the cache of earlier ones",
    "zaya": "its V heads mix two tokens",
    "sarvam_moe": "its q, k and v are fused in a layout that is not supported",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "its layers have K heads of two sizes and share caches"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"),
        "few of its layers have attention, and their q_proj holds a gate as well",
    ),
    "mimo_v2_flash": "its K and V heads differ in size",
}
