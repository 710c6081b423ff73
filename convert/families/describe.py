"""From a checkpoint to its attention layers, every claim checked against the tensors' names and shapes.

Shapes in one letter code: H query heads, G KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

import re
from typing import Any

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.errors import CheckpointError, RefusedError
from headfold.convert.families.config import KV_FIELD, AttentionConfig, attention_config
from headfold.convert.families.declared import Family
from headfold.convert.families.layout import AttentionLayer, HeadNorm, Projection, Rotary

_FLOATS = ("F64", "F32", "F16", "BF16")
_QUANTISED_NAMES = re.compile(
    r".*\.(qweight|qzeros|scales|g_idx|weight_scale\w*|weight_packed|SCB|absmax|quant_state.*)$"
)
_KEYS_OR_VALUES = re.compile(r".*\b(k|v|kv)_proj\.weight")
# Tensors that old checkpoints carry and that nothing reads.
_BUFFERS = ("rotary_emb.inv_freq", "bias", "masked_bias")
_OUTPUTS = ("o_proj", "out_proj", "dense")
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


def describe(checkpoint: Checkpoint) -> list[AttentionLayer]:
    """The attention layers of a checkpoint, by layer.

    A family that is not declared is recognised by its names and shapes, if it has a KV-head field; its rotary style is
    then unknown. Raises RefusedError for what cannot be converted, CheckpointError where tensors and config disagree.
    """
    config = attention_config(checkpoint.config)
    refuse_quantised(checkpoint)
    prefix, layers = _find_layers(checkpoint, config)
    if config.family is not None:
        return [_layer(checkpoint, config, config.family, prefix, index) for index in layers]
    family = _recognise(checkpoint, config, f"{prefix}{layers[0]}.self_attn.")
    try:
        described = [_layer(checkpoint, config, family, prefix, index) for index in layers]
    except CheckpointError as error:  # perhaps nothing is wrong with it, but for our understanding of it
        raise RefusedError(
            f"{config.model_type}: cannot be converted: a family that is not declared; {error}"
        ) from error
    _refuse_other_heads(checkpoint, config, described)
    return described


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Raises RefusedError for tensors whose names are those of quantised weights."""
    for name in checkpoint.tensors:
        if _QUANTISED_NAMES.match(name):
            raise RefusedError(
                f"{checkpoint.path}: the weights are quantised ({name}); "
                "convert the unquantised checkpoint and quantise the result"
            )


def _find_layers(checkpoint: Checkpoint, config: AttentionConfig) -> tuple[str, list[int]]:
    """The prefix of the layers' names (`model.layers.`) and the numbers of those that have attention."""
    family = config.family or Family()
    anchor = family.fused or "k_proj"
    # A number of more digits is no layer's. Braces would be fields to fill in where each head has a norm of its own.
    place = rf"(?P<prefix>(?:[^{{}}]*\.)?{family.layers}\.)(?P<index>[0-9]{{1,6}})\.{family.attention}\."
    pattern = re.compile(rf"{place}{anchor}\.weight")
    found: dict[str, set[int]] = {}
    for name in checkpoint.tensors:
        if match := pattern.fullmatch(name):
            found.setdefault(match["prefix"], set()).add(int(match["index"]))
    if config.is_nested and len(found) > 1:  # other towers have layers of their own
        found = {prefix: indices for prefix, indices in found.items() if "language_model." in prefix}
    if not found:
        _refuse_layout(checkpoint, config)
    if len(found) > 1:
        raise RefusedError(
            f"{config.model_type}: cannot be converted: it has attention layers in several places "
            f"({', '.join(sorted(found)[:3])})"
        )
    prefix, indices = next(iter(found.items()))
    may_lack = family.is_hybrid or config.family is None or "per_layer_config" in config.text
    missing = sorted(set(range(config.num_layers)) - indices)
    if may_lack:  # but not if something of its attention is there
        matches = map(re.compile(place).match, checkpoint.tensors)
        partial = {int(match["index"]) for match in matches if match and match["prefix"] == prefix}
        missing = [layer for layer in missing if layer in partial]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: config.json says num_hidden_layers {config.num_layers}, "
            f"but layer {missing[0]} has no {family.attention}.{anchor}.weight"
        )
    return prefix, sorted(indices)


def _refuse_layout(checkpoint: Checkpoint, config: AttentionConfig) -> None:
    names = list(checkpoint.tensors)
    if any("kv_a_proj" in name or "kv_b_proj" in name for name in names):
        reason = "latent attention has no KV heads in its cache to share"
    elif fused := [n for n in names if re.search(r"(qkv|query_key_value|c_attn|Wqkv|W_pack|qkv_proj)\b", n)]:
        reason = f"q, k and v are fused in one tensor ({fused[0]}) in a layout that is not known"
    else:
        reason = "no layers with q_proj, k_proj and v_proj are found in it"
    raise RefusedError(f"{config.model_type}: cannot be converted: {reason}")


def _recognise(checkpoint: Checkpoint, config: AttentionConfig, module: str) -> Family:
    """A declaration for a family that has none, from the names in its first attention layer."""
    if not config.states_kv_heads and not _class_has_kv_field(config):
        raise RefusedError(
            f"{config.model_type}: cannot be converted: neither its config.json nor a known class has {KV_FIELD}"
        )
    names = checkpoint.tensors.keys()
    output = next((name for name in _OUTPUTS if f"{module}{name}.weight" in names), _OUTPUTS[0])
    q_norm, k_norm = next((pair for pair in _NORMS if f"{module}{pair[1]}.weight" in names), _NORMS[0])
    kind: Any = None
    if f"{module}{k_norm}.weight" in names:
        shape = checkpoint.tensors[f"{module}{k_norm}.weight"].shape
        kind = "per_head" if len(shape) == 2 else "shared" if shape == (config.head_dim[0],) else "flat"
    return Family(rotary="unknown", output=output, norm=kind, q_norm=q_norm, k_norm=k_norm, is_hybrid=True)


def _refuse_other_heads(checkpoint: Checkpoint, config: AttentionConfig, layers: list[AttentionLayer]) -> None:
    """Cross-attention and the like: more K and V heads, whose number the same field of the config may set."""
    known = {projection.weight for layer in layers for projection in (layer.k, layer.v)}
    others = [name for name in checkpoint.tensors if _KEYS_OR_VALUES.fullmatch(name) and name not in known]
    if config.is_nested:
        others = [name for name in others if "language_model." in name]
    if others:
        raise RefusedError(f"{config.model_type}: cannot be converted: {others[0]} belongs to no self-attention layer")


def _class_has_kv_field(config: AttentionConfig) -> bool:
    """Whether transformers' config class of this type has the field itself, rather than swallowing an unknown key."""
    from transformers import CONFIG_MAPPING

    if config.model_type not in CONFIG_MAPPING:
        return False
    return KV_FIELD in getattr(CONFIG_MAPPING[config.model_type], "__annotations__", {})


def _layer(checkpoint: Checkpoint, config: AttentionConfig, family: Family, prefix: str, index: int) -> AttentionLayer:
    module = f"{prefix}{index}.{family.attention}"
    in_config = min(index, config.num_layers - 1)  # layers behind the last one (multi-token prediction) are like it
    num_heads = config.num_attention_heads[in_config]
    num_kv_heads = config.num_key_value_heads[in_config]
    head_dim = config.head_dim[in_config]
    hidden_size = config.hidden_size
    seen: set[str] = set()

    def shape_of(name: str) -> tuple[int, ...]:
        entry = checkpoint.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{checkpoint.path}: {name} is missing")
        if entry.dtype not in _FLOATS:
            raise RefusedError(
                f"{checkpoint.path}: {name} is stored as {entry.dtype}; unquantised weights are needed "
                f"({', '.join(_FLOATS)})"
            )
        seen.add(name)
        return entry.shape

    def projection(name: str, rows: int, columns: int, first_row: int = 0, total_rows: int | None = None) -> Projection:
        weight, bias = f"{module}.{name}.weight", f"{module}.{name}.bias"
        total_rows = total_rows or rows
        shape = shape_of(weight)
        if shape != (total_rows, columns):
            raise CheckpointError(
                f"{checkpoint.path}: {weight} should have the shape {[total_rows, columns]}, it has {list(shape)}: "
                f"config.json says {num_heads} query heads of head_dim {head_dim} and hidden_size "
                f"{hidden_size}; correct the one that is wrong"
            )
        if bias in checkpoint.tensors and shape_of(bias) != (total_rows,):
            raise CheckpointError(
                f"{checkpoint.path}: {bias} should have the shape {[total_rows]}, it has {list(shape_of(bias))}"
            )
        return Projection(weight, bias if bias in checkpoint.tensors else None, first_row)

    def head_norm(name: str, num: int) -> HeadNorm | None:
        return _head_norm(checkpoint, family, f"{module}.{name}", num, head_dim, shape_of)

    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
    if family.fused:
        total = q_rows + 2 * kv_rows
        _check_kv_rows(checkpoint, config, f"{module}.{family.fused}.weight", total, q_rows, num_heads, head_dim, 2)
        q = projection(family.fused, q_rows, hidden_size, 0, total)
        k = projection(family.fused, kv_rows, hidden_size, q_rows, total)
        v = projection(family.fused, kv_rows, hidden_size, q_rows + kv_rows, total)
    else:
        q = projection("q_proj", q_rows, hidden_size)
        _check_kv_rows(checkpoint, config, f"{module}.k_proj.weight", kv_rows, 0, num_heads, head_dim, 1)
        k = projection("k_proj", kv_rows, hidden_size)
        v = projection("v_proj", kv_rows, hidden_size)
    o = projection(family.output, hidden_size, q_rows)
    layer = AttentionLayer(
        index=index,
        module=_module_name(family, prefix, index),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        rotary=_rotary(config, family, index, head_dim),
        q=q,
        k=k,
        v=v,
        o=o,
        q_norm=head_norm(family.q_norm, num_heads),
        k_norm=head_norm(family.k_norm, num_kv_heads),
        clip_qkv=config.text.get("clip_qkv") if family.clips else None,
    )
    known = seen | {f"{module}.{name}" for name in (*family.extra, *_BUFFERS)}
    unknown = [name for name in checkpoint.tensors if name.startswith(f"{module}.") and name not in known]
    if unknown:
        raise RefusedError(
            f"{config.model_type}: cannot be converted: {unknown[0]} is a part of its attention that is not known"
        )
    return layer


def _module_name(family: Family, prefix: str, index: int) -> str:
    if family.module is not None:
        return family.module.format(index=index)
    name = f"{prefix}{index}.{family.attention}"
    return name if name.startswith(("model.", "language_model.", "transformer.")) else f"model.{name}"


def _check_kv_rows(
    checkpoint: Checkpoint,
    config: AttentionConfig,
    name: str,
    expected: int,
    query_rows: int,
    num_heads: int,
    head_dim: int,
    num_blocks: int,
) -> None:
    """The commonest fault of all: the config's number of KV heads is not that of the weights."""
    entry = checkpoint.tensors.get(name)
    if entry is None or not entry.shape or entry.shape[0] == expected:
        return
    rows = entry.shape[0]
    found, rest = divmod(rows - query_rows, head_dim * num_blocks)
    stated = config.text.get(KV_FIELD)
    says = f"says {KV_FIELD} {stated}" if config.states_kv_heads else f"has no {KV_FIELD}, which means {num_heads}"
    message = f"{checkpoint.path}: config.json {says}, so that {name} should have {expected} rows; it has {rows}"
    if rest or found <= 0:
        raise CheckpointError(message)
    if found == num_heads:
        raise CheckpointError(
            f"{message}: the weights have {found} KV heads. Set {KV_FIELD} to {found} again, then run "
            f"headfold convert {checkpoint.path} OUTPUT --kv-heads {stated}"
        )
    raise CheckpointError(f"{message}, those of {found} KV heads: correct the config")


def _head_norm(
    checkpoint: Checkpoint, family: Family, name: str, num_heads: int, head_dim: int, shape_of: Any
) -> HeadNorm | None:
    """The norm called `name`, if the checkpoint has it; its kind is the declared one, its shape is checked."""
    weight, bias = f"{name}.weight", f"{name}.bias"
    per_head = f"{name}.norms.{{head}}.weight"  # StableLM
    if family.norm == "per_head" and per_head.format(head=0) in checkpoint.tensors:
        template = per_head
        shape: tuple[int, ...] = (head_dim,)
        names = [per_head.format(head=head) for head in range(num_heads)]
        bias = f"{name}.norms.{{head}}.bias"
        biases = [bias.format(head=head) for head in range(num_heads)]
        has_bias = biases[0] in checkpoint.tensors
    elif weight in checkpoint.tensors:
        template, names, biases, has_bias = weight, [weight], [bias], bias in checkpoint.tensors
        shape = {"per_head": (num_heads, head_dim), "flat": (num_heads * head_dim,)}.get(
            family.norm or "shared", (head_dim,)
        )
    else:
        return None
    if family.norm is None:
        raise RefusedError(f"{weight}: a norm on q or k, which this family is not known to have")
    for tensor in names + (biases if has_bias else []):
        if shape_of(tensor) != shape:
            raise CheckpointError(
                f"{checkpoint.path}: {tensor} should have the shape {list(shape)}, it has {list(shape_of(tensor))}"
            )
    return HeadNorm(template, family.norm, bias if has_bias else None)


def _rotary(config: AttentionConfig, family: Family, layer: int, head_dim: int) -> Rotary:
    if family.rotary in ("none", "unknown"):
        return Rotary(family.rotary)
    if family.rotary_layers is not None and not family.rotary_layers(config.text, layer):
        return Rotary("none")
    if family.partial_rotary is None:
        return Rotary(family.rotary, head_dim)
    share = config.text.get("partial_rotary_factor")
    parameters = config.text.get("rope_parameters")
    if isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor", share)
    share = family.partial_rotary if share is None else share
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor is {ascii(share)[:40]}, not a share between 0 and 1")
    return Rotary(family.rotary, int(head_dim * share))
