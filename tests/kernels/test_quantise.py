"""What 8 and 4 bits keep."""

from __future__ import annotations

import pytest
import torch

from headfold.kernels import KernelError
from headfold.kernels.dtypes import cache_dtype_name, is_quantised, num_bits
from headfold.kernels.quantise import (
    QUANTISED_MAX,
    channel_scale,
    dequantise,
    quantise,
    storage_dtype,
    stored_head_dim,
    token_scale,
)

# Half a step at the largest magnitude, relative to the row's largest value.
HALF_STEP = {"float8_e4m3fn": 16 / 448, "float8_e5m2": 4096 / 57344, "int8": 0.5 / 127, "int4": 0.5 / 7}


@pytest.mark.parametrize("name", QUANTISED_MAX)
@pytest.mark.parametrize("per", ["token", "channel"])
def test_round_trip(name, per):
    x = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(0))
    scale = token_scale(x, name)[..., None] if per == "token" else channel_scale(x, name)
    stored = quantise(x, scale, name)
    assert stored.dtype == storage_dtype(name) and stored.shape[-1] == stored_head_dim(name, 16)
    error = (dequantise(stored, scale, name) - x).abs()
    assert (error <= scale * QUANTISED_MAX[name] * HALF_STEP[name] * 1.001).all()


def test_d10_a_zero_row_and_an_outlier_channel():
    x = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(0))
    x[7] = 0
    for name in QUANTISED_MAX:
        scale = token_scale(x, name)[..., None]
        restored = dequantise(quantise(x, scale, name), scale, name)
        assert restored.isfinite().all() and (restored[7] == 0).all()

    outlier = x.clone()
    outlier[..., 3] *= 100
    others = torch.arange(32) != 3

    def error(values: torch.Tensor, scale: torch.Tensor) -> float:
        return (dequantise(quantise(values, scale, "int8"), scale, "int8") - values)[..., others].abs().mean().item()

    without = error(x, token_scale(x, "int8")[..., None])
    assert error(outlier, channel_scale(outlier, "int8")) < 1.5 * without
    assert error(outlier, token_scale(outlier, "int8")[..., None]) > 10 * without


def test_int4_packs_the_halves_of_a_row():
    x = torch.tensor([[-7.0, -1, 0, 3, 7, 2, -3, 5]])
    stored = quantise(x, torch.ones(1, 1), "int4")
    low, high = stored & 15, stored >> 4
    assert (low.int() - 8).tolist() == [[-7, -1, 0, 3]] and (high.int() - 8).tolist() == [[7, 2, -3, 5]]
    assert torch.equal(dequantise(stored, None, "int4"), x)
    with pytest.raises(KernelError, match="even, found 7"):
        stored_head_dim("int4", 7)


def test_values_that_are_tiny_or_exceed_the_scale():
    tiny = torch.full((1, 1, 4), 1e-38)
    scale = token_scale(tiny, "int8")
    assert torch.allclose(
        dequantise(quantise(tiny, scale[..., None], "int8"), scale[..., None], "int8"), tiny, rtol=0.01
    )
    assert quantise(torch.tensor([[300.0, -300.0]]), torch.ones(1, 1), "int8").tolist() == [[127, -127]]
    assert quantise(torch.tensor([[1e6, -1e6]]), torch.ones(1, 1), "float8_e4m3fn").float().tolist() == [[448, -448]]


def test_names():
    assert cache_dtype_name(torch.bfloat16) == "bfloat16" and cache_dtype_name("fp8") == "float8_e4m3fn"
    assert num_bits("int4") == 4 and num_bits("fp16") == 16
    assert is_quantised("fp8_e5m2") and not is_quantised(torch.float32)
    for wrong in ("int3", torch.int64):
        with pytest.raises(KernelError, match=r"is not known; known: float32"):
            cache_dtype_name(wrong)
