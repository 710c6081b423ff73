"""Merging of heads as pure functions: mean, first, random."""

import pytest
import torch

from headfold.convert import merge


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(32, 4), (12, 4), (12, 3), (6, 1)])
def test_a1_new_head_g_merges_the_adjacent_heads_of_its_group(num_heads, num_groups):
    heads = torch.arange(num_heads, dtype=torch.float32)[:, None, None].expand(num_heads, 5, 7)
    size = num_heads // num_groups
    expected_first = torch.tensor([g * size for g in range(num_groups)], dtype=torch.float32)
    expected_mean = torch.tensor([sum(range(g * size, (g + 1) * size)) / size for g in range(num_groups)])
    for merged, expected in (
        (merge.first(heads, num_groups), expected_first),
        (merge.mean(heads, num_groups), expected_mean),
    ):
        assert merged.shape == (num_groups, 5, 7)
        assert torch.equal(merged, expected[:, None, None].expand(num_groups, 5, 7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 5)])
def test_as_many_groups_as_heads_is_the_identity_to_the_last_bit(dtype, shape):
    heads = torch.randn(shape, generator=generator()).to(dtype)
    for merged in (
        merge.mean(heads, 6),
        merge.first(heads, 6),
        merge.random(heads, 6, std=0.02, generator=generator()),
    ):
        assert merged.dtype == dtype
        assert torch.equal(merged, heads)


def test_the_mean_of_16_bit_heads_is_rounded_once():
    heads = torch.randn(8, 3, 5, generator=generator()).to(torch.bfloat16)
    assert torch.equal(merge.mean(heads, 2), heads.double().unflatten(0, (2, 4)).mean(1).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_16_bit_heads_has_the_bits_of_torch_mean_in_float32(dtype):
    for group_size in (2, 3, 4, 5, 7, 8, 12, 16, 32, 64):
        heads = torch.randn(2 * group_size, 9, 40, generator=generator(group_size)).to(dtype)
        wanted = heads.float().unflatten(0, (2, group_size)).mean(dim=1).to(dtype)
        assert torch.equal(merge.mean(heads, 2), wanted), group_size


def test_random_heads_are_reproducible_and_have_the_asked_spread():
    heads = torch.zeros(8, 64, 64)
    fresh = merge.random(heads, 2, std=0.02, generator=generator(3))
    assert torch.equal(fresh, merge.random(heads, 2, std=0.02, generator=generator(3)))
    assert not torch.equal(fresh, merge.random(heads, 2, std=0.02, generator=generator(4)))
    assert fresh.std().item() == pytest.approx(0.02, rel=0.03)
    assert not merge.random(heads[:, :, 0], 2, std=0.0, generator=generator()).any()
