"""What replaces a group of key/value heads by one: pure functions on tensors, without files or models.

Shapes in one letter code: G KV heads, N new KV heads, D head_dim, E hidden size. New head n replaces the G/N adjacent
heads n*G/N .. (n+1)*G/N - 1; any other grouping is a permutation of the heads beforehand (see grouping.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_into_groups(heads: Tensor, num_groups: int) -> Tensor:
    """Heads (G, ...) as groups of adjacent heads (N, G/N, ...); a view."""
    assert num_groups > 0 and heads.shape[0] % num_groups == 0, (tuple(heads.shape), num_groups)
    return heads.unflatten(0, (num_groups, heads.shape[0] // num_groups))


def mean(heads: Tensor, num_groups: int) -> Tensor:
    """The mean of each group of adjacent heads: (G, ...) -> (N, ...), the conversion of arXiv 2305.13245, section 2.1.

    The trailing shape is free: (D, E) for weights, (D,) for biases and for the weights of norms. The sum is taken in
    float32 or better and rounded once, to the dtype of `heads`. N = G gives `heads` to the last bit.
    """
    groups = split_into_groups(heads, num_groups)
    wide = torch.promote_types(heads.dtype, torch.float32)
    return groups.mean(dim=1, dtype=wide).to(heads.dtype)


def first(heads: Tensor, num_groups: int) -> Tensor:
    """The first head of each group of adjacent heads: (G, ...) -> (N, ...), to the last bit."""
    return split_into_groups(heads, num_groups)[:, 0].clone()


def random(heads: Tensor, num_groups: int, *, std: float, generator: torch.Generator) -> Tensor:
    """Freshly initialised heads: (G, ...) -> (N, ...), normal with mean 0 and the given standard deviation.

    The lower bound that the GQA paper compares with (arXiv 2305.13245, section 3.3). `std` is the model's
    initializer_range; biases, which models initialise to zero, take std 0. N = G gives `heads` to the last bit, as
    for every method: there is nothing to merge.
    """
    if num_groups == heads.shape[0]:
        return heads.clone()
    shape = (num_groups, *heads.shape[1:])
    fresh = torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device) * std
    return fresh.to(device=heads.device, dtype=heads.dtype)
