"""The decode kernels, case by case, against the reference."""

from __future__ import annotations

import pytest
import torch

from headfold.kernels import decode, gqa_decode, gqa_decode_reference
from headfold.kernels.decode import gqa_decode_triton

CACHE_DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8", "int4"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_the_kernels_are_what_runs(case, monkeypatch):
    """Guards the tests below: in this process gqa_decode must not take another path."""
    monkeypatch.setattr(decode, "_attend", None)
    with pytest.raises(TypeError, match="NoneType"):
        case([3]).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 16, 24, 64])
def test_layouts_and_dtypes(case, dtype, page_size):
    case([70, 3], dtype=dtype, page_size=page_size).check()


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("key_scales", ["token", "channel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantised(case, dtype, cache_dtype, key_scales):
    case([40, 0, 5], dtype=dtype, cache_dtype=cache_dtype, key_scales=key_scales, page_size=16).check()


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_quantised_with_float32_queries(case, cache_dtype):
    case([40, 5], dtype=torch.float32, cache_dtype=cache_dtype).check()


@pytest.mark.parametrize("key_scales", ["token", "channel"])
@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_quantised_values_of_any_magnitude(case, factor, key_scales):
    """float16 is what quantised values are multiplied in; neither scales nor queries may leave its range."""
    c = case([40, 9], cache_dtype="int8", key_scales=key_scales, dtype=torch.float32)
    c.q = c.q.to(torch.bfloat16)
    c.options["v_scale"] = c.options["v_scale"] * factor
    c.options["v_scale"][0, 3] *= 1e3
    c.options["k_scale"] = c.options["k_scale"] * factor
    c.check(softmax_scale=1 / factor / 8)


def test_d1_offsets_beyond_2_31(tmp_path, case):
    """A cache of 2.2e9 elements, in a sparse file: pages at its end, and slots at the end of one long sequence."""
    small = case([40, 17], cache_dtype="int8", page_size=16, num_kv_heads=2, poison=False)
    page_elements = 16 * 2 * 64
    num_pages = 2**31 // page_elements + 8
    shape = (num_pages, 16, 2, 64)
    large = [
        torch.from_file(str(tmp_path / name), shared=True, size=num_pages * page_elements, dtype=torch.int8).view(shape)
        for name in ("k", "v")
    ]
    table = small.options["block_table"]
    used = table[(table >= 0) & (table < 2**31 - 1)].unique().long()
    moved = num_pages - 1 - torch.arange(len(used))
    new_table = torch.full_like(table, -1)
    scales = {name: torch.zeros(num_pages, 16, 2) for name in ("k_scale", "v_scale")}
    for old, new in zip(used.tolist(), moved.tolist(), strict=True):
        new_table[table == old] = new
        large[0][new], large[1][new] = small.k[old], small.v[old]
        for name in scales:
            scales[name][new] = small.options[name][old]
    expected, _ = small.check()
    found = gqa_decode(small.q, *large, small.lengths, block_table=new_table, **scales)
    assert torch.equal(found, expected)

    # The same bytes as one sequence: its last tokens lie at slots whose offset does not fit 32 bits.
    flat = [x.view(1, -1, 2, 64) for x in large]
    flat_scales = {name: x.view(1, -1, 2) for name, x in scales.items()}
    length = torch.tensor([flat[0].shape[1]], dtype=torch.int32)
    arguments = (small.q[:1], *flat, length)
    found = gqa_decode(*arguments, window=50, **flat_scales)
    assert (found - gqa_decode_reference(*arguments, window=50, **flat_scales)).abs().max() < 2e-3


@pytest.mark.parametrize("page_size", [None, 16])
def test_d2_lengths_with_zeros(case, page_size):
    c = case([0, 5, 0, 33], page_size=page_size, sinks=torch.randn(4))
    out, lse = c.check()
    for b in (0, 2):
        assert (out[b] == 0).all() and (lse[b] == -torch.inf).all()
    alone = case([0, 5, 0, 33], page_size=page_size, sinks=c.options["sinks"])
    alone.lengths[1] = 0
    assert torch.equal(alone.run(num_splits=1)[0][3], c.run(num_splits=1)[0][3])


@pytest.mark.parametrize("cache_dtype", ["float16", *CACHE_DTYPES])
@pytest.mark.parametrize("page_size", [None, 16])
def test_d3_what_is_unused_changes_nothing(case, cache_dtype, page_size):
    arguments = {"cache_dtype": cache_dtype, "page_size": page_size}
    clean = case([17, 0, 40], poison=False, **arguments).run()
    poisoned = case([17, 0, 40], poison=True, **arguments).run()
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert poisoned[0].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 160, 256])
@pytest.mark.parametrize("cache_dtype", ["float16", "int8", "int4"])
def test_d4_head_dims(case, head_dim, cache_dtype):
    case([37], head_dim=head_dim, cache_dtype=cache_dtype, num_heads=2, num_kv_heads=1).check()


@pytest.mark.parametrize(
    ("group_size", "num_kv_heads"),
    [(m, g) for g in (1, 3) for m in (1, 3, 5, 6, 7, 12, 20, 24)] + [(1, 6), (3, 6), (7, 6), (71, 1)],
)
def test_d5_groups(case, group_size, num_kv_heads):
    case([19], num_heads=group_size * num_kv_heads, num_kv_heads=num_kv_heads).check()


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [1, 16, 70, 128])
def test_d6_window_of_exactly_w_keys(case, window, page_size):
    c = case([window - 1, window, window + 1, window + 130], page_size=page_size, num_heads=2, num_kv_heads=1)
    c.check(window=window)
    # Keys before the window are not read: their pages may be gone.
    if page_size:
        c.options["block_table"][3, : 130 // 16] = 2**30
        c.check(window=window)


@pytest.mark.parametrize("page_size", [16, 48])
def test_d7_lengths_around_pages(case, page_size):
    lengths = [k * page_size + d for k in (1, 2) for d in (-1, 0, 1)]
    case(lengths, page_size=page_size, num_heads=2, num_kv_heads=1).check()


def test_d10_zero_rows_and_outlier_channels(case):
    for cache_dtype in CACHE_DTYPES:
        c = case([20], cache_dtype=cache_dtype, poison=False)
        for x, scale in ((c.k, "k_scale"), (c.v, "v_scale")):
            x.view(torch.uint8)[0, 7] = 0x88 if cache_dtype == "int4" else 0  # 0 of offset 8, twice
            c.options[scale][0, 7] = 0
        assert c.check()[0].isfinite().all()

    # A channel of K a hundred times the others': with a scale per channel the error against the unquantised cache stays
    # near what it is without the outlier, with a scale per token it does not.
    outlier = torch.ones(64)
    outlier[5] = 100.0
    errors = {}
    for name, channel, key_scales in (
        ("none", torch.ones(64), "channel"),
        ("per channel", outlier, "channel"),
        ("per token", outlier, "token"),
    ):
        arguments = {"dtype": torch.float32, "key_scale_of_channel": channel, "num_heads": 4}
        stored = case([60], cache_dtype="int8", key_scales=key_scales, **arguments)
        full = case([60], cache_dtype="float32", **arguments)
        for c in (stored, full):
            c.q[..., 5] = c.q[..., 5] / 100.0  # what training does to such a channel's queries
        exact, _ = full.run()
        errors[name] = (stored.run()[0] - exact).abs().max().item()
    assert errors["per channel"] < 2 * errors["none"]
    assert errors["per token"] > 4 * errors["none"]


def test_d11_softcap_with_large_logits(case):
    c = case([50, 3], dtype=torch.float32)
    c.q = c.q.sign() * 25
    c.k = torch.where(c.k.isfinite(), c.k.sign(), c.k)  # logits up to 200 after the scale of 1/8
    out, _ = c.check(softcap=50.0, largest_logit=50.0)
    uncapped, _ = c.run()
    assert (out - uncapped).abs().max() > 1e-3
    case([50, 3], sinks=torch.randn(4), softcap=5.0).check()


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_d16_more_splits_than_tiles(case, cache_dtype, monkeypatch):
    """Scratch that starts as NaN, lengths below one tile, of several tiles, and none."""
    empty = torch.empty

    def nan(*args, **options):
        x = empty(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(-1)

    monkeypatch.setattr(torch, "empty", nan)
    c = case([1, 2, 7, 300, 0], cache_dtype=cache_dtype, num_kv_heads=1, sinks=torch.randn(4))
    one, one_lse = c.check(num_splits=1)
    for num_splits in (2, 8, 128):
        out, lse = c.check(num_splits=num_splits)
        assert (out - one).abs().max() < 2e-3
        assert torch.allclose(lse, one_lse, atol=1e-5)


def test_splits_are_chosen_from_the_lengths(case):
    """Without num_splits the kernels split by themselves: long sequences, and short ones beside them."""
    c = case([1000, 3, 0, 260], num_heads=2, num_kv_heads=1, page_size=64)
    auto, _ = c.check()
    assert (auto - c.run(num_splits=1)[0]).abs().max() < 2e-3


def test_fixed_splits_do_not_depend_on_the_batch(case):
    together = case([300, 5, 129], num_kv_heads=1, page_size=16)
    for b in range(3):
        options = together.options | {"block_table": together.options["block_table"][b : b + 1]}
        arguments = (together.q[b : b + 1], together.k, together.v, together.lengths[b : b + 1])
        alone = gqa_decode(*arguments, num_splits=4, **options)
        assert torch.equal(alone[0], together.run(num_splits=4)[0][b])


def test_d17_a_start_per_row(case):
    c = case([40, 40, 200], page_size=16, num_heads=2, num_kv_heads=1)
    c.options["seq_starts"] = torch.tensor([3, 17, 0], dtype=torch.int32)
    c.check()
    c.check(window=30)
    c.options["seq_starts"] = torch.tensor([40, 0, 199], dtype=torch.int32)  # nothing left, everything, the last
    assert (c.check()[0][0] == 0).all()


def test_sinks_are_counted_once(case):
    sinks = torch.tensor([0.0, 3.0, -2.0, 10.0])
    c = case([300], num_kv_heads=2, sinks=sinks)
    for num_splits in (1, 4):
        c.check(num_splits=num_splits)
    # Against no sink: the denominator grows by exp(sink).
    with_sink, without = c.run()[1], c.run(sinks=None)[1]
    assert torch.allclose(with_sink[0], torch.logaddexp(without[0], sinks), atol=1e-5)


def test_strides(case):
    """Caches laid out (B, G, S, D) as transformers does, K and V with different strides, queries inside a larger
    tensor, rows that are aligned to less than 16 bytes."""
    c = case([40, 21], dtype=torch.float16)
    expected = c.check()[0]
    c.k = c.k.transpose(1, 2).contiguous().transpose(1, 2)
    c.q = torch.stack([c.q, c.q], dim=2)[:, :, 1]
    assert torch.equal(c.run()[0], expected)
    wide = torch.randn(*c.v.shape[:3], 67).to(c.v.dtype)
    wide[..., 3:] = c.v
    c.v = wide[..., 3:]
    assert torch.equal(c.run()[0], expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_sinks_lengths_and_starts_inside_larger_tensors(case, num_splits):
    starts = torch.tensor([3, 0], dtype=torch.int32)
    c = case([70, 21], num_splits=num_splits, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), seq_starts=starts)
    expected = c.check()[0]
    c.lengths = torch.stack([c.lengths, c.lengths + 1], dim=1)[:, 0]
    for name in ("sinks", "seq_starts"):
        x = c.options[name]
        c.options[name] = torch.stack([x, x + 9], dim=1)[:, 0]
        assert c.options[name].stride() == (2,)
    assert torch.equal(c.run()[0], expected)


def test_compiles_as_one_graph(case):
    """The fake implementation lets torch.compile trace through the op without running it."""
    c = case([40, 21], page_size=16, cache_dtype="int8")

    def step(q, k, v, lengths):
        return gqa_decode(q * 1, k, v, lengths, return_lse=True, **c.options)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(c.q, c.k, c.v, c.lengths), c.run(), strict=True):
        assert torch.equal(found, expected)


def test_operator_contract(case):
    c = case([20, 7], page_size=16)
    arguments = (c.q, c.k, c.v, c.lengths, 0.125, None, c.options["block_table"])
    torch.library.opcheck(gqa_decode_triton, arguments)


def test_empty_batch():
    q, cache = torch.zeros(0, 4, 64), torch.zeros(0, 8, 2, 64)
    out, lse = gqa_decode(q, cache, cache, torch.zeros(0, dtype=torch.int32), return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
