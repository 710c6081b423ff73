"""What a conversion is asked to do; the part of a recipe under `convert`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Method = Literal["fold", "aligned", "mean", "first", "random"]
Grouping = Literal["adjacent", "similar"]


class ConvertSettings(BaseModel):
    """Settings of `convert_checkpoint`. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    num_key_value_heads: int = Field(
        gt=0, description="KV heads per layer of the result; it must divide those there are."
    )
    method: Method | None = Field(
        None,
        description="How the heads of a group become one: fold (best without training) and aligned need calibration "
        "text; mean is the GQA paper's; first and random are its baselines. Default: fold with calibration, else mean.",
    )
    grouping: Grouping = Field(
        "adjacent", description="Which heads share a KV head: neighbours, or the most similar ones (fold and aligned)."
    )
    calibration: str | None = Field(
        None, description="Text that stands for the model's use: a file, a directory or a data set. Default: none."
    )
    calibration_tokens: int | None = Field(
        None, gt=0, description="Tokens of the calibration text to read. Default: what the method recommends."
    )
    seed: int = Field(0, ge=0, description="Seed of everything random.")
    trust_remote_code: bool = Field(False, description="Whether code inside the checkpoint may run (for calibration).")

    @model_validator(mode="after")
    def _consistent(self) -> ConvertSettings:
        if self.method is None:
            self.method = "fold" if self.calibration else "mean"
        calibrated = self.method in ("fold", "aligned")
        if calibrated and not self.calibration:
            raise ValueError(f"method {self.method} needs calibration text")
        if self.calibration and not calibrated:
            raise ValueError(f"method {self.method} uses no calibration text; take fold, or leave the text out")
        if self.grouping == "similar" and not calibrated:
            raise ValueError(f"grouping similar needs method fold or aligned, not {self.method}")
        return self
