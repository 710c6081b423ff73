"""The reference against a definition written head by head, the CPU path against the reference, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from headfold.kernels import KernelError, gqa_decode, gqa_decode_reference
from headfold.kernels.quantise import quantise, token_scale


def by_hand(q, k, v, start, end, *, scale, window=None, softcap=None, sink=None):
    """One query vector (D) over keys and values (S, D), in Python floats."""
    if window is not None:
        start = max(start, end - window)
    logits = [scale * sum(a * b for a, b in zip(q.tolist(), k[n].tolist(), strict=True)) for n in range(start, end)]
    if softcap is not None:
        logits = [softcap * math.tanh(x / softcap) for x in logits]
    total = sum(math.exp(x) for x in logits) + (math.exp(sink) if sink is not None else 0.0)
    out = [sum(math.exp(x) * v[start + i][d].item() for i, x in enumerate(logits)) / total for d in range(v.shape[1])]
    return torch.tensor(out), math.log(total)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 0.7}, {"sinks": True}, {"softmax_scale": 1.5}])
@pytest.mark.parametrize("paged", [False, True])
def test_by_hand(options, paged):
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = 6, 2, 8
    q = torch.randn(2, num_heads, head_dim)
    k, v = torch.randn(2, 12, num_kv_heads, head_dim), torch.randn(2, 12, num_kv_heads, head_dim)
    lengths, starts = torch.tensor([5, 11], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    sinks = torch.randn(num_heads) if options.pop("sinks", False) else None
    arguments = {"seq_starts": starts, "sinks": sinks, **options}
    caches = (k, v)
    if paged:
        order = torch.tensor([4, 1, 3, 0, 5, 2])
        caches = tuple(torch.empty(6, 4, num_kv_heads, head_dim) for _ in range(2))
        for cache, x in zip(caches, (k, v), strict=True):
            cache[order] = x.unflatten(1, (3, 4)).flatten(0, 1)
        arguments["block_table"] = order.view(2, 3).to(torch.int32)
    out, lse = gqa_decode_reference(q, *caches, lengths, return_lse=True, **arguments)
    for b in range(2):
        for h in range(num_heads):
            g = h // 3
            expected, expected_lse = by_hand(
                q[b, h],
                k[b, :, g],
                v[b, :, g],
                int(starts[b]),
                int(lengths[b]),
                scale=options.get("softmax_scale", head_dim**-0.5),
                window=options.get("window"),
                softcap=options.get("softcap"),
                sink=None if sinks is None else sinks[h].item(),
            )
            assert (out[b, h] - expected).abs().max() < 1e-5
            assert abs(lse[b, h].item() - expected_lse) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"starts": True}, {"softcap": 3.0}, {"sinks": True}])
def test_cpu_path_is_the_reference(dtype, options):
    """Equal and unequal lengths; NaN past them; strided caches."""
    torch.manual_seed(1)
    q = torch.randn(3, 4, 16).to(dtype)
    k, v = (torch.randn(3, 2, 10, 16).to(dtype).transpose(1, 2) for _ in range(2))
    arguments = dict(options)
    if arguments.pop("starts", False):
        arguments["seq_starts"] = torch.tensor([0, 2, 5], dtype=torch.int32)
    if arguments.pop("sinks", False):
        arguments["sinks"] = torch.randn(4)
    for lengths in ([7, 7, 7], [0, 3, 10], [0, 0, 0]):
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        for b, length in enumerate(lengths):
            k[b, length:], v[b, length:] = torch.nan, torch.nan
        found = gqa_decode(q, k, v, seq_lens, **arguments)
        expected = gqa_decode_reference(q, k, v, seq_lens, **arguments)
        assert found.dtype == dtype and found.shape == q.shape
        assert (found.float() - expected.float()).abs().max() <= 8 * torch.finfo(dtype).eps
        k, v = torch.nan_to_num(k), torch.nan_to_num(v)


def valid() -> dict:
    k = torch.zeros(2, 8, 2, 16)
    return {
        "q": torch.zeros(2, 4, 16),
        "k_cache": k,
        "v_cache": k.clone(),
        "seq_lens": torch.tensor([1, 2], dtype=torch.int32),
    }


def quantised() -> dict:
    arguments = valid()
    scale = token_scale(arguments["k_cache"], "int8")
    stored = quantise(arguments["k_cache"], scale[..., None], "int8")
    return arguments | {"k_cache": stored, "v_cache": stored.clone(), "k_scale": scale, "v_scale": scale}


@pytest.mark.parametrize("run", [gqa_decode, gqa_decode_reference])
@pytest.mark.parametrize(
    ("name", "found", "change"),
    [
        ("q", "list", {"q": [1.0]}),
        ("q", r"\(4, 16\)", {"q": torch.zeros(4, 16)}),
        ("q", "torch.float64", {"q": torch.zeros(2, 4, 16, dtype=torch.float64)}),
        (
            "q",
            "found 0",
            {"q": torch.zeros(2, 4, 0), "k_cache": torch.zeros(2, 8, 2, 0), "v_cache": torch.zeros(2, 8, 2, 0)},
        ),
        ("k_cache", r"\(2, 8, 2, 8\)", {"k_cache": torch.zeros(2, 8, 2, 8)}),
        ("k_cache", r"\(3, 8, 2, 16\)", {"k_cache": torch.zeros(3, 8, 2, 16)}),
        ("k_cache", "found 3", {"k_cache": torch.zeros(2, 8, 3, 16), "v_cache": torch.zeros(2, 8, 3, 16)}),
        ("k_cache", "torch.float16", {"k_cache": torch.zeros(2, 8, 2, 16, dtype=torch.float16)}),
        ("k_cache", "stride 16", {"k_cache": torch.zeros(2, 16, 2, 8).transpose(1, 3)}),
        ("v_cache", r"\(2, 8, 2, 8\)", {"v_cache": torch.zeros(2, 8, 2, 8)}),
        ("seq_lens", "torch.int64", {"seq_lens": torch.tensor([1, 2])}),
        ("seq_lens", r"\(3,\)", {"seq_lens": torch.zeros(3, dtype=torch.int32)}),
        ("seq_starts", "torch.int64", {"seq_starts": torch.tensor([0, 0])}),
        ("block_table", r"\(3, 2\)", {"block_table": torch.zeros(3, 2, dtype=torch.int32)}),
        ("window", "found 0", {"window": 0}),
        ("softcap", "found -1", {"softcap": -1.0}),
        ("softcap", "found 5", {"softcap": "5"}),
        ("softcap", "found 5.0", {"softcap": torch.tensor(5.0)}),
        ("softmax_scale", "found 1", {"softmax_scale": "1"}),
        ("softmax_scale", "found nan", {"softmax_scale": math.nan}),
        ("sinks", r"\(3,\)", {"sinks": torch.zeros(3)}),
        ("num_splits", "found 129", {"num_splits": 129}),
        ("k_scale", "found one", {"k_scale": torch.zeros(2, 8, 2)}),
    ],
)
def test_wrong_arguments_are_refused_by_name(run, name, found, change):
    run(**valid())
    with pytest.raises(KernelError, match=f"^{name} must be .*{found}"):
        run(**(valid() | change))


@pytest.mark.parametrize("run", [gqa_decode, gqa_decode_reference])
@pytest.mark.parametrize(
    ("name", "found", "change"),
    [
        ("k_scale", "found None", {"k_scale": None}),
        ("v_scale", "found None", {"v_scale": None}),
        ("v_scale", r"\(2, 16\)", {"v_scale": torch.zeros(2, 16)}),
        ("k_scale", r"\(2, 8\)", {"k_scale": torch.zeros(2, 8)}),
        ("k_scale", "torch.float16", {"k_scale": torch.zeros(2, 8, 2, dtype=torch.float16)}),
    ],
)
def test_wrong_scales_are_refused_by_name(run, name, found, change):
    run(**quantised())
    with pytest.raises(KernelError, match=f"^{name} must be .*{found}"):
        run(**(quantised() | change))


@pytest.mark.parametrize("run", [gqa_decode, gqa_decode_reference])
def test_negative_lengths_and_starts_are_none(run):
    arguments = valid()
    for name in ("k_cache", "v_cache"):
        arguments[name] = torch.randn(2, 8, 2, 16)
    starts = {"seq_starts": torch.tensor([-5, -5], dtype=torch.int32)}
    for lengths in ([-2, 3], [0, 3]):
        out = run(**(arguments | {"seq_lens": torch.tensor(lengths, dtype=torch.int32)}), **starts)
        expected = run(**(arguments | {"seq_lens": torch.tensor([0, 3], dtype=torch.int32)}))
        assert torch.equal(out, expected) and out[0].count_nonzero() == 0


@pytest.mark.parametrize("run", [gqa_decode, gqa_decode_reference])
def test_a_length_beyond_the_cache_is_refused(run):
    with pytest.raises(KernelError, match=r"seq_lens.*at most the 8 slots.*found 9"):
        run(**(valid() | {"seq_lens": torch.tensor([1, 9], dtype=torch.int32)}))
