"""Which heads share a KV head.

Heads may be renumbered freely if the rows of q, k and v and the columns of o move together, so that any partition into
groups of equal size can be written as the standard one, in which KV head n serves adjacent query heads. A grouping is a
list of N groups, each a list of old KV heads.

Shapes in one letter code: G KV heads, N new KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Groups = list[list[int]]


def adjacent_groups(num_heads: int, num_groups: int) -> Groups:
    """Groups of neighbours: [[0, 1], [2, 3], ...]."""
    return torch.arange(num_heads).view(num_groups, -1).tolist()


def query_order(groups: Groups, group_size: int) -> list[int]:
    """The old numbers of the query heads in their new order; group_size query heads read each old KV head."""
    return [head * group_size + query for group in groups for head in group for query in range(group_size)]


def similar_groups(lost: Tensor, num_groups: int) -> Groups:
    """A partition into groups of equal size with little loss within groups: heads and groups in ascending order.

    lost (G, G), symmetric: what sharing one head between the two of each pair would lose. Minimises its sum over the
    pairs within groups: groups are grown one head at a time from the heads that are hardest to place, and from the
    adjacent grouping; both are then improved by swapping two heads for as long as that helps, and the better one is
    taken. Deterministic. Pairs stand in for whole groups here: with groups of two the sum is the loss itself.
    """
    num_heads = len(lost)
    lost = lost.double().cpu().clone().fill_diagonal_(0)
    candidates = [adjacent_groups(num_heads, num_groups), _grow(lost, num_groups)]
    swapped = [_swap_while_it_helps(lost, groups) for groups in candidates]
    best = min(swapped, key=lambda groups: _loss(lost, groups))
    return sorted(sorted(group) for group in best)


def pairwise_loss(loss: Callable[[list[int]], float], num_heads: int) -> Tensor:
    """(G, G): `loss` of every pair of heads, 0 on the diagonal."""
    lost = torch.zeros(num_heads, num_heads, dtype=torch.float64)
    for first in range(num_heads):
        for second in range(first + 1, num_heads):
            lost[first, second] = lost[second, first] = loss([first, second])
    return lost


def _loss(lost: Tensor, groups: Groups) -> float:
    return sum(lost[group][:, group].sum().item() for group in groups) / 2


def _grow(lost: Tensor, num_groups: int) -> Groups:
    """Groups grown around the heads that are farthest from the seeds so far; the head with most at stake goes next."""
    num_heads, size = len(lost), len(lost) // num_groups
    seeds = [int(lost.sum(1).argmax())]
    while len(seeds) < num_groups:
        distance = lost[seeds].amin(0)
        distance[seeds] = -1.0
        seeds.append(int(distance.argmax()))
    groups = [[seed] for seed in seeds]
    left = [head for head in range(num_heads) if head not in seeds]
    while left:
        room = [group for group in groups if len(group) < size]
        cost = torch.stack([lost[group].mean(0) for group in room])[:, left]
        regret = cost.sort(0).values[1] - cost.amin(0) if len(room) > 1 else -cost[0]
        chosen = int(regret.argmax())
        room[int(cost[:, chosen].argmin())].append(left.pop(chosen))
    return groups


def _swap_while_it_helps(lost: Tensor, groups: Groups) -> Groups:
    """Swap the two heads of different groups that lower the loss most, until no swap lowers it."""
    num_heads = len(lost)
    group_of = torch.empty(num_heads, dtype=torch.long)
    for number, group in enumerate(groups):
        group_of[group] = number
    tolerance = 1e-12 * lost.sum().item()
    while True:
        # to_group[i, n]: what head i loses with the members of group n.
        to_group = torch.zeros(num_heads, len(groups), dtype=lost.dtype).index_add_(1, group_of, lost)
        own = to_group.gather(1, group_of[:, None])
        there = to_group[:, group_of]
        change = there + there.T - own - own.T - 2 * lost
        change = change.masked_fill(group_of[:, None] == group_of, 0.0)
        best = int(change.argmin())
        first, second = divmod(best, num_heads)
        if change[first, second] >= -tolerance:
            return [(group_of == number).nonzero().flatten().tolist() for number in range(len(groups))]
        group_of[[first, second]] = group_of[[second, first]]
