"""Our caches under transformers' generate and under single steps: the tokens of transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from headfold.kernels import KernelError, KVCache, PagedKVCache, kv_cache_bytes, register_attention
from headfold.kernels.append import kv_append
from headfold.kernels.quantise import QUANTISED_MAX, channel_scale, dequantise, quantise, token_scale

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}
WINDOW = 8


def make_model(window: int | None = None, attention: str = "headfold"):
    register_attention()
    config = MistralConfig(**SMALL, sliding_window=window) if window else LlamaConfig(**SMALL)
    torch.manual_seed(0)
    model = (MistralForCausalLM if window else LlamaForCausalLM)._from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return model.eval().requires_grad_(False)


def prompts(pads=(3, 0), length=21) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 97, (len(pads), length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=14, do_sample=False, **options)


CACHES = {
    "contiguous": (KVCache, {}),
    "paged": (PagedKVCache, {"page_size": 4}),
    "paged by 16": (PagedKVCache, {"page_size": 16, "num_pages": 7}),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_generate_gives_the_same_tokens(name, window):
    """Rows padded on the left; a prompt longer than the window; the prompt at once and in parts; and once more after
    reset."""
    model = make_model(window)
    inputs = prompts()
    expected = generate(model, inputs)
    kind, options = CACHES[name]
    cache = kind(model.config, num_sequences=2, max_tokens=40, **options)
    assert torch.equal(generate(model, inputs, cache=cache), expected)
    assert cache.get_seq_length() == 21 + 13
    cache.reset()
    assert torch.equal(generate(model, inputs, cache=cache, prefill_chunk_size=6), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_plain_cache_works_with_any_attention(attention):
    model = make_model(attention=attention)
    expected = generate(model, prompts())
    cache = KVCache(model.config, num_sequences=2, max_tokens=40)
    assert torch.equal(generate(model, prompts(), cache=cache), expected)


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_beams_and_continued_conversations(kind):
    model = make_model()
    expected = generate(model, prompts(), num_beams=3)
    cache = kind(model.config, num_sequences=6, max_tokens=40)
    assert torch.equal(generate(model, prompts(), num_beams=3, cache=cache), expected)

    # A second turn on the same cache, against all of it at once.
    cache = kind(model.config, num_sequences=1, max_tokens=80)
    first = generate(model, prompts(pads=(0,)), cache=cache)
    turn = torch.cat([first, torch.tensor([[5, 6, 7]])], dim=1)
    second = generate(model, {"input_ids": turn}, cache=cache)
    assert torch.equal(second, generate(model, {"input_ids": turn}))


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
@pytest.mark.parametrize("cache_dtype", QUANTISED_MAX)
@pytest.mark.parametrize("key_scales", ["token", "channel"])
def test_quantised_caches_stay_near(kind, cache_dtype, key_scales):
    """Logits of decode steps over a prompt of 40 tokens, against the unquantised cache."""
    model = make_model()
    inputs = prompts(pads=(0, 5), length=40)
    logits = []
    for dtype in (None, cache_dtype):
        cache = kind(model.config, num_sequences=2, max_tokens=60, cache_dtype=dtype, key_scales=key_scales)
        out = model(**inputs, cache=cache)
        steps = []
        mask = inputs["attention_mask"]
        for token in (7, 8, 9):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            out = model(torch.full((2, 1), token), attention_mask=mask, cache=cache)
            steps.append(out.logits)
        logits.append(torch.stack(steps))
    error = (logits[0] - logits[1]).abs().mean() / logits[0].abs().mean()
    limit = {"float8_e4m3fn": 0.2, "float8_e5m2": 0.4, "int8": 0.06, "int4": 1.0}[cache_dtype]
    assert 0 < error < limit


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
@pytest.mark.parametrize("cache_dtype", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("key_scales", ["token", "channel"])
def test_kv_cache_bytes_is_what_caches_hold(kind, cache_dtype, key_scales):
    config = MistralConfig(**SMALL, sliding_window=WINDOW)
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    cache = kind(config, num_sequences=3, max_tokens=37, cache_dtype=cache_dtype, key_scales=key_scales)
    expected = kv_cache_bytes(
        num_layers=3,
        num_key_value_heads=2,
        head_dim=16,
        num_tokens=37,
        num_sequences=3,
        cache_dtype=cache_dtype or "float32",
        key_scales=key_scales,
        sliding_windows=[None, WINDOW, None] if kind is KVCache else None,
        page_size=16 if kind is PagedKVCache else None,
    )
    assert cache.nbytes == expected
    assert sum(x.untyped_storage().nbytes() for layer in cache.layers for x in layer.tensors) == expected


def test_rolling_layers_keep_their_memory():
    model = make_model(WINDOW)
    cache = KVCache(model.config, num_sequences=1, max_tokens=10_000)
    before = cache.nbytes
    assert before == kv_cache_bytes(
        num_layers=3, num_key_value_heads=2, head_dim=16, num_tokens=WINDOW, cache_dtype="float32"
    )
    inputs = {"input_ids": torch.randint(2, 97, (1, 30), generator=torch.Generator().manual_seed(5))}
    assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))
    assert cache.nbytes == before
    with pytest.raises(KernelError, match="overwritten"):
        cache.crop(-1)


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_crop_takes_tokens_back(kind):
    model = make_model()
    ids = torch.arange(2, 20)[None]
    cache = kind(model.config, num_sequences=1, max_tokens=40)
    model(ids, cache=cache)
    model(torch.tensor([[90, 91, 92, 93, 94]]), cache=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 18
    found = model(torch.tensor([[7]]), cache=cache).logits
    expected = model(torch.cat([ids, torch.tensor([[7]])], dim=1)).logits[:, -1:]
    assert (found - expected).abs().max() < 1e-4


def step(model, cache: PagedKVCache, tokens: list[int]) -> torch.Tensor:
    """One token for each sequence, which may have different lengths: positions and spans are given."""
    lengths = cache.lengths.clone()
    spans = torch.stack([torch.zeros_like(lengths), lengths + 1]).t()[:, None, None]
    ids = torch.tensor(tokens)[:, None]
    return model(ids, position_ids=lengths[:, None].long(), attention_mask=spans, cache=cache).logits[:, 0]


def alone(model, prompt: list[int], tokens: list[int], cache_dtype: str | None) -> torch.Tensor:
    """Logits after the last token, of a sequence with a cache to itself; `prompt` at once, `tokens` one by one."""
    cache = PagedKVCache(model.config, num_sequences=1, max_tokens=64, cache_dtype=cache_dtype)
    model(torch.tensor([prompt]), cache=cache)
    for token in tokens:
        logits = model(torch.tensor([[token]]), cache=cache).logits[0, -1]
    return logits


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_sequences_of_different_lengths_come_and_go(cache_dtype):
    model = make_model()
    cache = PagedKVCache(
        model.config, num_sequences=3, max_tokens=32, page_size=4, num_pages=14, cache_dtype=cache_dtype
    )
    texts = [list(range(2, 2 + n)) for n in (5, 17, 8)]
    for row, text in enumerate(texts):
        with cache.only([row]):
            model(torch.tensor([text]), cache=cache)
    assert cache.lengths.tolist() == [5, 17, 8]
    assert cache.pool.num_available == 14 - (2 + 5 + 2)
    step(model, cache, [40, 40, 40])
    logits = step(model, cache, [41, 42, 43])
    for row, text in enumerate(texts):
        assert (logits[row] - alone(model, text, [40, 41 + row], cache_dtype)).abs().max() < 1e-4
    cache.free(1)
    assert cache.lengths.tolist() == [7, 0, 10] and cache.pool.num_available == 14 - (2 + 3)
    with cache.only([1]):
        model(torch.tensor([[50, 51, 52]]), cache=cache)
    logits = step(model, cache, [60, 61, 62])
    assert (logits[0] - alone(model, texts[0], [40, 41, 60], cache_dtype)).abs().max() < 1e-4
    assert (logits[1] - alone(model, [50, 51, 52], [61], cache_dtype)).abs().max() < 1e-4
    with pytest.raises(KernelError, match=r"different lengths: \[8, 4, 11\]"):
        cache.get_seq_length()


@pytest.mark.parametrize("cache_dtype", [None, "int4"])
def test_forked_sequences_share_pages_until_they_write(cache_dtype):
    model = make_model()
    cache = PagedKVCache(model.config, num_sequences=3, max_tokens=32, page_size=4, cache_dtype=cache_dtype)
    text = list(range(2, 12))  # 10 tokens: two full pages and half of one
    with cache.only([0]):
        model(torch.tensor([text]), cache=cache)
    cache.fork(0, 1)
    cache.fork(0, 2)
    assert cache.pages[0] == cache.pages[1] == cache.pages[2]
    assert cache.pool.num_available == cache.pool.num_pages - 3
    before = cache.layers[0].k[cache.pages[0][2]].clone()
    logits = step(model, cache, [30, 31, 32])
    # Two of three made the half page their own, the last holder wrote where it was; the full pages are still shared.
    assert len({cache.pages[row][2] for row in range(3)}) == 3
    assert cache.pages[0][:2] == cache.pages[1][:2] == cache.pages[2][:2]
    for row in range(3):
        assert torch.equal(cache.layers[0].k[cache.pages[row][2]][:2], before[:2])
        assert (logits[row] - alone(model, text, [30 + row], cache_dtype)).abs().max() < 1e-4
    cache.free(0)
    assert cache.pool.num_available == cache.pool.num_pages - 4


def test_a_prefix_is_found_again_by_its_tokens():
    """After its request is gone, by generate: only the rest of the prompt is computed, and the tokens are the same."""
    model = make_model()
    computed = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: computed.append(args[0].shape[1]))
    cache = PagedKVCache(model.config, num_sequences=1, max_tokens=64, page_size=4)
    prompt = torch.randint(2, 97, (1, 23), generator=torch.Generator().manual_seed(7))
    expected = generate(model, {"input_ids": prompt}, cache=cache)
    cache.publish(0, expected[0].tolist())
    cache.free(0)
    assert cache.pool.num_available == cache.pool.num_pages

    other = prompt.clone()
    other[0, -1] = 96 if prompt[0, -1] != 96 else 95
    for ids, num_found in ((prompt, 20), (other, 20), (expected[:, :30], 28)):
        assert cache.attach(0, ids[0].tolist()) == num_found
        computed.clear()
        found = generate(model, {"input_ids": ids}, cache=cache)
        assert computed[0] == ids.shape[1] - num_found
        assert torch.equal(found, generate(model, {"input_ids": ids}))
        cache.free(0)
    # The last token is always computed: a prompt that is wholly known keeps its last page to itself.
    assert cache.attach(0, expected[0, :8].tolist()) == 4
    with pytest.raises(KernelError, match="already has 4 tokens"):
        cache.attach(0, [1, 2, 3])
    # Published pages are not written to, not even by their only holder.
    cache.free(0)
    cache.attach(0, expected[0, :9].tolist())
    cache.crop(-2)
    page = cache.pages[0][1]
    model(torch.tensor([[3]]), position_ids=torch.tensor([[6]]), cache=cache)
    assert cache.pages[0][1] != page and cache.pool.find(expected[0, :8].tolist())[1] == page


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_refusals(kind):
    config = LlamaConfig(**SMALL)
    model = make_model()
    cache = kind(config, num_sequences=1, max_tokens=8)
    with pytest.raises(KernelError, match=r"8 tokens.*9 are needed"):
        model(torch.zeros(1, 9, dtype=torch.long), cache=cache)
    cache.reset()
    with pytest.raises(KernelError, match=r"\(1, 2, 16\).*found \(2, 2, 16\)"):
        model(torch.zeros(2, 3, dtype=torch.long), cache=cache)
    with pytest.raises(KernelError, match="at most the 0 tokens there are, found -1"):
        kind(config, num_sequences=1, max_tokens=8).crop(-1)
    with pytest.raises(KernelError, match="at least 1, found 0"):
        kind(config, num_sequences=0, max_tokens=8)
    with pytest.raises(KernelError, match=r"torch.float32, or quantised, found bfloat16"):
        kind(config, num_sequences=1, max_tokens=8, cache_dtype="bfloat16")
    with pytest.raises(KernelError, match="of at least 32 tokens, found 4"):
        small = kind(config, num_sequences=1, max_tokens=8, cache_dtype="int8", key_scales="channel")
        model(torch.zeros(1, 4, dtype=torch.long), cache=small)
    chunked = LlamaConfig(**SMALL)
    chunked.layer_types = ["chunked_attention"] * 3
    chunked.attention_chunk_size = 8
    with pytest.raises(KernelError, match="chunked_attention"):
        kind(chunked, num_sequences=1, max_tokens=8)


def test_pages_run_out():
    model = make_model()
    cache = PagedKVCache(model.config, num_sequences=2, max_tokens=32, page_size=4, num_pages=3)
    with pytest.raises(KernelError, match="all 3 pages of 4 tokens are in use"):
        model(torch.zeros(2, 9, dtype=torch.long), cache=cache)


def test_pages_that_ran_out_are_enough_when_others_are_freed():
    """What the refused pass had taken is used by the next, and written where the kernels look for it."""
    model = make_model()
    cache = PagedKVCache(model.config, num_sequences=2, max_tokens=32, page_size=4, num_pages=4)
    ids = torch.randint(2, 97, (1, 9), generator=torch.Generator().manual_seed(11))
    with cache.only([0]):
        model(torch.zeros(1, 9, dtype=torch.long), cache=cache)
    with cache.only([1]), pytest.raises(KernelError, match="in use"):
        model(ids, cache=cache)
    cache.free(0)
    with cache.only([1]):
        cache.reserve(9)
        assert cache.block_table[0, :3].tolist() == cache.pages[0]
        found = model(ids, cache=cache).logits[:, -1]
        step = model(torch.tensor([[5]]), cache=cache).logits
    full = model(torch.cat([ids, torch.tensor([[5]])], dim=1)).logits
    assert (found - full[:, -2]).abs().max() < 1e-4 and (step - full[:, -1:]).abs().max() < 1e-4


def test_pages_reserved_before_a_fork_are_not_written_by_both():
    """Room made ahead is shared too: prompts over several pages at once must each go into pages of their own."""
    model = make_model()
    cache = PagedKVCache(model.config, num_sequences=2, max_tokens=32, page_size=4)
    with cache.only([0]):
        model(torch.tensor([[2, 3, 4, 5, 6]]), cache=cache)
        cache.reserve(14)
    cache.fork(0, 1)
    cache.reserve(0)
    assert cache.pages[0] == cache.pages[1]
    parts = [list(range(20, 31)), list(range(40, 51))]
    for row, part in enumerate(parts):
        with cache.only([row]):
            model(torch.tensor([part]), cache=cache)
    logits = step(model, cache, [60, 61])
    for row, part in enumerate(parts):
        assert (logits[row] - alone(model, [2, 3, 4, 5, 6, *part], [60 + row], None)).abs().max() < 1e-4
    assert set(cache.pages[0][1:]).isdisjoint(cache.pages[1][1:]) and cache.pages[0][0] == cache.pages[1][0]


def test_pages_taken_for_tokens_that_never_came_are_not_lost():
    cache = PagedKVCache(LlamaConfig(**SMALL), num_sequences=1, max_tokens=32, page_size=4)
    cache.reserve(9)
    assert cache.pool.num_available == 8 - 3
    assert cache.attach(0, [1, 2, 3]) == 0
    assert cache.pool.num_available == 8


def test_other_attention_says_what_to_do():
    model = make_model(attention="sdpa")
    cache = PagedKVCache(model.config, num_sequences=1, max_tokens=32)
    model(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    with pytest.raises(KernelError, match='attn_implementation="headfold"'):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)


def test_d9_fp8_is_refused_when_the_cache_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(KernelError, match=r"8\.9 or later, A100 has 8\.0: use int8 or float8_e5m2"):
        KVCache(LlamaConfig(**SMALL), num_sequences=1, max_tokens=8, cache_dtype="fp8", device="cuda")


@pytest.mark.parametrize("cache_dtype", ["float32", *QUANTISED_MAX])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("page_size", [None, 4])
def test_append_writes_the_new_tokens_and_nothing_else(cache_dtype, per_channel, page_size):
    torch.manual_seed(0)
    key, value = (torch.randn(3, 5, 2, 16) for _ in range(2))
    positions = torch.tensor([2, -1, 6], dtype=torch.int32)
    quantised = cache_dtype in QUANTISED_MAX
    rows, slots = (3, 12) if page_size is None else (9, page_size)
    width = 8 if cache_dtype == "int4" else 16
    dtype = torch.uint8 if cache_dtype == "int4" else getattr(torch, cache_dtype)
    caches = [torch.zeros(rows, slots, 2, width, dtype=dtype) for _ in range(2)]
    scales = {}
    if quantised:
        k_scale = channel_scale(key, cache_dtype) if per_channel else torch.zeros(rows, slots, 2)
        scales = {"k_scale": k_scale, "v_scale": torch.zeros(rows, slots, 2)}
    table = None if page_size is None else torch.randperm(9).view(3, 3).to(torch.int32)
    kv_append(*caches, key, value, positions, block_table=table, **scales)

    for cache, scale, new in zip(caches, (scales.get("k_scale"), scales.get("v_scale")), (key, value), strict=True):
        written = torch.zeros(rows, slots, dtype=torch.bool)
        for b in (0, 2):
            for t in range(5):
                position = int(positions[b]) + t
                place = (b, position) if table is None else (int(table[b, position // 4]), position % 4)
                written[place] = True
                if not quantised:
                    assert torch.equal(cache[place], new[b, t])
                    continue
                used = scale if scale.dim() == 2 else token_scale(new[b, t], cache_dtype)[..., None]
                expected = dequantise(quantise(new[b, t][None], used, cache_dtype), used, cache_dtype)
                found_scale = scale if scale.dim() == 2 else scale[place][..., None]
                assert torch.equal(dequantise(cache[place][None], found_scale, cache_dtype), expected)
        assert (cache.view(torch.uint8)[~written] == 0).all()


@pytest.mark.parametrize(
    ("name", "found", "change"),
    [
        ("key", "torch.float64", {"key": torch.zeros(2, 1, 2, 16, dtype=torch.float64)}),
        ("value", r"\(2, 1, 2, 8\)", {"value": torch.zeros(2, 1, 2, 8)}),
        ("k_cache", "list", {"k_cache": [1.0]}),
        ("k_cache", "torch.int64", {"k_cache": torch.zeros(2, 8, 2, 16, dtype=torch.int64)}),
        ("k_cache", "torch.float16", {"k_cache": torch.zeros(2, 8, 2, 16, dtype=torch.float16)}),
        ("k_cache", r"\(3, 8, 2, 16\)", {"k_cache": torch.zeros(3, 8, 2, 16)}),
        ("v_cache", r"\(2, 4, 2, 16\)", {"v_cache": torch.zeros(2, 4, 2, 16)}),
        ("v_cache", "stride 2", {"v_cache": torch.zeros(2, 8, 16, 2).transpose(2, 3)}),
        ("positions", "torch.int64", {"positions": torch.tensor([0, 1])}),
        ("block_table", r"\(3, 1\)", {"block_table": torch.zeros(3, 1, dtype=torch.int32)}),
        ("k_scale and v_scale", "found one", {"k_scale": torch.zeros(2, 8, 2)}),
        (
            "k_scale",
            "NoneType",
            {"k_cache": torch.zeros(2, 8, 2, 16).char(), "v_cache": torch.zeros(2, 8, 2, 16).char()},
        ),
    ],
)
def test_append_refuses_wrong_arguments_by_name(name, found, change):
    arguments = {
        "k_cache": torch.zeros(2, 8, 2, 16),
        "v_cache": torch.zeros(2, 8, 2, 16),
        "key": torch.zeros(2, 1, 2, 16),
        "value": torch.zeros(2, 1, 2, 16),
        "positions": torch.tensor([0, 1], dtype=torch.int32),
    }
    kv_append(**arguments)
    with pytest.raises(KernelError, match=f"^{name} must be .*{found}"):
        kv_append(**(arguments | change))
