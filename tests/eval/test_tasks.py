"""lm-eval's tasks, item by item."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.eval.settings import EvalSettings
from headfold.eval.tasks import TaskSuite, compare_tasks

from .conftest import make_model, make_tokenizer

pytest.importorskip("lm_eval")


@pytest.fixture
def task_directory(tmp_path: Path) -> Path:
    """An offline multiple-choice task of 30 items over a local file, and one whose data is not there."""
    directory = tmp_path / "tasks"
    directory.mkdir()
    data = directory / "items.jsonl"
    items = [{"question": f"the cat sat {'on a mat ' * (n % 4)}and", "answer": n % 2} for n in range(30)]
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    common = """
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["the dog", "old men"]
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
    local = f"task: cats\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
    (directory / "cats.yaml").write_text(local + common)
    (directory / "missing.yaml").write_text("task: missing\ndataset_path: nobody/no_such_data\n" + common)
    return directory


def test_items_of_an_offline_task_are_paired(task_directory: Path) -> None:
    settings = EvalSettings(tasks=["cats"], task_directory=str(task_directory), task_limit=20)
    suite = TaskSuite(settings)
    models = [make_model(4, seed=1), make_model(2, seed=5)]
    results = [suite.run(model, make_tokenizer(), 64) for model in models]
    (metric,) = compare_tasks(results, converted=1, bootstrap_samples=200, seed=0)
    assert (metric.task, metric.metric, metric.num_items) == ("cats", "acc", 20)
    first, last = (result[1]["cats/acc,none"] for result in results)
    assert metric.before == pytest.approx(sum(first.values()) / 20)
    assert metric.after == metric.converted == pytest.approx(sum(last.values()) / 20)
    assert metric.difference.value == pytest.approx(metric.after - metric.before)
    assert metric.num_lost == sum(first[item] > last[item] for item in first)
    assert metric.num_won == sum(first[item] < last[item] for item in first)


def outcome(right: list[int], metric: str = "acc") -> tuple[dict[str, Any], dict[str, dict[int, float]]]:
    """What lm-eval gives for a task with these items right."""
    key = f"{metric},none"
    results = {"t": {"alias": "t", key: sum(right) / len(right), f"{metric}_stderr,none": "N/A"}}
    found = {
        "results": results,
        "n-samples": {"t": {"effective": len(right)}},
        "higher_is_better": {"t": {metric: True}},
    }
    return found, {f"t/{key}": dict(enumerate(map(float, right)))}


def test_the_difference_is_a_paired_one() -> None:
    """60 of 100 right, 51 of 100 right: not much by itself, but every item that changed was lost."""
    before, after = [1] * 60 + [0] * 40, [0] * 9 + [1] * 51 + [0] * 40
    (metric,) = compare_tasks([outcome(before), outcome(after)], converted=None, bootstrap_samples=500, seed=0)
    assert (metric.num_lost, metric.num_won, metric.converted) == (9, 0, None)
    assert metric.p_value == pytest.approx(2 / 2**9)
    assert metric.difference.value == pytest.approx(-0.09)
    assert metric.difference.high is not None and metric.difference.high < 0


def test_models_that_answered_different_items_are_not_compared() -> None:
    with pytest.raises(HeadfoldError, match="different items"):
        compare_tasks([outcome([1, 0, 1]), outcome([1, 0])], converted=1, bootstrap_samples=100, seed=0)


def test_c7_a_task_that_gives_nan_is_a_failed_result() -> None:
    broken = outcome([1, 0])
    broken[0]["results"]["t"]["acc,none"] = float("nan")
    with pytest.raises(HeadfoldError, match="not finite") as caught:
        compare_tasks([outcome([1, 0]), broken], converted=1, bootstrap_samples=100, seed=0)
    assert caught.value.exit_code == 1


def test_c5_data_that_is_not_there_fails_early_with_its_name(task_directory: Path) -> None:
    """Before a model is loaded: the data set by name, and the way to local data."""
    with pytest.raises(RefusedError) as caught:
        TaskSuite(EvalSettings(tasks=["cats", "missing"], task_directory=str(task_directory)))
    message = str(caught.value)
    assert "nobody/no_such_data" in message and "eval.task_directory" in message and "\n" not in message
    assert caught.value.exit_code == 2


def test_c5_unknown_tasks_and_directories_are_refused(
    task_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    without_defaults = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)  # they take seconds to read
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", without_defaults)
    with pytest.raises(RefusedError, match=r"task_directory: .*nowhere is not a directory"):
        TaskSuite(EvalSettings(tasks=["cats"], task_directory=str(tmp_path / "nowhere")))
    with pytest.raises(RefusedError, match="lm-eval knows no task 'dogs'"):
        TaskSuite(EvalSettings(tasks=["dogs"], task_directory=str(task_directory)))
