"""What a recipe's `uptrain` section holds."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headfold.uptrain.schedule import Schedule

ShareOrTokens = Annotated[float, Field(ge=0)]
"""A stretch of the training: up to 1 a share of the token budget, above 1 a number of tokens."""


_DECISIVE = {
    *("sequence_length", "isolate_documents", "batch_rows", "distillation", "mixed_precision", "seed"),
    *("learning_rate", "final_learning_rate", "schedule", "warmup", "decay"),
    *("weight_decay", "adam_beta1", "adam_beta2", "gradient_clip"),
}


class Distillation(BaseModel):
    """Learning from the unconverted model, beside or instead of the text itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the distillation term in the loss, the rest is cross-entropy. Default: 1, distillation "
        "alone, as Minitron retrains pruned models.",
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Divides the logits of both models in the distillation term. Default: 1."
    )


class UptrainSettings(BaseModel):
    """Data, budget, optimisation, evaluation and saves of the uptraining stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: list[str] = Field(
        min_length=1,
        description="Texts to train on: .txt, .md, .jsonl, .json, .parquet (also .gz), directories of these, or names "
        "of data sets. Documents are taken from the sources in turn until the token budget is filled, then shuffled.",
    )
    text_field: str = Field(default="text", description="Field that holds the text of a record. Default: text.")
    split: str = Field(default="train", description="Split of a data set. Default: train.")
    sequence_length: int = Field(default=2048, ge=2, description="Tokens per row. Default: 2048.")
    isolate_documents: bool = Field(
        default=True,
        description="Whether the documents in one row are hidden from each other: positions restart and attention "
        "stops at the boundary. Turn it off for a model that was pretrained on plainly packed rows. Default: true.",
    )

    tokens: int | None = Field(
        default=None, gt=0, description="Token budget. Give this, or share and pretraining_tokens. Default: none."
    )
    share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Token budget as a share of pretraining_tokens (alpha in the GQA paper, which uses 0.05). "
        "Default: none.",
    )
    pretraining_tokens: int | None = Field(
        default=None, gt=0, description="Tokens that the original model was trained on. Default: none."
    )
    batch_rows: int = Field(
        default=64, ge=1, description="Rows per optimizer step, over all processes and micro-batches. Default: 64."
    )
    micro_batch_rows: int = Field(
        default=1, ge=1, description="Rows that one process takes through the model at a time. Default: 1."
    )

    learning_rate: float = Field(default=1e-4, gt=0, description="Peak learning rate. Default: 1e-4.")
    final_learning_rate: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the end, as a share of the peak. Default: 0."
    )
    schedule: Literal["stable", "cosine"] = Field(
        default="stable",
        description="After the warm-up: stable (constant, then linear decay) or cosine. Default: stable.",
    )
    warmup: ShareOrTokens = Field(
        default=0.02,
        description="Length of the linear warm-up: up to 1 a share of the budget, above 1 tokens. Default: 0.02.",
    )
    decay: ShareOrTokens = Field(
        default=0.2,
        description="Length of the final decay of the stable schedule: up to 1 a share of the budget, above 1 tokens. "
        "Default: 0.2.",
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="AdamW's decoupled weight decay, on matrices only. Default: 0.1."
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradient's mean. Default: 0.9.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of its square's mean. Default: 0.95.")
    gradient_clip: float = Field(
        default=1.0, gt=0, description="Gradients of a larger norm are scaled down to this. Default: 1."
    )
    distillation: Distillation | None = Field(
        default=None, description="Learn from the unconverted model. Default: none, cross-entropy alone."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the order of the rows and of dropout. Default: 0.")

    eval_data: list[str] = Field(
        default_factory=list, description="Texts to evaluate on during training, as for data. Default: none."
    )
    eval_interval: ShareOrTokens = Field(
        default=0.1,
        gt=0,
        description="Distance between evaluations: up to 1 a share of the budget, above 1 tokens. Default: 0.1.",
    )
    eval_rows: int | None = Field(
        default=None, ge=1, description="Evaluate on the first rows of eval_data only. Default: on all."
    )
    save_interval: ShareOrTokens = Field(
        default=0.1,
        gt=0,
        description="Distance between saves: up to 1 a share of the budget, above 1 tokens. Default: 0.1.",
    )
    keep: int = Field(default=2, ge=1, description="Complete saves that are kept during training. Default: 2.")
    max_nonfinite_steps: int = Field(
        default=5, ge=1, description="Stop after so many steps in a row without a finite loss. Default: 5."
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="Accelerate's trackers to report to, e.g. tensorboard, wandb, trackio. Default: none.",
    )

    num_processes: int | None = Field(
        default=None, ge=1, description="Processes on this host. Default: one per GPU, or one on CPUs."
    )
    mixed_precision: Literal["no", "bf16"] = Field(
        default="bf16",
        description="bf16: float32 master weights, bfloat16 arithmetic. no: float32 throughout. Default: bf16.",
    )
    shard: bool = Field(
        default=False,
        description="Whether weights, gradients and optimizer state of student and teacher are spread over the "
        "processes (FSDP2) instead of repeated in each. Default: false.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, slower. Default: false."
    )
    attention: str | None = Field(
        default=None,
        description="transformers' attn_implementation, e.g. sdpa, flash_attention_2, flex_attention, eager. "
        "Default: transformers' choice for the model.",
    )

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _bare_no(cls, value: Any) -> Any:
        # YAML 1.1 reads a bare `no` as false.
        return "no" if value is False else value

    @model_validator(mode="after")
    def _check(self) -> UptrainSettings:
        if (self.tokens is None) == (self.share is None):
            raise ValueError("give the token budget once: either tokens, or share and pretraining_tokens")
        if self.share is not None and self.pretraining_tokens is None:
            raise ValueError("share needs pretraining_tokens, the tokens that the original model was trained on")
        schedule = self.learning_rate_schedule()
        if schedule.warmup_tokens + schedule.decay_tokens > schedule.total_tokens:
            raise ValueError(
                f"warmup ({schedule.warmup_tokens:,.0f} tokens) and decay ({schedule.decay_tokens:,.0f} tokens) do not "
                f"fit into the budget ({schedule.total_tokens:,} tokens)"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.batch_rows * self.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps: as many as reach the token budget."""
        budget = self.tokens if self.tokens is not None else (self.share or 0) * (self.pretraining_tokens or 0)
        return math.ceil(budget / self.tokens_per_step)

    @property
    def total_tokens(self) -> int:
        """The token budget, rounded up to whole steps."""
        return self.num_steps * self.tokens_per_step

    def in_tokens(self, stretch: float) -> float:
        """A share of the budget (up to 1) or a number of tokens (above 1), as a number of tokens."""
        return stretch * self.total_tokens if stretch <= 1 else stretch

    def learning_rate_schedule(self) -> Schedule:
        return Schedule(
            kind=self.schedule,
            peak=self.learning_rate,
            final=self.learning_rate * self.final_learning_rate,
            total_tokens=self.total_tokens,
            warmup_tokens=self.in_tokens(self.warmup),
            decay_tokens=self.in_tokens(self.decay) if self.schedule == "stable" else 0.0,
        )

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what the trained weights are, up to rounding.

        A run resumes under these only. The others may change between a stop and a resume: how the work is spread, and
        how often it is looked at and saved. The data is held by the fingerprint of its tokens instead of by its paths.
        """
        values = self.model_dump(mode="json", include=_DECISIVE)
        return {"total_tokens": self.total_tokens, **values}
