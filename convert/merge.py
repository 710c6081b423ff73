"""What replaces a group of key/value heads by one: pure functions on tensors, without files or models.

Shapes in one letter code: G KV heads, N new KV heads, D head_dim, E hidden size. New head n replaces the G/N adjacent
heads n*G/N .. (n+1)*G/N - 1; any other grouping is a permutation of the heads beforehand (see grouping.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headfold.convert.families import Rotary

_WEIGHT_FLOOR = 1e-4
"""Smallest weight of a rotary pair of keys, as a share of the largest: pairs that no query reads are divided by it."""

_MAX_ALIGNMENT_SWEEPS = 200
_ALIGNMENT_TOLERANCE = 1e-9


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
    if wide == heads.dtype:
        return groups.mean(dim=1)
    # torch.mean would first make a wide copy of all heads: head by head the bits are the same, in a third of the time.
    total = groups[:, 0].to(wide)
    for head in range(1, groups.shape[1]):
        total += groups[:, head]
    return total.div_(groups.shape[1]).to(heads.dtype)


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


@dataclass(frozen=True)
class SharedHead:
    """One head in place of n: how it is made of the old heads, and how they are restored from it.

    In terms of the projected channels, stacked head by head: shared = encode @ old, old ~ decode @ shared. encode
    (D, n*D) is what the rows of K or V and their biases are multiplied by; decode (n*D, D) is what moves to the matrix
    on the other side: Wo_h decode_h for a value head, decode_h^T Wq for the queries of a key head. Both float64.
    """

    encode: Tensor
    decode: Tensor

    def kept(self, gram: Tensor, weight: Tensor) -> float:
        """The share of the old heads' energy, E|x|^2 in the metric `weight`, that survives encoding and decoding.

        gram (n*D, n*D): E[x x^T] of the stacked heads x. weight (n, D, D): the metric of each head. 1 is lossless; the
        share is negative where zeros in place of the heads would be closer to them than what is restored.
        """
        metric = torch.block_diag(*weight.double())
        lost = torch.eye(len(metric), dtype=torch.float64, device=metric.device) - self.decode @ self.encode
        energy = (metric * gram).sum()
        return 1.0 if energy <= 0 else 1.0 - ((metric * (lost @ gram.double() @ lost.T)).sum() / energy).item()


def fold_values(gram: Tensor, weight: Tensor) -> SharedHead:
    """The value head that minimises E|Wo_h (v_h - restored v_h)|^2 summed over the n heads that it replaces.

    gram (n*D, n*D): E[v v^T] of the stacked old value heads. weight (n, D, D): the sum of Wo^T Wo over the query heads
    that read each of them. A principal component analysis in the metric of what the output projection sees; the loss is
    the sum of the eigenvalues of M^1/2 C M^1/2 that are dropped (docs/fold.md, equation 2). Also right for key channels
    that no rotary embedding turns, with E[q q^T] summed over the query heads of a key head as its weight.
    """
    num_heads, num_channels, _ = weight.shape
    roots, inverse_roots = zip(*(_roots(block) for block in _symmetric(weight.double())), strict=True)
    root, inverse_root = torch.block_diag(*roots), torch.block_diag(*inverse_roots)
    gram = _symmetric(gram.double())
    directions = torch.linalg.eigh(root @ gram @ root).eigenvectors[:, -num_channels:].flip(1)
    encode, decode = directions.T @ root, inverse_root @ directions
    scale = _balance(encode, gram, num_heads)
    return SharedHead(encode * scale, decode / scale)


def key_metric(query_gram: Tensor, rotary: Rotary) -> Tensor:
    """What an error e of a key costs the logits: (n, D, D) such that e^T metric e = E|q . R e|^2, over its queries q.

    query_gram (n, D, D): the sum of E[q q^T] over the query heads that read each key head. The relative rotation R
    between query and key takes all angles, so that of a rotated pair only the energy |q|^2 / 2 counts.
    """
    query_gram = _symmetric(query_gram.double())
    real, imaginary = pair_channels(rotary, query_gram.device)
    metric = torch.zeros_like(query_gram)
    energy = (query_gram[:, real, real] + query_gram[:, imaginary, imaginary]) / 2
    metric[:, real, real] = metric[:, imaginary, imaginary] = energy
    rest = torch.arange(2 * len(real), query_gram.shape[-1], device=query_gram.device)
    metric[:, rest[:, None], rest] = query_gram[:, rest[:, None], rest]
    return metric


def fold_keys(gram: Tensor, metric: Tensor, rotary: Rotary) -> SharedHead:
    """The key head that minimises E|q_h . (k_h - restored k_h)|^2 over the n heads that it replaces, pair by pair.

    gram (n*D, n*D): E[k k^T] of the stacked old key heads, before or after rotary. metric (n, D, D): of key_metric.
    Rotary lets a key be multiplied by one complex number per pair of channels, so each pair has a principal component
    of its own over the n heads, weighted by the energy of the queries in that pair (docs/fold.md, equation 3); the
    channels that are not rotated have one together, as values have.
    """

    def pair_numbers(pairs: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
        weight = metric[:, channels, channels].T.double().clamp_min(0).sqrt()
        floor = weight.amax() * _WEIGHT_FLOOR
        weight = weight.clamp_min(floor) if floor > 0 else torch.ones_like(weight)
        directions = torch.linalg.eigh(weight[:, :, None] * pairs * weight[:, None, :]).eigenvectors[:, :, -1]
        encoders, decoders = directions.conj() * weight, directions / weight
        scale = _balance_pairs(encoders, pairs)
        return encoders * scale, decoders / scale

    def share_rest(gram: Tensor, channels: Tensor) -> SharedHead:
        return fold_values(gram, metric[:, channels[:, None], channels])

    return _share_keys(gram, len(metric), rotary, pair_numbers, share_rest)


def align_values(gram: Tensor, num_heads: int) -> SharedHead:
    """The mean of n value heads after each was rotated onto the others, at their mean norm (arXiv 2412.20677).

    gram (n*D, n*D): E[v v^T] of the stacked heads. The orthogonal matrices Q_h maximise E|sum_h Q_h v_h|^2
    (generalised Procrustes analysis): from the principal directions of the heads, each is fitted to the sum of all
    others in turn, until none moves. The sum is scaled to the heads' root-mean-square norm; each head is restored by
    its Q_h^T alone.
    """
    num_channels = len(gram) // num_heads
    gram = _symmetric(gram.double())
    start = torch.linalg.eigh(gram).eigenvectors[:, -num_channels:].flip(1)
    rotations = torch.stack([_nearest_orthogonal(block).T for block in start.unflatten(0, (num_heads, num_channels))])
    blocks = gram.unflatten(1, (num_heads, num_channels)).unflatten(0, (num_heads, num_channels))
    for _ in range(_MAX_ALIGNMENT_SWEEPS):
        before = rotations.clone()
        for head in range(num_heads):
            others = sum(
                (rotations[other] @ blocks[other, :, head] for other in range(num_heads) if other != head),
                torch.zeros_like(rotations[head]),
            )
            if others.any():
                rotations[head] = _nearest_orthogonal(others)
        if (rotations - before).abs().max() < _ALIGNMENT_TOLERANCE:
            break
    encode = torch.cat(list(rotations), dim=1)
    return SharedHead(encode * _balance(encode, gram, num_heads), torch.cat([turn.T for turn in rotations]))


def align_keys(gram: Tensor, num_heads: int, rotary: Rotary) -> SharedHead:
    """The mean of n key heads after each was turned onto the others, at their mean norm (arXiv 2412.20677).

    gram (n*D, n*D): E[k k^T] of the stacked heads, before or after rotary. Where rotary turns a pair of channels, all
    that may be chosen is a phase per head and pair; the channels that it leaves alone are aligned as values are.
    """

    def pair_numbers(pairs: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
        phases = _phase(torch.linalg.eigh(pairs).eigenvectors[:, :, -1].conj())
        for _ in range(_MAX_ALIGNMENT_SWEEPS):
            before = phases.clone()
            for head in range(num_heads):
                towards = torch.einsum("pn,pn->p", phases, pairs[:, :, head]) - phases[:, head] * pairs[:, head, head]
                phases[:, head] = torch.where(towards.abs() > 0, _phase(towards), phases[:, head])
            if (phases - before).abs().max() < _ALIGNMENT_TOLERANCE:
                break
        return phases * _balance_pairs(phases, pairs), phases.conj()

    return _share_keys(gram, num_heads, rotary, pair_numbers, lambda gram, channels: align_values(gram, num_heads))


def pair_channels(rotary: Rotary, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The channels of the real and of the imaginary parts of the pairs that rotary turns: two int64 vectors."""
    if rotary.kind == "none":
        channels = torch.empty(2, 0, dtype=torch.long, device=device)
    elif rotary.kind == "half":
        channels = torch.arange(rotary.num_channels, device=device).view(2, -1)
    else:
        assert rotary.kind == "interleaved", rotary
        channels = torch.arange(rotary.num_channels, device=device).view(-1, 2).T
    return channels[0], channels[1]


def _share_keys(
    gram: Tensor,
    num_heads: int,
    rotary: Rotary,
    pair_numbers: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    share_rest: Callable[[Tensor, Tensor], SharedHead],
) -> SharedHead:
    """One key head in place of n, from two functions of the Gram matrices of the heads and of channel numbers.

    pair_numbers: for the rotary pairs (P, n, n), the complex numbers (P, n) that encode and those that decode.
    share_rest: for the channels without rotary (n*R, n*R), as a head of R channels.
    """
    gram = _symmetric(gram.double())
    head_dim = len(gram) // num_heads
    blocks = gram.unflatten(1, (num_heads, head_dim)).unflatten(0, (num_heads, head_dim))
    encode = gram.new_zeros(head_dim, num_heads, head_dim)
    decode = gram.new_zeros(num_heads, head_dim, head_dim)
    real, imaginary = pair_channels(rotary, gram.device)
    if len(real):
        # E[z_a conj(z_b)] of the old keys as complex numbers: (P, n, n).
        pairs = torch.complex(
            blocks[:, real, :, real] + blocks[:, imaginary, :, imaginary],
            blocks[:, imaginary, :, real] - blocks[:, real, :, imaginary],
        )
        encoders, decoders = pair_numbers(pairs, real)
        _set_complex(encode.movedim(1, 0), encoders.T, real, imaginary)
        _set_complex(decode, decoders.T, real, imaginary)
    rest = torch.arange(2 * len(real), head_dim, device=gram.device)
    if len(rest):
        still = share_rest(blocks[:, rest][:, :, :, rest].flatten(2).flatten(0, 1), rest)
        encode[rest[:, None, None], torch.arange(num_heads)[:, None], rest] = still.encode.unflatten(1, (num_heads, -1))
        decode[:, rest[:, None], rest] = still.decode.unflatten(0, (num_heads, -1))
    return SharedHead(encode.flatten(1), decode.flatten(0, 1))


def _set_complex(matrices: Tensor, numbers: Tensor, real: Tensor, imaginary: Tensor) -> None:
    """Write complex numbers (n, P) as the 2x2 matrices that multiply by them into matrices (n, D, D)."""
    matrices[:, real, real] = numbers.real
    matrices[:, imaginary, imaginary] = numbers.real
    matrices[:, real, imaginary] = -numbers.imag
    matrices[:, imaginary, real] = numbers.imag


def _balance(encode: Tensor, gram: Tensor, num_heads: int) -> Tensor:
    """What scales the shared head to the root-mean-square norm of the heads that it replaces."""
    return _ratio(gram.trace() / num_heads, (encode @ gram @ encode.T).trace())


def _balance_pairs(encoders: Tensor, pairs: Tensor) -> Tensor:
    """The same for each rotary pair: (P, 1)."""
    old = pairs.diagonal(dim1=1, dim2=2).real.mean(1, keepdim=True)
    new = torch.einsum("pa,pab,pb->p", encoders, pairs, encoders.conj()).real[:, None]
    return _ratio(old, new)


def _ratio(old: Tensor, new: Tensor) -> Tensor:
    """The factor of norms between two energies; 1 where either is nothing but rounding."""
    sound = (old > 0) & (new > torch.finfo(new.dtype).tiny)
    return torch.where(sound, old / torch.where(sound, new, 1.0), 1.0).sqrt()


def _roots(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a symmetric positive semi-definite matrix and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(weight)
    is_zero = values <= values.amax() * len(values) * torch.finfo(values.dtype).eps
    root = torch.where(is_zero, 0.0, values).sqrt()
    inverse = torch.where(is_zero, 0.0, 1 / torch.where(is_zero, 1.0, root))
    return vectors * root @ vectors.T, vectors * inverse @ vectors.T


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal Q nearest to a matrix. Where that is E[y x^T], Q x is as near to y as a rotation brings it."""
    left, _, right = torch.linalg.svd(matrix)
    return left @ right


def _phase(numbers: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(numbers.real), numbers.angle())


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
