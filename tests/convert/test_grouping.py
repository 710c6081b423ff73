"""Which heads share a KV head: the partition that loses least within its groups."""

import itertools

import pytest
import torch

from headfold.convert.grouping import adjacent_groups, pairwise_loss, similar_groups


def partitions(heads: list[int], size: int):
    """All partitions into groups of `size`, by brute force."""
    if not heads:
        yield []
        return
    first, *rest = heads
    for others in itertools.combinations(rest, size - 1):
        left = [head for head in rest if head not in others]
        for groups in partitions(left, size):
            yield [[first, *others], *groups]


def loss(lost: torch.Tensor, groups: list[list[int]]) -> float:
    return sum(lost[a, b].item() for group in groups for a, b in itertools.combinations(group, 2))


def test_adjacent_groups_are_neighbours():
    assert adjacent_groups(6, 2) == [[0, 1, 2], [3, 4, 5]]
    assert adjacent_groups(3, 3) == [[0], [1], [2]]
    assert adjacent_groups(3, 1) == [[0, 1, 2]]


@pytest.mark.parametrize(("num_heads", "num_groups"), [(9, 3), (12, 3), (12, 6), (32, 8), (7, 7), (6, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found(num_heads, num_groups, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_heads, generator=generator)
    planted = sorted(sorted(group.tolist()) for group in order.view(num_groups, -1))
    lost = torch.rand(num_heads, num_heads, generator=generator)
    lost = lost + lost.T
    for group in planted:
        for a, b in itertools.product(group, group):
            lost[a, b] = 0
    assert similar_groups(lost, num_groups) == planted


@pytest.mark.parametrize(("num_heads", "num_groups"), [(8, 4), (8, 2), (9, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_among_the_best_tenth_of_all_partitions(num_heads, num_groups, seed):
    generator = torch.Generator().manual_seed(seed)
    lost = torch.rand(num_heads, num_heads, generator=generator)
    lost = lost + lost.T
    losses = sorted(loss(lost, groups) for groups in partitions(list(range(num_heads)), num_heads // num_groups))
    found = similar_groups(lost, num_groups)
    assert sorted(head for group in found for head in group) == list(range(num_heads))
    assert {len(group) for group in found} == {num_heads // num_groups}
    assert loss(lost, found) <= losses[len(losses) // 10]
    assert loss(lost, found) <= loss(lost, adjacent_groups(num_heads, num_groups))


def test_losses_of_pairs_are_symmetric():
    lost = pairwise_loss(lambda pair: float(pair[0] * 10 + pair[1]), 3)
    assert lost.tolist() == [[0, 1, 2], [1, 0, 12], [2, 12, 0]]
