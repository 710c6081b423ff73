"""What each way of merging heads costs: the tables of docs/fold.md, cell by cell.

    python scripts/bench_methods.py quickstart --methods fold mean --counts 4 2 1 --seeds 0 1 2
    python scripts/bench_methods.py quickstart --methods fold --learning-rate 1e-4
    python scripts/bench_methods.py windows MODEL --counts 1 --calibration CALIBRATION.txt --text TEXT.txt OTHER.txt

`quickstart` converts the shipped model and uptrains it by its recipe (--no-uptrain leaves that out); perplexity is the
recipe's. `windows` converts any model with each number of --tokens, and measures perplexity over windows of 512 tokens
of each text, every window on its own, without special tokens. Every finished cell is written to --results at once, and
cells that are there are not measured again, so that a run can be stopped at any time and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headfold.convert import convert_checkpoint
from headfold.convert.texts import read_documents

ROOT = Path(__file__).resolve().parent.parent
CALIBRATED = ("fold", "aligned")


class Results:
    """Measured cells by name, in a JSON file."""

    def __init__(self, path: Path, conditions: dict[str, Any]):
        self._path = path
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.cells: dict[str, dict[str, Any]] = content.get("cells", {})
        self._conditions = {**content.get("conditions", {}), **conditions}

    def add(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a cell unless it is there; write the file."""
        if name not in self.cells:
            self.cells[name] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"conditions": self._conditions, "cells": dict(sorted(self.cells.items()))}
            aside = self._path.with_suffix(".partial")
            aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            aside.replace(self._path)
        print(name, json.dumps(self.cells[name]), flush=True)


def convert(model: Path, output: Path, method: str, **options: Any) -> tuple[float, list[dict[str, Any]]]:
    """Seconds that a conversion took, by the wall clock, and its statistics of each layer."""
    started = time.monotonic()
    report = convert_checkpoint(model, output, method=method, **options)  # type: ignore[arg-type]
    return time.monotonic() - started, report.layers


def quickstart(arguments: argparse.Namespace) -> None:
    from headfold.eval import evaluate
    from headfold.recipes.schema import load_recipe
    from headfold.uptrain import uptrain

    recipe = load_recipe("quickstart")
    settings = recipe.eval.model_copy(update={"decode": None, "divergence": False})
    results = Results(arguments.results, {"quickstart": _conditions(evaluation=str(settings.text[0]).split("/")[-1])})

    training = {"learning_rate": arguments.learning_rate} if arguments.learning_rate else {}

    def measure(method: str, grouping: str, count: int, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="headfold-bench-") as directory:
            converted, uptrained = Path(directory, "converted"), Path(directory, "uptrained")
            options: dict[str, Any] = {"num_key_value_heads": count, "grouping": grouping, "seed": seed}
            if method in CALIBRATED:
                options["calibration"] = str(recipe.uptrain.data[0])
                options["calibration_tokens"] = arguments.tokens[0]
            seconds, _ = convert(Path(recipe.model), converted, method, **options)
            afters = [converted]
            if arguments.uptrain:
                uptrain(recipe.uptrain.model_copy(update={"seed": seed, **training}), converted, uptrained)
                afters.append(uptrained)
            perplexity = evaluate(Path(recipe.model), afters, settings).perplexity
            assert perplexity is not None
            cell = {"before": perplexity.before, "converted": perplexity.converted, "convert_seconds": seconds}
            return {**cell, "uptrained": perplexity.after} if arguments.uptrain else cell

    for seed in arguments.seeds:
        for count in arguments.counts:
            for method in arguments.methods:
                for grouping in arguments.groupings if method in CALIBRATED else ["adjacent"]:
                    rate = f"/learning rate {arguments.learning_rate:g}" if training else ""
                    suffix = rate if arguments.uptrain else "/converted only"
                    name = f"quickstart/{method}/{grouping}/{count}/seed {seed}{suffix}"
                    results.add(name, lambda m=method, g=grouping, c=count, s=seed: measure(m, g, c, s))  # type: ignore[misc]


def windows(arguments: argparse.Namespace) -> None:
    first, stop = arguments.windows
    conditions = {"windows": [first, stop], "window_tokens": 512, "tokenizer": "no special tokens"}
    results = Results(arguments.results, {arguments.model.name: _conditions(**conditions)})
    model = arguments.model

    def perplexities(path: Path) -> dict[str, float]:
        return {Path(text).name: perplexity(path, text, first, stop) for text in arguments.text}

    results.add(f"{model.name}/original", lambda: {"perplexity": perplexities(model)})

    def measure(method: str, grouping: str, count: int, tokens: int, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="headfold-bench-") as directory:
            options: dict[str, Any] = {"num_key_value_heads": count, "grouping": grouping, "seed": seed}
            if method in CALIBRATED:
                options |= {"calibration": arguments.calibration, "calibration_tokens": tokens}
            seconds, layers = convert(model, Path(directory, "out"), method, **options)
            cell = {"perplexity": perplexities(Path(directory, "out"))}
            return {**cell, "convert_seconds": seconds, "layers": layers if arguments.layers else len(layers)}

    for seed in arguments.seeds:
        for count in arguments.counts:
            for method in arguments.methods:
                calibrated = method in CALIBRATED
                for grouping in arguments.groupings if calibrated else ["adjacent"]:
                    for tokens in arguments.tokens if calibrated else [0]:
                        source = f"/{Path(arguments.calibration).name}/{tokens} tokens" if calibrated else ""
                        name = f"{model.name}/{method}/{grouping}/{count}{source}/seed {seed}"
                        results.add(
                            name,
                            lambda m=method, g=grouping, c=count, t=tokens, s=seed: measure(m, g, c, t, s),  # type: ignore[misc]
                        )


def perplexity(model: Path, text: str, first: int, stop: int) -> float:
    """Per token, over the windows first..stop-1 of 512 tokens of a text: 511 predictions in each, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("\n".join(read_documents(text)), add_special_tokens=False).input_ids
    rows = torch.tensor(ids[first * 512 : stop * 512]).view(-1, 512)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for row in rows:
            logits = network(row[None], use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / (rows.numel() - len(rows)))


def _conditions(**others: Any) -> dict[str, Any]:
    import platform

    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        **others,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--groupings", nargs="+", default=["adjacent"], choices=["adjacent", "similar"])
    shared.add_argument("--tokens", nargs="+", type=int, default=[65536], help="calibration tokens")
    shared.add_argument("--results", type=Path, help="JSON file; default: docs/results/methods.json or MODEL.json")
    table = commands.add_parser("quickstart", parents=[shared])
    table.add_argument("--methods", nargs="+", default=["fold", "aligned", "mean", "first", "random"])
    table.add_argument("--counts", nargs="+", type=int, default=[4, 2, 1])
    table.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    table.add_argument("--learning-rate", type=float, help="of the uptraining; default: the recipe's")
    table.add_argument("--no-uptrain", dest="uptrain", action="store_false")
    table.set_defaults(run=quickstart)
    curve = commands.add_parser("windows", parents=[shared])
    curve.add_argument("model", type=Path)
    curve.add_argument("--methods", nargs="+", default=["fold"])
    curve.add_argument("--counts", nargs="+", type=int, default=[1])
    curve.add_argument("--seeds", nargs="+", type=int, default=[0])
    curve.add_argument("--calibration", required=True, help="calibration text")
    curve.add_argument("--text", nargs="+", required=True, help="texts to measure on")
    curve.add_argument("--windows", nargs=2, type=int, default=[16, 40], metavar=("FIRST", "STOP"))
    curve.add_argument("--layers", action="store_true", help="keep the statistics of each layer")
    curve.set_defaults(run=windows)
    arguments = parser.parse_args()
    if arguments.results is None:
        name = "methods" if arguments.run is quickstart else arguments.model.name
        arguments.results = ROOT / "docs" / "results" / f"{name}.json"
    arguments.run(arguments)


if __name__ == "__main__":
    main()
