"""The comparison with other engines: what it calls the same, and that it really runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_third_parties.py"
RESULT = ROOT / "docs" / "results" / "third_parties.json"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_third_parties", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_are_compared_up_to_the_first_difference(script: ModuleType) -> None:
    wanted, gaps = [[1, 2, 3], [4, 5, 6]], [[1.0, 1.0, 1e-5], [1.0, 0.5, 1.0]]
    same = script.compare(wanted, gaps, [[1, 2, 3], [4, 5, 6, 7]])
    assert script.verdict(same) == "same" and [row["same"] for row in same] == [3, 3]
    tie = script.compare(wanted, gaps, [[1, 2, 9], [4, 5, 6]])
    assert script.verdict(tie) == "same but for ties" and tie[0]["first_difference"]["theirs"] == 9
    for different in ([[1, 2, 3], [4, 9, 6]], [[1, 2], [4, 5, 6]], [[1, 2, 9], [9, 5, 6]]):
        assert script.verdict(script.compare(wanted, gaps, different)) == "different"
    assert script.before([1, 2, 0, 3], 0) == [1, 2] and script.before([1, 2], 0) == [1, 2]


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, "--tokens", "6", *options], capture_output=True, text=True, env=environment
    )


def test_stock_transformers_without_headfold_writes_the_same_tokens(tmp_path: Path) -> None:
    """And an engine that cannot be started is a failure, one that is not asked for is skipped with its reason."""
    checked = run("--vllm", tmp_path / "no_python", "--output", tmp_path / "result.json")
    engines = json.loads((tmp_path / "result.json").read_text())["engines"]
    assert checked.returncode == 1, checked.stderr
    assert {engine["engine"]: engine["verdict"] for engine in engines} == {
        "transformers": "same",
        "vllm": "failed",
        "llama.cpp": "skipped",
    }
    assert engines[0]["num_key_value_heads"] == 2 and all(row["same"] == 6 for row in engines[0]["prompts"])
    assert engines[1]["reason"] == "FileNotFoundError" and "--llama-cpp PYTHON" in engines[2]["reason"]


def test_vllm_writes_the_same_tokens(tmp_path: Path) -> None:
    python = os.environ.get("HEADFOLD_VLLM_PYTHON")
    if not python:
        pytest.skip("HEADFOLD_VLLM_PYTHON does not name an interpreter that has vLLM")
    checked = run("--vllm", python, "--output", tmp_path / "result.json")
    assert checked.returncode == 0, checked.stderr


def test_the_page_says_what_was_run() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "third_parties.md").read_text(encoding="utf-8")
    assert all(engine["verdict"] == "same" for engine in result["engines"] if engine["engine"] != "llama.cpp")
    assert {engine["engine"] for engine in result["engines"]} == {"transformers", "vllm", "llama.cpp"}
    for engine in result["engines"]:
        for package, version in engine["versions"].items():
            assert version in page, f"{engine['engine']}: {package} {version} is not on the page"
