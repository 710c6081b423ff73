"""The stages in order: convert, uptrain, evaluate, report.

What passes between stages is a checkpoint directory. run.json records, for each stage, a fingerprint of everything
that went into it; a stage whose output stands and whose fingerprint is unchanged is skipped, and a stage that was
interrupted goes on where it was.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from headfold.convert import convert_checkpoint
from headfold.convert.check import verify_checkpoint
from headfold.convert.checkpoint import resolve_model
from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.convert.texts import text_fingerprint
from headfold.recipes.launch import launch_workers, num_processes_for
from headfold.recipes.schema import Recipe

RUN_FILE = "run.json"
RECIPE_FILE = "recipe.yaml"
SCHEMA_VERSION = 1

Say = Callable[[str], None]
"""Takes one line for the user."""


class RunDirectory:
    """A run's folder and its record, run.json."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self.recipe = recipe
        self.converted = path / "converted"
        self.uptrained = path / "uptrained"
        self.training_state = path / "uptrained.state"
        self.former = path / "uptrained.former"
        self.measurements = path / "eval" / "report.json"
        self.report = path / "report.json"
        self.recipe_file = path / RECIPE_FILE
        self._file = path / RUN_FILE
        self.stages: dict[str, dict[str, Any]] = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self._file.exists():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise RefusedError(
                    f"{self.path}: exists and is not a run of Headfold's (it holds no {RUN_FILE}); "
                    "choose another --output."
                )
            return {}
        try:
            record = json.loads(self._file.read_text(encoding="utf-8"))
            if record["schema_version"] != SCHEMA_VERSION:
                raise RefusedError(
                    f"{self._file}: written in version {record['schema_version']} of the format, this Headfold reads "
                    f"{SCHEMA_VERSION}; choose another --output."
                )
            return dict(record["stages"])
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise RefusedError(f"{self._file}: damaged ({error!r}); move it away to start anew.") from error

    def save(self) -> None:
        """Writes run.json and the resolved recipe, each aside and then renamed."""
        self.path.mkdir(parents=True, exist_ok=True)
        record = {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe.model_dump(mode="json"),
            "stages": self.stages,
            "versions": {name: version(name) for name in ("headfold", "torch", "transformers", "accelerate")},
        }
        _replace(self._file, json.dumps(record, indent=2) + "\n")
        _replace(self.recipe_file, yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False))

    @contextmanager
    def stage(self, name: str, inputs: dict[str, Any]) -> Iterator[None]:
        """Records one stage around its work."""
        fingerprint = _fingerprint(inputs)
        self.stages[name] = {"inputs": fingerprint, "state": "begun"}
        self.save()
        started = time.monotonic()
        yield
        self.stages[name] = {
            "inputs": fingerprint,
            "state": "complete",
            "seconds": round(time.monotonic() - started, 1),
            "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        self.save()

    def is_complete(self, name: str, inputs: dict[str, Any], output: Path) -> bool:
        """Whether the stage ended well with these inputs and its output still stands."""
        stage = self.stages.get(name, {})
        unchanged = stage.get("state") == "complete" and stage.get("inputs") == _fingerprint(inputs)
        return unchanged and _stands(output)

    def was_complete(self, name: str, inputs: dict[str, Any]) -> bool:
        """Whether the stage ended well, but with other inputs than these."""
        stage = self.stages.get(name, {})
        return stage.get("state") == "complete" and stage.get("inputs") != _fingerprint(inputs)


def default_directory(recipe: Recipe) -> Path:
    return Path("runs") / recipe.name


def convert(run: RunDirectory, say: Say, progress: Callable[[int, int], None]) -> None:
    """The converting stage: recipe.model -> converted/. `progress` is called with bytes done and in all."""
    settings = run.recipe.convert
    source = resolve_model(run.recipe.model, run.recipe.revision)
    inputs = {
        "source": _checkpoint_fingerprint(source),
        "calibration": text_fingerprint(settings.calibration) if settings.calibration else None,
        "settings": settings.model_dump(mode="json"),
    }
    if run.is_complete("convert", inputs, run.converted):
        say(f"convert: {run.converted} is complete and its inputs are unchanged; skipped")
        return
    say(f"convert: {run.recipe.model} -> {run.converted}")
    with run.stage("convert", inputs):
        convert_checkpoint(
            run.recipe.model,
            run.converted,
            revision=run.recipe.revision,
            force=True,
            progress=progress,
            **settings.model_dump(),
        )


def uptrain(run: RunDirectory, say: Say) -> None:
    """The training stage: converted/ + tokens -> uptrained/, in this process or in several that it starts."""
    settings = run.recipe.uptrain
    inputs = {
        "converted": _checkpoint_fingerprint(run.converted),
        "data": [text_fingerprint(source, split=settings.split) for source in settings.data],
        "settings": settings.decisive(),
    }
    if run.is_complete("uptrain", inputs, run.uptrained):
        say(f"uptrain: {run.uptrained} is complete and its inputs are unchanged; skipped")
        return
    if run.was_complete("uptrain", inputs):
        say(f"uptrain: the recipe or its inputs changed; the former result is kept as {run.former}")
        _set_aside(run)
    say(f"uptrain: {run.converted} -> {run.uptrained}")
    with run.stage("uptrain", inputs):
        num_processes = num_processes_for(settings.num_processes)
        if num_processes == 1:
            train_here(run)
        else:
            arguments = ["uptrain", str(run.recipe_file), "--output", str(run.path)]
            launch_workers(arguments, num_processes, mixed_precision=settings.mixed_precision)


def train_here(run: RunDirectory) -> None:
    """Trains in this process, which is one of several where a launcher started it."""
    from headfold.uptrain import uptrain as train

    if not run.converted.exists():
        raise RefusedError(
            f"{run.converted}: not there yet; run `headfold uptrain` once without a launcher (it converts first), or "
            f"`headfold convert` to that path."
        )
    teacher = None
    if run.recipe.uptrain.distillation is not None:
        teacher = resolve_model(run.recipe.model, run.recipe.revision)
    train(run.recipe.uptrain, run.converted, run.uptrained, teacher=teacher, state_dir=run.training_state)


def _set_aside(run: RunDirectory) -> None:
    """Keeps one former result, and clears the state that would resume it."""
    shutil.rmtree(run.former, ignore_errors=True)
    if run.uptrained.exists():
        run.uptrained.rename(run.former)
    shutil.rmtree(run.training_state, ignore_errors=True)


def evaluate(run: RunDirectory, say: Say, progress: Callable[[str, int, int], None]) -> None:
    """The measuring stage: the source, converted/ and uptrained/ -> eval/report.json."""
    from headfold.eval import evaluate as measure

    settings = run.recipe.eval
    source = resolve_model(run.recipe.model, run.recipe.revision)
    inputs = {
        "models": [_checkpoint_fingerprint(path) for path in (source, run.converted, run.uptrained)],
        "text": [text_fingerprint(text, split=settings.text_split) for text in settings.text],
        "settings": settings.model_dump(mode="json"),
    }
    if run.is_complete("eval", inputs, run.measurements):
        say(f"eval: {run.measurements} is complete and its inputs are unchanged; skipped")
        return
    say("eval: measuring the model before, after converting and after uptraining")
    with run.stage("eval", inputs):
        metrics = run.training_state / "metrics.jsonl"
        report = measure(source, [run.converted, run.uptrained], settings, training_metrics=metrics, progress=progress)
        run.measurements.parent.mkdir(parents=True, exist_ok=True)
        _replace(run.measurements, report.model_dump_json(indent=2) + "\n")


def report(run: RunDirectory) -> None:
    """Renders the measurements: report.json, report.md, report.html and model_card.md in the run's directory."""
    from headfold.eval import write_report
    from headfold.eval.schema import read_report

    write_report(read_report(run.measurements), run.path)


def summary(run: RunDirectory) -> str:
    """The report's verdict, and where to read more."""
    verdict = json.loads(run.report.read_text(encoding="utf-8"))["verdict"]
    return f"{verdict}\nReport: {run.report.with_suffix('.html')}"


def check_gates(run: RunDirectory) -> None:
    """Raises HeadfoldError (exit code 1) where the report falls short of what the recipe demands."""
    measured = json.loads(run.report.read_text(encoding="utf-8"))
    gates = run.recipe.gates
    share = measured["recovered_share"]
    if gates.min_recovered_share is not None and (share is None or share < gates.min_recovered_share):
        raise HeadfoldError(
            f"gate failed: uptraining won back {share if share is None else format(share, '.1%')} of the lost loss, "
            f"the recipe demands {gates.min_recovered_share:.1%} (gates.min_recovered_share)."
        )
    if gates.max_perplexity_ratio is None:
        return
    ratio = measured["perplexity"]["after"] / measured["perplexity"]["before"]
    if ratio > gates.max_perplexity_ratio:
        raise HeadfoldError(
            f"gate failed: perplexity after / before is {ratio:.3f}, the recipe allows "
            f"{gates.max_perplexity_ratio:.3f} (gates.max_perplexity_ratio)."
        )


def _stands(output: Path) -> bool:
    if output.is_file():
        return True
    try:
        verify_checkpoint(output)
    except HeadfoldError:
        return False
    return True


def _fingerprint(inputs: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _checkpoint_fingerprint(path: Path, num_samples: int = 64, sample_bytes: int = 4096) -> str:
    """A hash of the configuration and of evenly spaced samples of every weight file.

    Reading 13 GB in full at each start would cost more than it protects: training moves all weights, so samples tell.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pth")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as data:
            for sample in range(num_samples):
                data.seek(size * sample // num_samples)
                digest.update(data.read(sample_bytes))
    return digest.hexdigest()


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.partial-{time.time_ns()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
