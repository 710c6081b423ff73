"""The attention layers of a checkpoint, in the terms that conversion needs.

Shapes in one letter code: H query heads, G KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RotaryKind = Literal["none", "half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """How a layer rotates q and k. Rotary is a property of the layer: some models leave it out of some layers.

    half: pair i is channels (i, i + num_channels/2). interleaved: pair i is channels (2i, 2i + 1). Channels from
    `num_channels` on are not rotated (partial rotary).
    """

    kind: RotaryKind
    num_channels: int = 0


@dataclass(frozen=True)
class Projection:
    """Where one of q, k, v, o of one layer is stored: a weight (rows, columns) as in torch.nn.Linear, and a bias."""

    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class HeadNorm:
    """A learned norm on the projected q or k.

    shared: one weight (D) for all heads. per_head: one weight row per head, flattened or not. flat: one weight (G*D)
    and one statistic over all heads together (OLMo2).
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

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads
