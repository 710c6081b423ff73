"""The GPU check runs from end to end at toy sizes in the interpreter, so that it is known to work where a GPU is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take eight minutes of the GPU")
def test_runs_at_toy_sizes(tmp_path):
    command = [sys.executable, "-m", "headfold.scripts.gpu_check", "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["is_toy"] and found["checks"] and found["points"]
    assert all(check["passed"] for check in found["checks"])
    assert found["first_token"]["prompt_tokens"] == 40
    assert "the times mean nothing" in (tmp_path / "gpu_check.md").read_text()
