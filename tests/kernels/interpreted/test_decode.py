"""The decode kernels, case by case, against the reference."""

from __future__ import annotations

import contextlib

import pytest
import torch

from headfold.kernels import KernelError, decode, gqa_decode, gqa_decode_reference
from headfold.kernels.decode import gqa_decode_triton
from headfold.kernels.quantise import quantise, token_scale
from headfold.kernels.reference import decode_in_dtype

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


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e5m2"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
def test_what_an_attention_sink_leaves_is_not_lost(dtype, bound, cache_dtype, num_splits):
    """A key without value takes all attention but for 1e-4, which thousands share: each has less than float16 knows."""
    q, k, v = torch.zeros(1, 1, 64), torch.zeros(1, 4096, 1, 64), torch.ones(1, 4096, 1, 64)
    q[..., 0], k[0, 5, 0, 0], v[0, 5] = 1, 17.4 * 8, 0
    scales = {}
    if cache_dtype is not None:
        scales = {f"{name}_scale": token_scale(x, cache_dtype) for name, x in (("k", k), ("v", v))}
        k, v = (quantise(x, scale[..., None], cache_dtype) for x, scale in zip((k, v), scales.values(), strict=True))
    else:
        k, v = k.to(dtype), v.to(dtype)
    lengths = torch.tensor([4096], dtype=torch.int32)
    found = gqa_decode(q.to(dtype), k, v, lengths, num_splits=num_splits, **scales)
    exact, _ = decode_in_dtype(torch.float64, q.to(dtype), k, v, lengths, **scales)
    assert exact.min() > 1e-4
    assert ((found.double() - exact) / exact).abs().max() < bound


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

    # The same bytes as one sequence: its last tokens lie at slots whose offset does not fit 32 bits. Also shifted by a
    # byte: then offsets are counted in single elements.
    for shift in (0, 1):
        flat = [x.view(-1)[shift : x.numel() - 128 + shift].view(1, -1, 2, 64) for x in large]
        flat_scales = {name: x.view(1, -1, 2)[:, : flat[0].shape[1]] for name, x in scales.items()}
        length = torch.tensor([flat[0].shape[1]], dtype=torch.int32)
        arguments = (small.q[:1], *flat, length)
        found = gqa_decode(*arguments, window=50, **flat_scales)
        expected = gqa_decode_reference(*arguments, window=50, **flat_scales)
        assert expected.count_nonzero() and (found - expected).abs().max() < 2e-3

    # Sequences as far apart.
    far = [x.view(-1).as_strided((3, 64, 2, 64), (2**30, 128, 64, 1)) for x in large]
    for x in far:
        x.random_(-127, 128)
    far_scales = {name: torch.rand(3, 64, 2) / 100 for name in scales}
    arguments = (torch.randn(3, 4, 64).half(), *far, torch.tensor([40, 0, 64], dtype=torch.int32))
    found = gqa_decode(*arguments, **far_scales)
    assert (found - gqa_decode_reference(*arguments, **far_scales)).abs().max() < 2e-3


def test_d1_queries_as_far_apart(tmp_path, case):
    """As they are where q is the last token's of a long prompt, (B, H, T, D)."""
    c = case([20], num_heads=3, num_kv_heads=1)
    expected, _ = c.check()
    file = torch.from_file(str(tmp_path / "q"), shared=True, size=2**31 + 64, dtype=torch.float16)
    q = file.as_strided(c.q.shape, (2**31, 2**30, 1))
    q.copy_(c.q)
    c.q = q
    assert torch.equal(c.run()[0], expected)


def test_d1_slots_as_far_apart_as_may_be(tmp_path, case):
    """Within a tile of keys the kernels' offsets have 32 bits: what they do not reach is refused."""
    c = case([125], num_heads=2, num_kv_heads=1)
    expected, _ = c.check()
    for name in ("k", "v"):
        file = torch.from_file(str(tmp_path / name), shared=True, size=128 * 2**24, dtype=torch.float16)
        wide = file.view(1, 128, 1, 2**24)[..., :64]
        setattr(c, name, wide.copy_(getattr(c, name)))
    assert torch.equal(c.run()[0], expected)
    for name in ("k_cache", "v_cache"):
        caches = {"k_cache": c.k, "v_cache": c.v}
        caches[name] = caches[name].as_strided((1, 127, 1, 64), (0, 2**24 + 1, 64, 1))
        with pytest.raises(KernelError, match=rf"^{name} must be of slots at most {2**24} elements apart"):
            gqa_decode(c.q, caches["k_cache"][:, :127], caches["v_cache"][:, :127], c.lengths)


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


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_d6_a_window_larger_than_any_length(case, window):
    c = case([0, 5, 33], num_heads=2, num_kv_heads=1)
    assert torch.equal(c.run(window=window)[0], c.check()[0])


@pytest.mark.parametrize("page_size", [16, 48])
def test_d7_lengths_around_pages(case, page_size):
    lengths = [k * page_size + d for k in (1, 2) for d in (-1, 0, 1)]
    case(lengths, page_size=page_size, num_heads=2, num_kv_heads=1).check()


def test_d10_zero_rows_and_outlier_channels(case):
    # One row of zeros among others; and nothing but zeros, in a sequence of one token and in the first of two tiles.
    for cache_dtype in CACHE_DTYPES:
        c = case([140, 1, 20], cache_dtype=cache_dtype, poison=False)
        for x, scale in ((c.k, "k_scale"), (c.v, "v_scale")):
            for zeros in ((0, slice(128)), (1, slice(1)), (2, 7)):
                x.view(torch.uint8)[zeros] = 0x88 if cache_dtype == "int4" else 0  # 0 of offset 8, twice
                c.options[scale][zeros] = 0
        out, _ = c.check()
        assert out.isfinite().all() and (out[1] == 0).all()

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [200.0, 20000.0])
def test_d11_softcap_with_large_logits(case, dtype, largest):
    """A cap of 50 over logits up to +-200, and up to where exp overflows."""
    c = case([50, 3], dtype=dtype)
    c.q = c.q.sign() * (largest / 8)  # the scale is 1/8, D is 64
    c.q[:, 1::2] = -c.q[:, ::2]
    steps = torch.linspace(-1, 1, c.k.shape[1])[:, None, None]
    c.k = torch.where(c.k.isfinite(), (c.q[:, None, ::2].sign() * steps).to(dtype), c.k)
    out, _ = c.check(softcap=50.0, largest_logit=50.0)
    assert (out - c.run()[0]).abs().max() > 1e-3


def test_softcap_with_sinks(case):
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

    # More splits in use than are merged at once: 19 tiles of 32 keys, of which the last weigh the most.
    c = case([600, 33, 0], cache_dtype=cache_dtype, head_dim=256, num_heads=2, num_kv_heads=1)
    last = c.k if cache_dtype == "float16" else c.options["k_scale"]
    last[0, 560:] *= 5
    assert (c.check(num_splits=20)[0] - c.check(num_splits=1)[0]).abs().max() < 2e-3


class Watched:
    """A kernel that is launched as ever; `before` sees the arguments first."""

    def __init__(self, kernel, before):
        self.kernel, self.before = kernel, before

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.before(*args)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize(
    ("num_sms", "options"),
    [(4, {"window": 500}), (132, {"seq_starts": torch.tensor([70, *[0] * 8], dtype=torch.int32)})],
)
def test_splits_are_chosen_from_the_lengths(case, monkeypatch, num_sms, options):
    """Without num_splits: as the cost model, written here once more, would have it. Long, short and empty sequences."""
    lengths = [600, 3, 0, 260, *[20] * 5]
    c = case(lengths, num_heads=2, num_kv_heads=1, head_dim=256, page_size=64, **options)
    used = []
    monkeypatch.setattr(decode, "_device", lambda device: ("sm_90", num_sms))
    monkeypatch.setattr(decode, "_combine", Watched(decode._combine, lambda *args: used.append(args[2].tolist())))
    c.check()

    tile = decode.tile_for("sm_90", 256, 2, torch.float16, "float16")
    at_once = num_sms * tile.programs_per_sm
    starts = options.get("seq_starts", torch.zeros(9)).int().tolist()
    if "window" in options:
        starts = [max(length - options["window"], 0) for length in lengths]
    tiles = [
        -(-end // tile.block_n) - start // tile.block_n if end > start else 0
        for start, end in zip(starts, lengths, strict=True)
    ]
    costs = {}
    for num_splits in range(1, -(-2 * at_once // 9) + 1):
        each = -(-max(tiles) // num_splits)
        programs = sum(-(-n // each) for n in tiles)
        costs[num_splits] = -(-programs // at_once) * (each + 10) + 0.2 * num_splits
    each = -(-max(tiles) // min(costs, key=costs.__getitem__))
    assert used == [[-(-n // each) for n in tiles]] and max(used[0]) > 1


def test_launches_where_its_tensors_are(case, monkeypatch):
    """On the device of q, which need not be the current one: Triton alone would take that."""
    inside, launched = [], []

    @contextlib.contextmanager
    def device_of(x):
        inside.append(x)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("_attend", "_combine"):
        monkeypatch.setattr(decode, name, Watched(getattr(decode, name), lambda *_: launched.append(list(inside))))
    c = case([300])
    c.run(num_splits=2)
    assert len(launched) == 2 and all(len(x) == 1 and x[0].shape == c.q.shape for x in launched)


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


@pytest.mark.parametrize("cache_dtype", ["float16", "int8", "int4"])
def test_d17_what_lies_before_the_start_changes_nothing(case, cache_dtype):
    """Left pads of 3 and 17, NaN in scales and 16-bit values there, and the page of the first 16 gone."""
    starts = [3, 17, 0]
    c = case([40, 40, 20], cache_dtype=cache_dtype, page_size=16, seq_starts=torch.tensor(starts, dtype=torch.int32))
    expected = c.check()
    for b, start in enumerate(starts):
        for n in range(start):
            place = (int(c.options["block_table"][b, n // 16]), n % 16)
            for x in (c.k, c.v, c.options.get("k_scale"), c.options.get("v_scale")):
                if x is not None:
                    x[place] = torch.nan if x.dtype.is_floating_point else 0x7F
    c.options["block_table"][1, 0] = -1
    assert all(torch.equal(a, b) for a, b in zip(c.run(), expected, strict=True))


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
