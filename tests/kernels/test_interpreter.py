"""Runs interpreted/, one file at a time, in processes where Triton interprets its kernels on CPU tensors."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(file: str, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)]
    markers = pytestconfig.getoption("markexpr")
    if markers:
        command += ["-m", markers]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    # 5: a file whose tests are all deselected.
    assert result.returncode in (0, 5), result.stdout[-8000:] + result.stderr[-2000:]
