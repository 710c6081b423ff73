"""What a run says of itself: metrics.jsonl, Accelerate's trackers, and a line on stderr that is redrawn.

metrics.jsonl holds one JSON object per line, of two kinds. After each step:
    step, tokens             so far
    loss                     nats per counted token: the mixture that is trained on; null if the step was skipped
    cross_entropy            nats per counted token
    divergence               from the teacher, nats per counted token times temperature squared; with distillation only
    learning_rate, gradient_norm (before clipping), counted_tokens (with a label), skipped, tokens_per_second
    mfu                      model FLOPs utilisation, where the peak of the device is known
After each evaluation (the first at step 0, before training):
    step, tokens, eval_loss  nats per token over the evaluation rows
    eval_tokens, eval_rows   how many were counted
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

_PEAK_FLOPS = {
    # Dense bfloat16 (float16 for V100), operations per second, from the vendors' data sheets.
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 150e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """Peak operations per second of one device in bfloat16, or None where that is not known."""
    if device.type != "cuda" or mixed_precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Floating point operations of one forward pass per token: 2 per weight in a matrix, and causal attention's.

    PaLM (Chowdhery et al. 2022), appendix B; halved attention, since the mask hides half of it. A backward pass costs
    twice as much.
    """
    config = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim >= 2)
    if not config.tie_word_embeddings:  # a look-up is no multiplication
        weights -= sum(parameter.numel() for parameter in model.get_input_embeddings().parameters())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim * sequence_length
    return 2.0 * weights + attention


class Reporter:
    """Writes metrics and shows progress, in the main process. In the others it does nothing."""

    def __init__(
        self,
        accelerator: Accelerator,
        metrics: Path,
        *,
        num_steps: int,
        tokens_per_step: int,
        flops_per_step: float,
        peak_flops: float | None,
    ) -> None:
        """`peak_flops` is that of one device; a step's operations are done by all of them."""
        self._accelerator = accelerator
        self._active = accelerator.is_main_process
        self._metrics = metrics
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._peak = peak_flops * accelerator.num_processes if peak_flops else None
        self._file: IO[str] | None = None
        self._bar: Progress | None = None
        self._seconds: deque[float] = deque(maxlen=20)
        self._since = 0.0
        self._tenth = 0

    @contextmanager
    def from_step(self, step: int) -> Iterator[None]:
        """Around the training that goes on after `step`: what metrics.jsonl says of later steps did not happen."""
        if not self._active:
            yield
            return
        keep_metrics(self._metrics, step if step else -1)
        self._tenth = 10 * step // self._num_steps
        with self._metrics.open("a", encoding="utf-8") as self._file:
            self.restart_clock()
            if not sys.stderr.isatty():
                yield
                return
            columns = (TextColumn("uptrain"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
            with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as self._bar:
                self._task = self._bar.add_task("uptrain", total=self._num_steps, completed=step, state="")
                yield

    def step(self, values: dict[str, Any]) -> None:
        """The metrics of a step that is done, to which the time it took adds its speed."""
        seconds = time.perf_counter() - self._since
        self.restart_clock()
        if not self._active:
            return
        values["tokens_per_second"] = round(self._tokens_per_step / seconds, 1)
        if self._peak:
            values["mfu"] = round(self._flops_per_step / seconds / self._peak, 4)
        self._write(values)
        self._seconds.append(seconds)
        self._show(values)

    def evaluation(self, values: dict[str, Any]) -> None:
        """The result of an evaluation."""
        if self._active:
            self._write(values)
            self.say(f"step {values['step']}: eval loss {values['eval_loss']:.4f}")
        self.restart_clock()

    def restart_clock(self) -> None:
        """The next step begins now; what came before it was no training."""
        self._since = time.perf_counter()

    def say(self, line: str) -> None:
        """One line for the user."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.console.print(f"uptrain: {line}", highlight=False, markup=False)
        else:
            print(f"uptrain: {line}", file=sys.stderr, flush=True)

    def _write(self, values: dict[str, Any]) -> None:
        assert self._file is not None
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in plain.items() if value is not None and key not in ("step", "skipped")}
        self._accelerator.log(numbers, step=values["step"])

    def _show(self, values: dict[str, Any]) -> None:
        mean_seconds = sum(self._seconds) / len(self._seconds)
        loss = "skipped" if values["loss"] is None else f"loss {values['loss']:.4f}"
        speed = f"{self._tokens_per_step / mean_seconds:,.0f} tokens/s"
        state = f"{values['tokens']:,} tokens  {loss}  lr {values['learning_rate']:.2e}  {speed}"
        if "mfu" in values:
            state += f"  MFU {values['mfu']:.1%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=values["step"], state=state)
            return
        tenth = 10 * values["step"] // self._num_steps
        if tenth > self._tenth:  # into a file: a line at each tenth
            self._tenth = tenth
            left = (self._num_steps - values["step"]) * mean_seconds
            self.say(f"step {values['step']}/{self._num_steps}  {state}  {left:,.0f} s left")


class TokenCounter:
    """Says every ten seconds how many tokens have been packed."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 10

    def __call__(self, num_tokens: int) -> None:
        if time.monotonic() >= self._next:
            self._next += 10
            print(f"uptrain: tokenizing, {num_tokens:,} tokens so far", file=sys.stderr, flush=True)


def keep_metrics(path: Path, last_step: int) -> None:
    """Remove what metrics.jsonl says of steps after `last_step`, and a line that a killed run left half-written."""
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= last_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
