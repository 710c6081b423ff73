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
    assert found["is_toy"] and found["checks"] and found["points"] and found["failed_parts"] == {}
    assert all(
        "torch SDPA, packed" in point["peers"]
        for point in found["points"]
        if point["page_size"] is None and point["cache_dtype"] == "float16"
    ), found["left_out"]
    assert all(check["passed"] for check in found["checks"])
    assert found["first_token"]["prompt_tokens"] == 40
    assert found["split_costs"]["regret"]["worst"] > 0
    page = (tmp_path / "gpu_check.md").read_text()
    assert "the times mean nothing" in page and "The split cost model, refitted over 10 times" in page
    assert "beyond" not in page + str(found["checks"]), "a toy cache is not a large one"


FAILING = """
import sys, time
from headfold.scripts import gpu_check

def fail(*arguments):
    raise RuntimeError("of this part")

def hang(run, clock, bandwidth, deadline, measured, left_out):
    measured.append(dict(num_heads=4, num_kv_heads=1, context=70, batch_size=2, cache_dtype="int8", page_size=None,
                         microseconds=5.0, share_of_copy_bandwidth=0.5, peers={"a peer": 10.0}))
    left_out.append("the rest")
    time.sleep(600)

gpu_check.check_results = lambda *arguments: iter([{"check": "one", "passed": True}])
gpu_check.copy_bandwidth = gpu_check.refit_split_costs = gpu_check.first_token_times = fail
gpu_check.measure = hang
sys.argv[1:] = ["--output", sys.argv[1], "--minutes", "0.1"]
sys.exit(gpu_check.main())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_part_that_fails_or_hangs_loses_no_other(tmp_path):
    """Three parts raise, and the last never ends: the watchdog ends it, and what there is has been written."""
    result = subprocess.run([sys.executable, "-c", FAILING, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr[-2000:]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(found["failed_parts"]) == {"copy", "split costs", "first token", "everything after"}
    assert found["failed_parts"]["copy"] == "RuntimeError: of this part"
    assert found["checks"] == [{"check": "one", "passed": True}] and len(found["points"]) == 1
    assert found["copy_bytes_per_second"] is None
    page = (tmp_path / "gpu_check.md").read_text()
    assert "| 4/1 | 70 | 2 | int8 | contiguous | 5.0 | 0.500 | a peer 2.00 |" in page
    assert "everything after failed: stopped by the watchdog" in page and "left out: the rest" in page


def test_what_people_read():
    """The goal and how many shapes reach it; the fit in words; failed checks and what was left out, in few lines."""
    from headfold.scripts import gpu_check

    def point(context, share, **peers):
        shape = {"num_heads": 32, "num_kv_heads": 8, "batch_size": 8, "cache_dtype": "int8", "page_size": 16}
        return {**shape, "context": context, "microseconds": 10.0, "share_of_copy_bandwidth": share, "peers": peers}

    result = {
        "device": "a GPU",
        "is_toy": False,
        "versions": {"torch": "2.13"},
        "checks": [{"check": "one", "passed": True}, {"check": "two", "passed": False, "error": 0.5}],
        "points": [
            point(4096, 0.2),
            point(32768, 0.92, a=12.0, b=9.0),
            point(131072, 0.88, a=11.0),
            point(65536, None),
        ],
        "split_costs": {
            "measured": 80,
            "microseconds_per_tile": 0.25,
            "program_overhead_tiles": 8.0,
            "merge_overhead_tiles": 0.125,
            "in_use": {"program_overhead_tiles": 10.0, "merge_overhead_tiles": 0.2},
            "regret": {"worst": 1.25, "median": 1.01},
        },
        "first_token": {"prompt_tokens": 4096, "whole_prompt_seconds": 0.9, "prefix_found_seconds": 0.03},
        "failed_parts": {},
        "left_out": ["x: out of time", "y: a peer: out of time", "z: the cache does not fit"],
    }
    page = gpu_check.as_markdown(result)
    assert "1 of 2 such shapes reach that share (from 0.880 to 0.920), 1 of 2 that have peers are ahead" in page
    assert "| 32/8 | 65536 | 8 | int8 | 16 | 10.0 |  |  |" in page
    assert "a program costs 8 beside its own (in use: 10), one more split 0.125 (in use: 0.2)" in page
    assert "900.0 ms computed whole, 30.0 ms with" in page
    assert page.endswith(
        "- failed check: two (error 0.5)\n"
        "- left out: 2 shapes or peers for lack of time, named in the JSON\n"
        "- left out: z: the cache does not fit\n"
    )
    del result["split_costs"], result["first_token"]
    assert "not refitted: 0 times" in gpu_check.as_markdown(result | {"points": []})
