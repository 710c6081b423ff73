"""The attention layers of a checkpoint, in the terms that conversion needs.

Shapes in one letter code: H query heads, G KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RotaryKind = Literal["none", "half", "interleaved", "unknown"]


@dataclass(frozen=True)
class Rotary:
    """How a layer rotates q and k. Rotary is a property of the layer: some models leave it out of some layers.

    half: pair i is channels (i, i + num_channels/2). interleaved: pair i is channels (2i, 2i + 1). Channels from
    `num_channels` on are not rotated (partial rotary). unknown: a family that is not declared; heads may be merged as
    they are, but nothing may be folded from K into Q.
    """

    kind: RotaryKind
    num_channels: int = 0


@dataclass(frozen=True)
class Projection:
    """Where one of q, k, v, o of one layer is stored: a weight (rows, columns) as in torch.nn.Linear, and a bias.

    In a fused tensor the heads of this projection are the rows from `first_row` on (H*D of q, G*D of k and v).
    """

    weight: str
    bias: str | None = None
    first_row: int = 0


@dataclass(frozen=True)
class HeadNorm:
    """A learned norm on the projected q or k.

    shared: one weight (D) for all heads. per_head: one weight row per head (G, D); where each head has a tensor (D) of
    its own, `{head}` stands for its number in the names. flat: one weight (G*D) and one statistic over all heads
    together (OLMo2).
    """

    weight: str
    kind: Literal["shared", "per_head", "flat"]
    bias: str | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: counts, rotary, and the tensors that hold it."""

    index: int
    module: str
    """Dotted name of the attention module in the transformers model, e.g. `model.layers.0.self_attn`."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    rotary: Rotary
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    clip_qkv: float | None = None
    """q, k and v are clipped to +- this after their projections, so that they cannot be rescaled (OLMo)."""

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def is_fused(self) -> bool:
        """Whether q, k and v are rows of one tensor."""
        return self.q.weight == self.k.weight
