"""What a config.json says about attention, before any tensor is looked at."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from headfold.convert.errors import CheckpointError, RefusedError
from headfold.convert.families.declared import FAMILIES, MULTI_QUERY_FAMILIES, UNSUPPORTED, WITHOUT_KV_FIELD, Family

KV_FIELD = "num_key_value_heads"
_GPT_NAMES = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
"""What the fields are called in configs of GPT's line."""
_MAX_COUNT, _MAX_LAYERS = 1_000_000, 10_000
"""Far beyond any model, and little enough that no config makes a loop over heads or layers last."""


@dataclass(frozen=True)
class AttentionConfig:
    """The attention of a model as its config states it. Lists hold one entry per layer."""

    model_type: str
    family: Family | None
    """None: not declared."""
    text: dict[str, Any]
    """The config of the language model: the config itself, or its text_config."""
    is_nested: bool
    hidden_size: int
    num_layers: int
    num_attention_heads: list[int]
    num_key_value_heads: list[int]
    head_dim: list[int]
    only_multi_query: bool
    """Whether one KV head is the only number that its class can have, but for all of them."""
    states_kv_heads: bool
    """Whether the config says num_key_value_heads; where it does not, every query head has a KV head."""

    def possible_counts(self) -> list[int]:
        """The numbers of KV heads to which it can be converted: the common divisors of its layers' numbers."""
        common = 1 if self.only_multi_query else math.gcd(*self.num_key_value_heads)
        return [count for count in range(1, common + 1) if common % count == 0]

    def refuse_count(self, count: int) -> None:
        """Raises RefusedError, with the numbers that work, if this is not one of them."""
        possible = self.possible_counts()
        if count in possible:
            return
        there = " or ".join(map(str, sorted(set(self.num_key_value_heads))))
        why = f"that does not divide the {there} there are"
        if count > max(self.num_key_value_heads):
            why = f"there are only {there}"
        elif self.only_multi_query:
            why = f"{self.model_type} has one or all"
        raise RefusedError(
            f"{count} KV heads per layer are not possible: {why}; possible are {', '.join(map(str, possible))}"
        )

    def uniform(self, field: str) -> int:
        """The value that all layers have in common. Raises RefusedError if they differ."""
        values = set(getattr(self, field))
        if len(values) != 1:
            raise RefusedError(f"{self.model_type}: {field} differs between layers: {sorted(values)}")
        return values.pop()


def attention_config(config: dict[str, Any]) -> AttentionConfig:
    """Read the counts of heads from a config.

    Raises RefusedError for families that cannot be converted (with the reason), CheckpointError where the config
    contradicts itself.
    """
    text = config.get("text_config")
    is_nested = isinstance(text, dict)
    if not is_nested:
        text = config
    assert isinstance(text, dict)
    model_type = str(text.get("model_type") or config.get("model_type"))
    _refuse_unsupported(config, text, model_type)
    text = {**{field: text[name] for field, name in _GPT_NAMES.items() if name in text}, **text}
    family = FAMILIES.get(model_type) or MULTI_QUERY_FAMILIES.get(model_type)
    hidden_size = _count(text, "hidden_size", model_type)
    num_layers = _count(text, "num_hidden_layers", model_type, _MAX_LAYERS)
    default_head_dim = family.head_dim if family else None
    states_head_dim = _states(text, "head_dim")
    heads, kv_heads, head_dims = [], [], []
    for layer in range(num_layers):
        num_heads = _per_layer(text, "num_attention_heads", layer)
        num_kv_heads = _per_layer(text, KV_FIELD, layer)
        head_dim = _per_layer(text, "head_dim", layer) if states_head_dim else default_head_dim
        if num_heads is None:
            raise CheckpointError(f"config.json: {model_type} without num_attention_heads")
        if head_dim is None:
            if hidden_size % num_heads:
                raise CheckpointError(
                    f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, "
                    "and there is no head_dim"
                )
            head_dim = hidden_size // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {num_heads} is no multiple of {KV_FIELD} {num_kv_heads}"
            )
        heads.append(num_heads)
        kv_heads.append(num_kv_heads)
        head_dims.append(head_dim)
    return AttentionConfig(
        model_type=model_type,
        family=family,
        text=text,
        is_nested=is_nested,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dims,
        only_multi_query=model_type in MULTI_QUERY_FAMILIES,
        states_kv_heads=text.get(KV_FIELD) is not None,
    )


def with_num_key_value_heads(config: dict[str, Any], num_key_value_heads: int) -> dict[str, Any]:
    """A copy of a config that states this number for all layers; every other key and their order stay as they are."""
    config = copy.deepcopy(config)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for part in (config, text):  # a config with a text_config may repeat the field
        if KV_FIELD in part:
            old = part[KV_FIELD]
            part[KV_FIELD] = [num_key_value_heads] * len(old) if isinstance(old, list) else num_key_value_heads
    if KV_FIELD not in text:
        items = list(text.items())
        text.clear()
        for key, value in items:
            text[key] = value
            if key in ("num_attention_heads", _GPT_NAMES["num_attention_heads"]):
                text[KV_FIELD] = num_key_value_heads
    overrides = text.get("per_layer_config")
    for layer in overrides.values() if isinstance(overrides, dict) else ():
        if isinstance(layer, dict) and KV_FIELD in layer:
            layer[KV_FIELD] = num_key_value_heads
    return config


def _refuse_unsupported(config: dict[str, Any], text: dict[str, Any], model_type: str) -> None:
    settings = [config.get("quantization_config"), text.get("quantization_config"), config.get("compression_config")]
    settings = [value for value in settings if value is not None]  # null is what some exporters write for none
    if settings:
        method = settings[0].get("quant_method") if isinstance(settings[0], dict) else None
        raise RefusedError(
            f"{model_type}: the weights are quantised ({ascii(method)[:40]}); "
            "convert the unquantised checkpoint and quantise the result"
        )
    if config.get("is_encoder_decoder"):
        raise RefusedError(f"{model_type}: an encoder-decoder; only decoder-only models can be converted")
    if model_type in WITHOUT_KV_FIELD:
        raise RefusedError(f"{model_type}: cannot be converted: {WITHOUT_KV_FIELD[model_type]}")
    if model_type in UNSUPPORTED:
        raise RefusedError(f"{model_type}: cannot be converted: {UNSUPPORTED[model_type]}")
    if text.get("kv_lora_rank"):
        raise RefusedError(
            f"{model_type}: cannot be converted: latent attention (kv_lora_rank) has no KV heads in its cache to share"
        )


def _states(text: dict[str, Any], field: str) -> bool:
    overrides = text.get("per_layer_config")
    return field in text or (
        isinstance(overrides, dict) and any(isinstance(layer, dict) and field in layer for layer in overrides.values())
    )


def _per_layer(text: dict[str, Any], field: str, layer: int) -> int | None:
    """A count for one layer: from per_layer_config, from a list with one entry per layer, or the same for all."""
    value = text.get(field)
    if isinstance(value, list):
        if layer >= len(value):
            raise CheckpointError(f"config.json: {field} has {len(value)} entries, too few for layer {layer}")
        value = value[layer]
    overrides = text.get("per_layer_config")
    if isinstance(overrides, dict):
        layer_config = overrides.get(str(layer))
        if isinstance(layer_config, dict):
            value = layer_config.get(field, value)
    if value is None:
        return None
    if not _is_count(value):
        raise CheckpointError(
            f"config.json: {field} is {ascii(value)[:40]}, not a positive number up to {_MAX_COUNT:,}"
        )
    return value


def _count(text: dict[str, Any], field: str, model_type: str, limit: int = _MAX_COUNT) -> int:
    value = text.get(field)
    if not _is_count(value, limit):
        found = "is missing" if field not in text else f"is {ascii(value)[:40]}, not a positive number up to {limit:,}"
        raise CheckpointError(f"config.json: {model_type}: {field} {found}")
    return value


def _is_count(value: Any, limit: int = _MAX_COUNT) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= limit
