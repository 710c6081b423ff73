"""What to measure, and how: the `eval` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Engine = Literal["headfold", "transformers", "vllm"]
PositiveInt = Annotated[int, Field(ge=1)]


class DecodeSettings(BaseModel):
    """Speed and memory of generating text, measured at every pair of a batch and a context."""

    model_config = ConfigDict(extra="forbid")

    batches: list[PositiveInt] = Field(
        default=[1, 8], min_length=1, description="Sequences decoded at once. Default: 1, 8."
    )
    contexts: list[PositiveInt] = Field(
        default=[512, 2048],
        min_length=1,
        description="Tokens in the cache when decoding starts. Contexts that the model's positions do not reach are "
        "left out, and the report says so. Default: 512, 2048.",
    )
    new_tokens: int = Field(
        default=32, ge=2, description="Decoding steps after the first token, each one timed. Default: 32 tokens."
    )
    repetitions: int = Field(
        default=3,
        ge=1,
        description="Times that each pair is measured, the models taking turns. Default: 3 repetitions.",
    )
    ladder_sequences: int = Field(
        default=32,
        ge=0,
        description="The ladder of concurrent sequences (1, 2, 4, ...) ends here, or earlier where memory does; 0 "
        "leaves it out. Default: 32 sequences.",
    )
    ladder_context: PositiveInt | None = Field(
        default=None,
        description="Context of the ladder, in tokens. Default: the longest of `contexts` that is measured.",
    )
    memory_limit_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory that the cache may take in the ladder, in GiB. Default: 80 % of what the device has "
        "free once the models are loaded.",
    )


class EvalSettings(BaseModel):
    """What to measure, and how. The same settings hold for all models of one report."""

    model_config = ConfigDict(extra="forbid")

    text: list[str] = Field(
        default_factory=list,
        description="Text for perplexity and divergence: files (.txt, .md, .jsonl, .json, .parquet), directories of "
        "them, or data sets. Default: none, and neither is measured.",
    )
    text_field: str = Field(default="text", description='Field of a record that holds its text. Default: "text".')
    text_split: str = Field(default="test", description='Split of a data set that is read. Default: "test".')
    max_text_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens taken from each text; the document that crosses the limit is cut at a word. Default: "
        "all of it.",
    )
    window: int | None = Field(
        default=None,
        ge=2,
        description="Tokens that the model sees at once. Default: its max_position_embeddings, at most 2048 tokens.",
    )
    stride: PositiveInt | None = Field(
        default=None,
        description="Tokens newly scored per window, each on at least window - stride tokens of context (after the "
        "first window). Default: the window, which is lm-eval's rolling rule.",
    )
    bos: Literal["document", "window"] = Field(
        default="document",
        description="Where the BOS token (EOS where there is none) stands, once: before each document, as lm-eval "
        "has it, or before each window, for models that break without it. Default: document.",
    )
    batch_tokens: PositiveInt = Field(
        default=4096,
        description="Tokens per forward pass when scoring text. Changes speed and memory, not results. Default: "
        "4096 tokens.",
    )
    divergence: bool = Field(
        default=True,
        description="Whether to compare next-token distributions with the first model's (KL divergence). Holds all "
        "models in memory at once; without it they are loaded one at a time. Default: true.",
    )
    tasks: list[str] = Field(default_factory=list, description="Tasks of lm-eval, by name. Default: none.")
    task_directory: str | None = Field(
        default=None, description="Directory with task files of your own, such as tasks over local data. Default: none."
    )
    task_limit: PositiveInt | None = Field(default=None, description="Items taken from each task. Default: all.")
    num_fewshot: int | None = Field(
        default=None, ge=0, description="Examples in the prompt. Default: each task's own number."
    )
    decode: DecodeSettings | None = Field(
        default_factory=DecodeSettings, description="Decode speed and memory; null leaves them out."
    )
    engine: Engine = Field(
        default="transformers",
        description="Attention used in all measurements: headfold (our kernels), transformers (its own choice, sdpa "
        "where a class has it), or vllm (decode speed only, where vLLM is installed). Default: transformers.",
    )
    device: str | None = Field(
        default=None, description="A torch device, such as cpu or cuda:0. Default: a GPU where there is one."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Weights and cache while measuring. Default: float32 on a CPU, bfloat16 elsewhere."
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether code inside a checkpoint may run. Default: false."
    )
    bootstrap_samples: int = Field(default=2000, ge=100, description="Resamples behind each interval. Default: 2000.")
    seed: int = Field(default=0, ge=0, description="Seed of prompts and resampling. Default: 0.")
