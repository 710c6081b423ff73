"""Exact re-maps: models whose class has no KV-head field, as the same function in a class that has one.

GPT-NeoX with parallel residual (Pythia) and GPT-J become Phi. Phi's layer is theirs: attention and MLP side by side on
a normed input, every projection with a bias. What differs is moved into the weights:

- GPT-NeoX has a LayerNorm for each of the two branches, Phi one for both. Phi's gets scale 1 and shift 0, and each
  branch's own scale s and shift t go into what reads it: W (s x + t) + b = (W diag(s)) x + (W t + b).
- GPT-NeoX stores q, k and v of one head next to each other in one tensor.
- GPT-J rotates channels (2i, 2i + 1), Phi (i, i + n/2): the rows of q and k are permuted alike; no logit sees that.

GPT-2, whose Conv1D stores matrices transposed, becomes GPTBigCode, and so does OPT, whose first two position embeddings
no token ever has. That class has one KV head or all, so one is the only number they can be converted to. The same
holds for GPTBigCode and Falcon without multi_query: their heads are stored as [q k v], and become blocks of q, k and v.

Rows are computed where they are read, in float32 (float64 for float32 weights), and rounded once to the stored dtype.

Shapes in one letter code: H heads, D head_dim, E hidden size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headfold.convert.checkpoint import Checkpoint, row_blocks
from headfold.convert.errors import CheckpointError, RefusedError
from headfold.convert.families.config import KV_FIELD, AttentionConfig, attention_config
from headfold.convert.families.declared import MULTI_QUERY_FAMILIES
from headfold.convert.families.describe import refuse_quantised
from headfold.convert.header import DTYPE_BITS, TensorEntry, torch_dtype

if TYPE_CHECKING:
    import torch

    Rows = Callable[[int, int], torch.Tensor]

REMAPPED = {"gpt_neox": "phi", "gptj": "phi", "gpt2": "gpt_bigcode", "opt": "gpt_bigcode"}
"""The model types that are re-mapped, and what they become."""

_OPT_POSITION_OFFSET = 2
_NOT_HEEDED = ("head_dim", "per_layer_config", "text_config")
"""What the source's class has no use for if a config says it, and what the target's would heed."""

# Buffers of old checkpoints, which the classes compute themselves.
_BUFFERS = re.compile(r".*\.(attention|attn|self_attention)\.(bias|masked_bias|rotary_emb\.inv_freq)")


def remap_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the re-mapped model; the config itself for a family that needs none.

    Raises RefusedError for models of these families that have no exact counterpart.
    """
    remaps = {"gpt_neox": _neox_config, "gptj": _gptj_config, "gpt2": _gpt2_config, "opt": _opt_config}
    remaps |= {"gpt_bigcode": _bigcode_config, "falcon": _falcon_config}
    if config["model_type"] not in remaps:
        return config
    return remaps[config["model_type"]]({key: value for key, value in config.items() if key not in _NOT_HEEDED})


def remap(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as one of the re-mapped class, its tensors computed as they are read; itself if it needs none."""
    model_type = checkpoint.config["model_type"]
    builders = {"gpt_neox": _remap_neox, "gptj": _remap_gptj, "gpt2": _remap_gpt2, "opt": _remap_opt}
    builders |= {"gpt_bigcode": _remap_bigcode, "falcon": _remap_falcon}
    if model_type not in builders:
        return checkpoint
    config = remap_config(checkpoint.config)
    if model_type in MULTI_QUERY_FAMILIES and checkpoint.config.get("multi_query", True):
        return replace(checkpoint, config=config)
    counts = attention_config(config)
    refuse_quantised(checkpoint)
    index = _index_without_counts(checkpoint)
    target = replace(checkpoint, config=config, tensors={}, computed={}, index=index)
    builder = _Builder(checkpoint, target, counts)
    builders[model_type](builder)
    builder.finish()
    return target


def _index_without_counts(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if checkpoint.index is None:
        return None
    metadata = checkpoint.index.get("metadata")
    kept = metadata.items() if isinstance(metadata, dict) else ()
    return {**checkpoint.index, "metadata": {key: value for key, value in kept if key != "total_parameters"}}


class _Builder:
    """Collects the tensors of the target, each made of tensors of the source."""

    def __init__(self, source: Checkpoint, target: Checkpoint, config: AttentionConfig):
        self.source, self.target = source, target
        self.num_layers = config.num_layers
        self.head_dim = config.uniform("head_dim")
        self.hidden_size = config.hidden_size
        self._new: dict[str, list[TensorEntry]] = {}  # by the source tensor that they take the place of
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def entry(self, name: str, shape: tuple[int | None, ...] | None = None) -> TensorEntry:
        """A source tensor that the target takes in, its shape checked where it is given (None: any length)."""
        if name not in self.source.tensors:
            raise CheckpointError(f"{self.source.path}: {name} is missing")
        entry = self.source.tensors[name]
        wanted = entry.shape if shape is None else shape
        if len(wanted) != len(entry.shape) or any(w not in (None, n) for w, n in zip(wanted, entry.shape, strict=True)):
            raise CheckpointError(
                f"{self.source.path}: {name} should have the shape {list(wanted)}, it has {list(entry.shape)}"
            )
        self._used.add(name)
        return entry

    def rename(self, old: str, new: str) -> None:
        entry = replace(self.entry(old), name=new)
        if old in self.source.computed:
            self.target.computed[new] = self.source.computed[old]
        self._new.setdefault(old, []).append(entry)

    def compute(self, place: str, new: str, shape: tuple[int, ...], rows: Rows) -> None:
        """A tensor in the shard and the dtype of `place`."""
        entry = self.entry(place)
        nbytes = math.prod(shape) * DTYPE_BITS[entry.dtype] // 8
        self._new.setdefault(place, []).append(TensorEntry(new, entry.file, entry.dtype, shape, 0, nbytes))

        def stored(start: int, stop: int) -> torch.Tensor:
            tensor = rows(start, stop).to(torch_dtype(entry.dtype))
            if not tensor.isfinite().all():
                raise CheckpointError(f"{self.source.path}: {new} is not finite in {entry.dtype} after the re-map")
            return tensor

        self.target.computed[new] = stored

    def constant(self, place: str, new: str, shape: tuple[int, ...], value: float) -> None:
        def rows(start: int, stop: int) -> torch.Tensor:
            import torch

            return torch.full((stop - start, *shape[1:]), value, dtype=torch.float32)

        self.compute(place, new, shape, rows)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a source tensor, in float32 or float64."""
        import torch

        tensor = self.source.read(name, (start, stop))
        return tensor.to(torch.float64 if tensor.dtype in (torch.float32, torch.float64) else torch.float32)

    def finish(self) -> None:
        """The entries in the source's order; whatever was not used must be a known buffer."""
        for name in self.source.tensors:
            if name not in self._used and not _BUFFERS.fullmatch(name):
                raise RefusedError(
                    f"{self.source.config['model_type']}: cannot be converted: {name} is a tensor that is not known"
                )
            for entry in self._new.get(name, ()):
                self.target.tensors[entry.name] = entry


# -------------------------------------------------------------------------------------------------- GPT-NeoX, Pythia


def _neox_config(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("use_parallel_residual", True) is not True:
        raise RefusedError(
            "gpt_neox: cannot be converted: use_parallel_residual is false, and no class with a KV-head field has "
            "LayerNorms, biases and a sequential residual as this model does"
        )
    rope = dict(config["rope_parameters"]) if isinstance(config.get("rope_parameters"), dict) else {}
    theta = rope.get("rope_theta", config.get("rotary_emb_base", 10000.0))
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    gone = {"rotary_emb_base", "rotary_pct", "use_parallel_residual", "attention_bias", "hidden_dropout"}
    gone |= {"classifier_dropout", "is_decoder", "rope_parameters"}
    dropout = config.get("hidden_dropout", 0.0)
    return _phi_config(config, gone, theta, share, rope, dropout, hidden_act=config.get("hidden_act", "gelu"))


def _phi_config(
    config: dict[str, Any],
    gone: set[str],
    theta: float,
    share: float,
    rope: dict[str, Any],
    dropout: float,
    **values: Any,
) -> dict[str, Any]:
    """A Phi config that keeps what both classes share, in the order of the source. Rotary settings stand in both the
    places where versions of transformers look for them, because older ones fall back to defaults without a word."""
    kept = {key: value for key, value in config.items() if key not in gone}
    return {
        **kept,
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "num_key_value_heads": values.get("num_attention_heads", config.get("num_attention_heads")),
        "layer_norm_eps": config.get("layer_norm_eps", 1e-5),
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "qk_layernorm": False,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "rope_theta": theta,
        "partial_rotary_factor": share,
        "rope_parameters": {"rope_type": "default", **rope, "rope_theta": theta, "partial_rotary_factor": share},
        **values,
    }


def _remap_neox(builder: _Builder) -> None:
    hidden = builder.hidden_size
    builder.rename("gpt_neox.embed_in.weight", "model.embed_tokens.weight")
    for layer in range(builder.num_layers):
        old, new = f"gpt_neox.layers.{layer}", f"model.layers.{layer}"
        norms = f"{old}.input_layernorm", f"{old}.post_attention_layernorm"
        for norm in norms:
            builder.entry(f"{norm}.weight", (hidden,))
            builder.entry(f"{norm}.bias", (hidden,))
        builder.constant(f"{norms[0]}.weight", f"{new}.input_layernorm.weight", (hidden,), 1.0)
        builder.constant(f"{norms[0]}.weight", f"{new}.input_layernorm.bias", (hidden,), 0.0)
        qkv = f"{old}.attention.query_key_value"
        builder.entry(f"{qkv}.weight", (3 * hidden, hidden))
        for part, name in enumerate("qkv"):
            heads = _neox_heads(builder, qkv, part)
            _fold_norm(builder, qkv, f"{new}.self_attn.{name}_proj", (hidden, hidden), heads, norms[0])
        _rename_linear(builder, f"{old}.attention.dense", f"{new}.self_attn.dense", hidden)
        up = f"{old}.mlp.dense_h_to_4h"
        num_rows = builder.entry(f"{up}.weight", (None, hidden)).shape[0]
        _fold_norm(builder, up, f"{new}.mlp.fc1", (num_rows, hidden), _plain_rows(builder, up), norms[1])
        _rename_linear(builder, f"{old}.mlp.dense_4h_to_h", f"{new}.mlp.fc2", hidden)
    builder.rename("gpt_neox.final_layer_norm.weight", "model.final_layernorm.weight")
    builder.rename("gpt_neox.final_layer_norm.bias", "model.final_layernorm.bias")
    head = next((name for name in ("embed_out.weight", "lm_head.weight") if builder.has(name)), None)
    if head is not None:
        builder.rename(head, "lm_head.weight")
    place = head or "gpt_neox.embed_in.weight"
    builder.constant(place, "lm_head.bias", (builder.entry(place, (None, hidden)).shape[0],), 0.0)


Linear = Callable[[int, int], "tuple[torch.Tensor, torch.Tensor | None]"]
"""Weight rows and bias rows start..stop-1 of a linear layer; the bias may be absent."""


def _neox_heads(builder: _Builder, name: str, part: int) -> Linear:
    """Rows of q (part 0), k (1) or v (2) of a fused tensor whose heads are stored as [q k v]."""
    head_dim = builder.head_dim

    def pick(tensor: str, start: int, stop: int) -> torch.Tensor:
        first, last = start // head_dim, (stop - 1) // head_dim + 1  # whole heads
        heads = builder.read(tensor, 3 * head_dim * first, 3 * head_dim * last).unflatten(
            0, (last - first, 3, head_dim)
        )
        return heads[:, part].flatten(0, 1)[start - first * head_dim : stop - first * head_dim]

    def rows(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = pick(f"{name}.bias", start, stop) if builder.has(f"{name}.bias") else None
        return pick(f"{name}.weight", start, stop), bias

    return rows


def _plain_rows(builder: _Builder, name: str) -> Linear:
    def rows(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = builder.read(f"{name}.bias", start, stop) if builder.has(f"{name}.bias") else None
        return builder.read(f"{name}.weight", start, stop), bias

    return rows


def _fold_norm(builder: _Builder, place: str, new: str, shape: tuple[int, int], linear: Linear, norm: str) -> None:
    """A linear layer that takes in the scale and shift of the LayerNorm before it."""
    if builder.has(f"{place}.bias"):
        builder.entry(f"{place}.bias", builder.entry(f"{place}.weight").shape[:1])

    def weight(start: int, stop: int) -> torch.Tensor:
        return linear(start, stop)[0] * builder.read(f"{norm}.weight", 0, shape[1])

    def bias(start: int, stop: int) -> torch.Tensor:
        import torch

        shift = builder.read(f"{norm}.bias", 0, shape[1])
        parts = []
        for block in row_blocks(builder.source.tensors[f"{place}.weight"], start, stop):
            rows, own = linear(*block)
            shift = shift.to(rows.dtype)
            parts.append(rows @ shift + (0 if own is None else own.to(rows.dtype)))
        return torch.cat(parts)

    builder.compute(f"{place}.weight", f"{new}.weight", shape, weight)
    builder.compute(f"{place}.weight", f"{new}.bias", shape[:1], bias)


def _rename_linear(builder: _Builder, old: str, new: str, num_rows: int) -> None:
    """A linear layer as it is, with a bias of zeros if it has none."""
    builder.rename(f"{old}.weight", f"{new}.weight")
    if builder.has(f"{old}.bias"):
        builder.rename(f"{old}.bias", f"{new}.bias")
    else:
        builder.constant(f"{old}.weight", f"{new}.bias", (num_rows,), 0.0)


# --------------------------------------------------------------------------------------------------------------- GPT-J


def _gptj_config(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config.get("n_embd", 4096), config.get("n_head", 16)
    rotary_dim = config.get("rotary_dim", 64)
    for name, value in (("n_embd", hidden), ("n_head", heads), ("rotary_dim", rotary_dim)):
        if type(value) is not int or value <= 0:
            raise RefusedError(f"gptj: cannot be converted: {name} is {ascii(value)[:40]}, not a positive number")
    head_dim = hidden // heads
    if hidden % heads or rotary_dim > head_dim or rotary_dim % 2:
        raise RefusedError(
            f"gptj: cannot be converted: n_embd {ascii(hidden)[:40]}, n_head {ascii(heads)[:40]} and "
            f"rotary_dim {ascii(rotary_dim)[:40]} do not go together"
        )
    share = rotary_dim / head_dim
    if int(head_dim * share) != rotary_dim:  # a share that rounds down to one channel less
        share = (rotary_dim + 0.5) / head_dim
    inner = config.get("n_inner")
    gone = {"n_embd", "n_head", "n_layer", "n_positions", "n_inner", "rotary_dim", "activation_function", "attn_pdrop"}
    gone |= {"layer_norm_epsilon", "resid_pdrop", "embd_pdrop"}
    return _phi_config(
        config,
        gone,
        10000.0,
        share,
        {},
        config.get("resid_pdrop", 0.0),
        hidden_size=hidden,
        intermediate_size=4 * hidden if inner is None else inner,
        num_hidden_layers=config.get("n_layer", 28),
        num_attention_heads=heads,
        max_position_embeddings=config.get("n_positions", 2048),
        hidden_act=config.get("activation_function", "gelu_new"),
        layer_norm_eps=config.get("layer_norm_epsilon", 1e-5),
        attention_dropout=config.get("attn_pdrop", 0.0),
        embd_pdrop=config.get("embd_pdrop", 0.0),
    )


def _remap_gptj(builder: _Builder) -> None:
    hidden = builder.hidden_size
    rotary_dim = builder.source.config.get("rotary_dim", 64)
    builder.rename("transformer.wte.weight", "model.embed_tokens.weight")
    for layer in range(builder.num_layers):
        old, new = f"transformer.h.{layer}", f"model.layers.{layer}"
        for leaf in ("weight", "bias"):
            builder.rename(f"{old}.ln_1.{leaf}", f"{new}.input_layernorm.{leaf}")
        for name in "qkv":
            place = f"{old}.attn.{name}_proj.weight"
            builder.entry(place, (hidden, hidden))
            if name == "v":
                builder.rename(place, f"{new}.self_attn.v_proj.weight")
            else:
                rows = _half_rotary_rows(builder, place, rotary_dim)
                builder.compute(place, f"{new}.self_attn.{name}_proj.weight", (hidden, hidden), rows)
            builder.constant(place, f"{new}.self_attn.{name}_proj.bias", (hidden,), 0.0)
        _rename_linear(builder, f"{old}.attn.out_proj", f"{new}.self_attn.dense", hidden)
        for old_name, new_name in (("fc_in", "fc1"), ("fc_out", "fc2")):
            _rename_linear(builder, f"{old}.mlp.{old_name}", f"{new}.mlp.{new_name}", hidden)
    for leaf in ("weight", "bias"):
        builder.rename(f"transformer.ln_f.{leaf}", f"model.final_layernorm.{leaf}")
    if builder.has("lm_head.weight"):
        builder.rename("lm_head.weight", "lm_head.weight")
    builder.rename("lm_head.bias", "lm_head.bias")


def _half_rotary_rows(builder: _Builder, name: str, rotary_dim: int) -> Rows:
    """Rows of q or k in whose heads channels (2i, 2i + 1) have become (i, i + rotary_dim/2)."""
    head_dim = builder.head_dim
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]

    def rows(start: int, stop: int) -> torch.Tensor:
        first, last = start // head_dim, (stop - 1) // head_dim + 1  # whole heads
        heads = builder.source.read(name, (first * head_dim, last * head_dim)).unflatten(0, (last - first, head_dim))
        return heads[:, order].flatten(0, 1)[start - first * head_dim : stop - first * head_dim]

    return rows


# -------------------------------------------------------------------------------------- GPT-2, OPT, GPTBigCode, Falcon


def _gpt2_config(config: dict[str, Any]) -> dict[str, Any]:
    for field in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(field):
            raise RefusedError(f"gpt2: cannot be converted: {field} is set, which GPTBigCode does not have")
    gone = {"reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "n_ctx"}
    kept = {key: value for key, value in config.items() if key not in gone and not key.startswith("summary_")}
    defaults = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "activation_function": "gelu_new"}
    return _bigcode_config(
        {
            **defaults,
            **kept,
            "architectures": ["GPTBigCodeForCausalLM"],
            "model_type": "gpt_bigcode",
            "multi_query": False,
        }
    )


def _bigcode_config(config: dict[str, Any]) -> dict[str, Any]:
    num_kv_heads = 1 if config.get("multi_query", True) else config.get("n_head", 12)
    return {**config, "multi_query": True, KV_FIELD: num_kv_heads}


def _remap_gpt2(builder: _Builder) -> None:
    hidden = builder.hidden_size
    prefix = "transformer." if builder.has("transformer.wte.weight") else ""
    for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"):
        builder.rename(f"{prefix}{name}", f"transformer.{name}")
    for layer in range(builder.num_layers):
        old, new = f"{prefix}h.{layer}", f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            for leaf in ("weight", "bias"):
                builder.rename(f"{old}.{norm}.{leaf}", f"{new}.{norm}.{leaf}")
        builder.entry(f"{old}.attn.c_attn.weight", (hidden, 3 * hidden))
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            num_columns, num_rows = builder.entry(f"{old}.{name}.weight", (None, None)).shape
            transposed = _transposed_rows(builder, f"{old}.{name}.weight")
            builder.compute(f"{old}.{name}.weight", f"{new}.{name}.weight", (num_rows, num_columns), transposed)
            builder.entry(f"{old}.{name}.bias", (num_rows,))
            builder.rename(f"{old}.{name}.bias", f"{new}.{name}.bias")
    if builder.has("lm_head.weight"):
        builder.rename("lm_head.weight", "lm_head.weight")


def _transposed_rows(builder: _Builder, name: str) -> Rows:
    def rows(start: int, stop: int) -> torch.Tensor:
        return builder.source.read(name)[:, start:stop].T

    return rows


def _opt_config(config: dict[str, Any]) -> dict[str, Any]:
    refusals = {
        "do_layer_norm_before is false": not config.get("do_layer_norm_before", True),
        "_remove_final_layer_norm is true": config.get("_remove_final_layer_norm"),
        "word_embed_proj_dim is not hidden_size": config.get("word_embed_proj_dim")
        not in (None, config.get("hidden_size", 768)),
    }
    for reason, holds in refusals.items():
        if holds:
            raise RefusedError(f"opt: cannot be converted: {reason} (as in opt-350m), which GPTBigCode does not have")
    names = {
        "n_embd": ("hidden_size", 768),
        "n_layer": ("num_hidden_layers", 12),
        "n_head": ("num_attention_heads", 12),
        "n_positions": ("max_position_embeddings", 2048),
        "n_inner": ("ffn_dim", 3072),
        "resid_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.0),
        "initializer_range": ("init_std", 0.02),
    }
    gone = {name for name, _ in names.values()} | {"do_layer_norm_before", "_remove_final_layer_norm", "layerdrop"}
    gone |= {"word_embed_proj_dim", "enable_bias", "layer_norm_elementwise_affine"}
    defaults = {"activation_function": "relu", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    return _bigcode_config(
        {
            **defaults,
            **{key: value for key, value in config.items() if key not in gone},
            "architectures": ["GPTBigCodeForCausalLM"],
            "model_type": "gpt_bigcode",
            "multi_query": False,
            **{new: config.get(old, default) for new, (old, default) in names.items()},
            "embd_pdrop": 0.0,
            "layer_norm_epsilon": 1e-5,
        }
    )


def _remap_opt(builder: _Builder) -> None:
    hidden = builder.hidden_size
    prefix = "model.decoder." if builder.has("model.decoder.embed_tokens.weight") else "decoder."
    builder.rename(f"{prefix}embed_tokens.weight", "transformer.wte.weight")
    positions = f"{prefix}embed_positions.weight"
    num_positions = builder.entry(positions, (None, hidden)).shape[0] - _OPT_POSITION_OFFSET
    if num_positions <= 0:
        raise CheckpointError(f"{builder.source.path}: {positions} has no rows but those that no token has")

    def position_rows(start: int, stop: int) -> torch.Tensor:
        return builder.source.read(positions, (start + _OPT_POSITION_OFFSET, stop + _OPT_POSITION_OFFSET))

    builder.compute(positions, "transformer.wpe.weight", (num_positions, hidden), position_rows)

    def norm(old: str, new: str, place: str) -> None:
        if builder.source.config.get("layer_norm_elementwise_affine", True):
            for leaf in ("weight", "bias"):
                builder.rename(f"{old}.{leaf}", f"{new}.{leaf}")
        else:
            builder.constant(place, f"{new}.weight", (hidden,), 1.0)
            builder.constant(place, f"{new}.bias", (hidden,), 0.0)

    for layer in range(builder.num_layers):
        old, new = f"{prefix}layers.{layer}", f"transformer.h.{layer}"
        projections = [f"{old}.self_attn.{name}_proj" for name in "qkv"]
        place = f"{projections[0]}.weight"
        for leaf, shape in (("weight", (hidden, hidden)), ("bias", (hidden,))):
            names = [f"{name}.{leaf}" for name in projections]
            fused, fused_shape = f"{new}.attn.c_attn.{leaf}", (3 * hidden, *shape[1:])
            if leaf == "bias" and not builder.has(names[0]):
                builder.constant(place, fused, fused_shape, 0.0)
                continue
            for name in names:
                builder.entry(name, shape)
            builder.compute(names[0], fused, fused_shape, _stacked_rows(builder, names, hidden))
        _rename_linear(builder, f"{old}.self_attn.out_proj", f"{new}.attn.c_proj", hidden)
        inner = builder.entry(f"{old}.fc1.weight", (None, hidden)).shape[0]
        _rename_linear(builder, f"{old}.fc1", f"{new}.mlp.c_fc", inner)
        _rename_linear(builder, f"{old}.fc2", f"{new}.mlp.c_proj", hidden)
        norm(f"{old}.self_attn_layer_norm", f"{new}.ln_1", place)
        norm(f"{old}.final_layer_norm", f"{new}.ln_2", place)
    norm(f"{prefix}final_layer_norm", "transformer.ln_f", f"{prefix}embed_tokens.weight")
    if builder.has("lm_head.weight"):
        builder.rename("lm_head.weight", "lm_head.weight")


def _stacked_rows(builder: _Builder, names: list[str], num_rows: int) -> Rows:
    """Rows of tensors of num_rows each, one behind the other."""

    def rows(start: int, stop: int) -> torch.Tensor:
        import torch

        parts = []
        for first, name in zip(range(0, stop, num_rows), names, strict=False):
            block = max(start - first, 0), min(stop - first, num_rows)
            if block[0] < block[1]:
                parts.append(builder.source.read(name, block))
        return torch.cat(parts)

    return rows


def _remap_bigcode(builder: _Builder) -> None:
    _remap_interleaved(builder, "attn.c_attn")


def _falcon_config(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("new_decoder_architecture"):
        raise RefusedError(
            "falcon: cannot be converted: with new_decoder_architecture its class in transformers caches every query "
            "head, so that fewer KV heads would save nothing"
        )
    if config.get("multi_query", True):
        return {**config, KV_FIELD: 1}
    return {**config, "multi_query": True, "num_kv_heads": 1, KV_FIELD: config.get("num_attention_heads", 71)}


def _remap_falcon(builder: _Builder) -> None:
    _remap_interleaved(builder, "self_attention.query_key_value")


def _remap_interleaved(builder: _Builder, fused: str) -> None:
    """Heads stored as [q k v] become blocks of q, k and v."""
    hidden = builder.hidden_size
    changed = set()
    for layer in range(builder.num_layers):
        for leaf, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
            name = f"transformer.h.{layer}.{fused}.{leaf}"
            if leaf == "weight" or builder.has(name):
                builder.entry(name, shape)
                builder.compute(name, name, shape, _blocked_rows(builder, name))
                changed.add(name)
    for name in builder.source.tensors:
        if name not in changed and not _BUFFERS.fullmatch(name):
            builder.rename(name, name)


def _blocked_rows(builder: _Builder, name: str) -> Rows:
    def rows(start: int, stop: int) -> torch.Tensor:
        heads = builder.source.read(name).unflatten(0, (-1, 3, builder.head_dim))
        return heads.transpose(0, 1).flatten(0, 2)[start:stop]

    return rows
