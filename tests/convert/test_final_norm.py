"""The refit of the norm behind the last block, against least squares written out channel by channel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headfold.convert import convert_checkpoint
from headfold.convert.calibrate import fold_layers
from headfold.convert.checkpoint import Checkpoint
from headfold.convert.families import describe
from headfold.convert.final_norm import refit_norm

SIZE = 7


class OnePlusNorm(nn.Module):
    """A norm that multiplies by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * hidden.square().mean(-1, keepdim=True).rsqrt() * (1 + self.weight)


def random_norm(kind: str) -> nn.Module:
    norm = {"rms": nn.RMSNorm(SIZE), "layer": nn.LayerNorm(SIZE), "one plus": OnePlusNorm()}[kind]
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.5)
    return norm


def noisy_streams() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(6, 50, SIZE, generator=generator) * torch.arange(1, SIZE + 1)
    return list(
        zip(original.split(2), (original + torch.randn(original.shape, generator=generator)).split(2), strict=True)
    )


@pytest.mark.parametrize("kind", ["rms", "layer", "one plus"])
def test_the_weight_is_the_least_squares_solution_of_every_channel(kind):
    norm, streams = random_norm(kind), noisy_streams()
    weight, before, after = refit_norm(norm, streams)

    with torch.no_grad():
        wanted, given = (norm(torch.cat(parts)).flatten(0, 1).double() for parts in zip(*streams, strict=True))
        bias = norm.bias.double() if kind == "layer" else torch.zeros(SIZE, dtype=torch.float64)
        gains = [torch.linalg.lstsq((given - bias)[:, [c]], (wanted - bias)[:, c]).solution for c in range(SIZE)]
        expected = (given - bias) * torch.cat(gains) + bias
        norm.weight.data = weight
        found = norm(torch.cat([converted for _, converted in streams])).flatten(0, 1).double()
    assert (found - expected).norm() < 1e-5 * expected.norm()
    energy = (wanted - bias).norm()
    assert before == pytest.approx(((given - wanted).norm() / energy).item(), rel=1e-4)
    assert after == pytest.approx(((found - wanted).norm() / energy).item(), rel=1e-4)
    assert after < before


@pytest.mark.parametrize("kind", ["rms", "layer", "one plus"])
def test_streams_that_are_alike_leave_the_weight_as_it_is(kind):
    norm = random_norm(kind)
    weight, before, after = refit_norm(norm, [(original, original) for original, _ in noisy_streams()])
    assert torch.allclose(weight, norm.weight, atol=1e-6)
    assert before == pytest.approx(0, abs=1e-6) and after == pytest.approx(0, abs=1e-6)


def test_channels_that_are_always_zero_keep_their_weight():
    norm = random_norm("rms")
    streams = [(original.clone(), converted.clone()) for original, converted in noisy_streams()]
    for pair in streams:
        for stream in pair:
            stream[..., 2] = 0
    weight, _, _ = refit_norm(norm, streams)
    assert weight[2] == norm.weight[2]
    assert weight.isfinite().all()


def test_fold_gives_it_with_the_last_layer(llama):
    checkpoint = Checkpoint.open(llama)
    windows = torch.randint(3, 61, (10, 40), generator=torch.Generator().manual_seed(5))
    first, last = fold_layers(checkpoint, describe(checkpoint), windows, num_key_value_heads=2)
    assert "model.norm.weight" not in first[1]
    assert last[1]["model.norm.weight"].shape == checkpoint.tensors["model.norm.weight"].shape
    assert last[2]["final_norm_error_repaired"] < last[2]["final_norm_error_before"]
    assert not [name for name in first[2] if name.startswith("final")]


def test_a_conversion_that_calibrates_nothing_leaves_it(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2, method="mean")
    before, after = (Checkpoint.open(path).read("model.norm.weight") for path in (llama, tmp_path / "out"))
    assert torch.equal(before, after)
