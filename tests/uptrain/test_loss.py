"""The loss against plain references, however the work is cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headfold.convert.checkpoint import Checkpoint
from headfold.uptrain.data import IGNORED, Batch
from headfold.uptrain.loss import Objective, forward_divergence
from headfold.uptrain.model import CausalModel, load_model
from headfold.uptrain.settings import Distillation

from .conftest import make_checkpoint


def load(path: Path, *, trainable: bool = True) -> CausalModel:
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "trainable": trainable}
    return CausalModel(load_model(Checkpoint.open(path), **options))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "teacher", seed=5, num_key_value_heads=4)


def make_batch(num_rows: int = 3, length: int = 20, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 320, (num_rows, length), generator=generator)
    labels[0, 3:7] = IGNORED
    return Batch(torch.randint(0, 320, (num_rows, length), generator=generator), labels, None)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


def assert_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


def reference_divergence(logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(teacher || student) of each token from its definition, in float64, times temperature squared."""
    student, teacher = (torch.softmax(values.double() / temperature, -1) for values in (logits, teacher_logits))
    return temperature**2 * (teacher * (teacher / student).log()).sum(-1)


def test_divergence_is_forward_kl_at_the_temperature():
    logits, teacher_logits = torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(0)) * 3
    labels = torch.arange(7)
    labels[2] = IGNORED
    for temperature in (1.0, 2.5):
        expected = reference_divergence(logits, teacher_logits, temperature)[labels != IGNORED].sum()
        got = forward_divergence(logits, teacher_logits, labels, temperature)
        assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert forward_divergence(logits, logits, labels, 1.0).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("logits_per_chunk", [1 << 25, 320 * 60, 320 * 17, 1], ids=["whole", "exact", "odd", "single"])
@pytest.mark.parametrize("distillation", [None, Distillation(weight=0.3, temperature=2.0), Distillation()])
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    student: Path, teacher: Path, distillation: Distillation | None, logits_per_chunk: int
):
    batch = make_batch()
    model = load(student)
    teacher_model = load(teacher, trainable=False) if distillation else None
    objective = Objective(model, teacher_model, distillation, logits_per_chunk=logits_per_chunk)
    sums = objective(batch)
    sums.loss.backward()

    reference = load(student)
    logits = reference.model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
    counted = batch.labels.flatten() != IGNORED
    cross_entropy = F.cross_entropy(logits[counted], batch.labels.flatten()[counted], reduction="sum")
    expected, divergence = cross_entropy, torch.tensor(0.0)
    if teacher_model is not None:
        with torch.no_grad():
            targets = teacher_model.model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
        divergence = reference_divergence(logits[counted], targets[counted], distillation.temperature).sum()
        expected = distillation.weight * divergence + (1 - distillation.weight) * cross_entropy
    expected.backward()
    for got, value in zip(sums, (expected, cross_entropy, divergence), strict=True):
        assert got.item() == pytest.approx(value.item(), rel=1e-5)
    assert_same_gradients(gradients(model), gradients(reference))
    assert teacher_model is None or not gradients(teacher_model)


def test_b1_one_micro_batch_of_two_rows_and_two_of_one_have_equal_gradients(student: Path):
    """Rows of 11 and 101 counted tokens: a mean of means would weigh each token of the short row nine times."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 320, (2, 101), generator=generator)
    labels = torch.randint(0, 320, (2, 101), generator=generator)
    labels[0, 11:] = IGNORED
    results = []
    for size in (2, 1):
        model = load(student)
        objective = Objective(model)
        for start in range(0, 2, size):
            rows = slice(start, start + size)
            (objective(Batch(ids[rows], labels[rows], None)).loss / 112).backward()
        results.append(gradients(model))
    assert_same_gradients(results[1], results[0])


@pytest.mark.parametrize("distillation", [None, Distillation(weight=0.5)])
def test_b5_a_batch_with_every_label_ignored_is_zero_and_never_nan(
    student: Path, teacher: Path, distillation: Distillation | None
):
    batch = make_batch()
    ignored = Batch(batch.input_ids, torch.full_like(batch.labels, IGNORED), None)
    model = load(student)
    sums = Objective(model, load(teacher, trainable=False) if distillation else None, distillation)(ignored)
    sums.loss.backward()
    assert [value.item() for value in sums] == [0, 0, 0]
    assert all((gradient == 0).all() for gradient in gradients(model).values())


class LogitsSizes(TorchDispatchMode):
    """Records the elements of every tensor that is as wide as the vocabulary, but for the head's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (320,) and tensor.shape != (32, 320):
                self.sizes.append(tensor.numel())
        return result


def test_no_logits_tensor_is_larger_than_a_chunk(student: Path, teacher: Path):
    """Neither the student's nor the teacher's, neither forward nor backward."""
    objective = Objective(load(student), load(teacher, trainable=False), Distillation(), logits_per_chunk=320 * 10)
    with LogitsSizes() as recorded:
        objective(make_batch()).loss.backward()
    assert max(recorded.sizes) == 320 * 10
    whole = Objective(load(student), load(teacher, trainable=False), Distillation())
    with LogitsSizes() as recorded:
        whole(make_batch()).loss.backward()
    assert max(recorded.sizes) == 320 * 60  # the measure sees what it looks for


def test_evaluation_leaves_the_teacher_out(student: Path, teacher: Path):
    objective = Objective(load(student), load(teacher, trainable=False), Distillation())
    sums = objective(make_batch(), with_teacher=False)
    assert sums.divergence.item() == 0
    assert sums.loss.item() == sums.cross_entropy.item()
    assert math.isfinite(sums.loss.item())
