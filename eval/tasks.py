"""Tasks of lm-eval, with the models compared item by item.

Both models answer the same items, so the test is a paired one: what counts are the items that only one of them got
right (McNemar). Two accuracies with a standard error each would hide most of what can be known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from headfold.convert.errors import HeadfoldError, RefusedError, first_line

from .schema import Interval, TaskMetric
from .settings import EvalSettings
from .stats import bootstrap, mcnemar_p_value

Items = dict[str, dict[int, float]]
"""Values by `task/metric` and item, of one model. An item is missing where its value is not a number."""


class TaskSuite:
    """The tasks that settings name, with their data loaded.

    Raises RefusedError at once for a task that lm-eval does not know and for data that is not there, before any model
    has been loaded.
    """

    def __init__(self, settings: EvalSettings) -> None:
        self._settings = settings
        with _quiet():
            try:
                import lm_eval.tasks
            except ImportError as error:
                raise RefusedError(f"tasks need lm-eval, which cannot be imported: {first_line(error)}") from error
            self._manager = self._index(lm_eval.tasks.TaskManager)
            for name in settings.tasks:
                self._load(name)

    def _index(self, manager: Any) -> Any:
        """lm-eval's index of tasks. Its own thousands take seconds to read, so they are left out where not needed."""
        directory = self._settings.task_directory
        if directory is None:
            return manager()
        if not Path(directory).is_dir():
            raise RefusedError(f"task_directory: {directory} is not a directory.")
        own = manager(include_path=directory, include_defaults=False)
        return own if set(self._settings.tasks) <= set(own.all_tasks) else manager(include_path=directory)

    def _load(self, name: str) -> None:
        if name not in self._manager.all_tasks:
            raise RefusedError(f"tasks: lm-eval knows no task {name!r}; `lm-eval ls tasks` lists them.")
        try:
            self._manager.load([name])
        except Exception as error:  # whatever the many libraries between a task and its data may raise
            raise RefusedError(
                f"tasks: the data of {name} cannot be loaded: {first_line(error)}. For local data, put a task file "
                "whose dataset_kwargs name your data_files into a directory and give that as eval.task_directory."
            ) from error

    def run(
        self, model: transformers.PreTrainedModel, tokenizer: Any, max_positions: int | None
    ) -> tuple[dict[str, Any], Items]:
        """lm-eval's results for one model, and the value of each item. Raises HeadfoldError where lm-eval fails."""
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        settings = self._settings
        with _quiet():
            try:
                found = lm_eval.simple_evaluate(
                    HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=max_positions),
                    tasks=settings.tasks,
                    task_manager=self._manager,
                    num_fewshot=settings.num_fewshot,
                    limit=settings.task_limit,
                    bootstrap_iters=0,
                    log_samples=True,
                    random_seed=settings.seed,
                    numpy_random_seed=settings.seed,
                    torch_random_seed=settings.seed,
                    fewshot_random_seed=settings.seed,
                )
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise HeadfoldError(f"lm-eval failed on {', '.join(settings.tasks)}: {first_line(error)}") from error
        return found, _items(found)


def _items(found: dict[str, Any]) -> Items:
    items: Items = {}
    for task, samples in found["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                value = sample.get(metric)
                if isinstance(value, (bool, int, float)):
                    items.setdefault(f"{task}/{metric},{sample['filter']}", {})[sample["doc_id"]] = float(value)
    return items


def compare_tasks(
    results: Sequence[tuple[dict[str, Any], Items]], *, converted: int | None, bootstrap_samples: int, seed: int
) -> list[TaskMetric]:
    """Every metric of every task, before against after. results: what TaskSuite.run gave for each model, in order."""
    (before, before_items), (_, after_items) = results[0], results[-1]
    metrics = []
    for task, values in before["results"].items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            values_of_all = [result[0]["results"][task][key] for result in results]
            if not all(map(math.isfinite, values_of_all)):
                raise HeadfoldError(f"{task}: {metric} is {values_of_all}: a model's output is not finite.")
            first, last = (items.get(f"{task}/{key}", {}) for items in (before_items, after_items))
            if first.keys() != last.keys():
                raise HeadfoldError(f"{task}: the two models answered different items; they cannot be compared.")
            pairs = np.array([(first[item], last[item]) for item in first]).reshape(-1, 2)
            entry = TaskMetric(
                task=task,
                metric=metric if filter_name == "none" else key,
                num_items=before["n-samples"].get(task, {}).get("effective", len(pairs)),
                higher_is_better=before["higher_is_better"].get(task, {}).get(metric, True) is not False,
                before=value,
                converted=None if converted is None else values_of_all[converted],
                after=values_of_all[-1],
                difference=_difference(value, values_of_all[-1], pairs, bootstrap_samples, seed),
            )
            if len(pairs) and np.isin(pairs, (0, 1)).all():
                entry.num_lost = int((pairs[:, 0] > pairs[:, 1]).sum())
                entry.num_won = int((pairs[:, 0] < pairs[:, 1]).sum())
                entry.p_value = mcnemar_p_value(entry.num_lost, entry.num_won)
            metrics.append(entry)
    return metrics


def _difference(before: float, after: float, pairs: np.ndarray, bootstrap_samples: int, seed: int) -> Interval:
    """after - before, with an interval where items have values of their own and the metric is their mean."""
    differences = pairs[:, 1] - pairs[:, 0]
    if not len(pairs) or not math.isclose(differences.mean(), after - before, abs_tol=1e-9):
        return Interval(value=after - before)
    return bootstrap(
        np.stack([differences, np.ones(len(pairs))], axis=1),
        lambda sums: sums[:, 0] / sums[:, 1],
        num_samples=bootstrap_samples,
        seed=seed,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps lm-eval's and datasets' notices off the terminal."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
