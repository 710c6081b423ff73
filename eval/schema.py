"""The result of an evaluation: report.json, typed and versioned.

It is complete: report.py renders it and measures nothing. Sizes are in bytes, times in seconds, losses in nats per
token. A part that was not measured is null or an empty list. A field that is added, removed or changed makes a new
version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from headfold.convert.errors import RefusedError

SCHEMA_VERSION = 1


class Section(BaseModel):
    # With FiniteFloat throughout: a NaN or an infinity is a failed measurement and must never become a result.
    model_config = ConfigDict(extra="forbid")


class Interval(Section):
    """A value with its 95 % interval; null ends where there is too little data for one."""

    value: FiniteFloat
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None


class ModelRecord(Section):
    """One of the models. `role` is before (the MHA model), converted, or after (uptrained, or converted and left so).

    method, grouping and uptraining_tokens come from the record that converting and uptraining left,
    headfold.json.
    """

    role: str
    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int | None = None
    stored_dtype: str
    method: str | None = None
    grouping: str | None = None
    uptraining_tokens: int | None = None


class TextRecord(Section):
    """A text that was scored. `sha256` is of the file as it lies on disk (of name and version for a hub data set)."""

    name: str
    sha256: str
    num_documents: int
    num_skipped: int
    num_tokens: int
    num_words: int
    num_bytes: int


class Conditions(Section):
    """Under which everything was measured; the same for all models."""

    device: str
    device_name: str
    dtype: str
    engine: str
    attention: str
    num_threads: int
    window: int | None = None
    stride: int | None = None
    bos: Literal["document", "window", "none"] | None = None
    bos_token: str | None = None
    text_sha256: str | None = None
    texts: list[TextRecord] = []
    seed: int
    versions: dict[str, str]
    platform: str


class ModelPerplexity(Section):
    """All of one model's units: the sum of log-likelihoods over the count of tokens, words or bytes.

    per_word is null where it is beyond a float, as in text without spaces.
    """

    role: str
    log_likelihood: FiniteFloat
    per_token: FiniteFloat
    per_word: FiniteFloat | None
    per_byte: FiniteFloat
    bits_per_byte: FiniteFloat
    nats_per_token: FiniteFloat


class PerplexityChange(Section):
    """One model against the MHA model, on the same tokens.

    log_ratio: mean ln(perplexity ratio), which is the loss in nats per token that was added, with the standard error
    from the spread between units (documents or windows); ratio: the perplexity ratio with its bootstrap interval.
    """

    role: str
    log_ratio: FiniteFloat
    log_ratio_standard_error: FiniteFloat | None = None
    ratio: Interval


class TextPerplexity(Section):
    """Perplexity per token on one of several texts, by role."""

    name: str
    per_token: dict[str, FiniteFloat]


class Perplexity(Section):
    """Per token at the top; every unit under `models`. `converted` is null where the conversion was not given."""

    before: FiniteFloat
    converted: FiniteFloat | None
    after: FiniteFloat
    num_tokens: int
    num_words: int
    num_bytes: int
    unit: Literal["document", "window"]
    num_units: int
    models: list[ModelPerplexity]
    changes: list[PerplexityChange]
    by_text: list[TextPerplexity] = []


class PositionBin(Section):
    """Mean KL over tokens predicted from `first` to `last` tokens of context, both included."""

    first: int
    last: int
    mean_kl: FiniteFloat
    num_tokens: int


class Divergence(Section):
    """KL(MHA model || model) of next-token distributions, in nats, and the share of equal top tokens."""

    role: str
    mean_kl: FiniteFloat
    mean_kl_standard_error: FiniteFloat | None = None
    median_kl: FiniteFloat
    p999_kl: FiniteFloat
    top_token_agreement: FiniteFloat
    num_tokens: int
    by_position: list[PositionBin]


class CacheBytesPerToken(Section):
    """KV cache of one token over all layers, counted in the cache that the model really filled.

    Entries are counted and multiplied by the width of `dtype`, the dtype in which the MHA checkpoint is stored.
    """

    before: FiniteFloat
    after: FiniteFloat
    dtype: str
    num_tokens: int


class Latency(Section):
    median: FiniteFloat
    p90: FiniteFloat
    p99: FiniteFloat


class Speed(Section):
    """One model at one batch and context.

    tokens_per_second counts decoded tokens of all sequences over decoding time alone. bandwidth_share (GPUs only):
    weights and cache that a step must read over its median time, as a share of the copy bandwidth measured on the
    same device.
    """

    time_to_first_token_s: FiniteFloat
    time_per_output_token_s: Latency
    tokens_per_second: FiniteFloat
    cache_bytes: int
    peak_memory_bytes: int | None = None
    bandwidth_share: FiniteFloat | None = None


class Spread(Section):
    """Ratio of before to after, repetition by repetition: the median, the lowest and the highest."""

    median: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class DecodePoint(Section):
    """Both models at one batch and context. A speed-up above 1 means that `after` is faster."""

    batch: int
    context: int
    before: Speed
    after: Speed
    speedup: Spread
    first_token_speedup: Spread


class Rung(Section):
    """So many concurrent sequences; null for a model whose cache no longer fits."""

    sequences: int
    before: Speed | None
    after: Speed | None


class Ladder(Section):
    """Concurrent sequences until memory ends. Bytes of cache are those of the run, in `conditions.dtype`."""

    context: int
    new_tokens: int
    memory_limit_bytes: int | None
    rungs: list[Rung]


class TaskMetric(Section):
    """One metric of one task. `difference` is after - before on the same items; p_value is McNemar's."""

    task: str
    metric: str
    num_items: int
    higher_is_better: bool
    before: FiniteFloat
    converted: FiniteFloat | None
    after: FiniteFloat
    difference: Interval
    num_lost: int | None = None
    num_won: int | None = None
    p_value: FiniteFloat | None = None


class TrainingPoint(Section):
    """Held-out loss during uptraining, in nats per token on the training's own evaluation text."""

    tokens: int
    eval_loss: FiniteFloat


class DecodeSetup(Section):
    """How decode was timed: steps after the first token, and how often each point was measured."""

    new_tokens: int
    repetitions: int


class Report(Section):
    schema_version: Literal[1] = 1
    created: str
    verdict: str
    models: list[ModelRecord]
    perplexity: Perplexity | None = None
    recovered_share: FiniteFloat | None = None
    recovered_share_interval: Interval | None = None
    divergence: list[Divergence] = []
    cache_bytes_per_token: CacheBytesPerToken
    decode: list[DecodePoint] = []
    decode_setup: DecodeSetup | None = None
    ladder: Ladder | None = None
    tasks: list[TaskMetric] = []
    training: list[TrainingPoint] = []
    notes: list[str] = []
    conditions: Conditions

    def model(self, role: str) -> ModelRecord | None:
        return next((model for model in self.models if model.role == role), None)


def read_report(path: Path) -> Report:
    """Reads report.json. Raises RefusedError where it is not one, or of another schema version."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RefusedError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(map(str, detail["loc"])) or "top level"
        raise RefusedError(
            f"{path}: not a report of schema version {SCHEMA_VERSION} ({place}: {detail['msg']})."
        ) from error
