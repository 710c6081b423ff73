"""What a model family looks like on disk, and the attention layers of one checkpoint in those terms."""

from headfold.convert.families.config import AttentionConfig, attention_config, with_num_key_value_heads
from headfold.convert.families.describe import describe
from headfold.convert.families.layout import AttentionLayer, HeadNorm, Projection, Rotary

__all__ = [
    "AttentionConfig",
    "AttentionLayer",
    "HeadNorm",
    "Projection",
    "Rotary",
    "attention_config",
    "describe",
    "with_num_key_value_heads",
]
