"""attn_implementation="headfold": the tokens of eager, whatever the family, the padding and the cache."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from headfold.kernels import KernelError, gqa_decode_reference, register_attention
from headfold.kernels.attention import headfold_attention, headfold_mask, spans_to_mask

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "head_dim": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8},
    "olmo2": {},
    "phi": {},
    "phi3": {"num_key_value_heads": 1},
    "cohere": {},
    "granite": {"attention_multiplier": 0.3},
    "starcoder2": {},
    "stablelm": {},
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture(autouse=True)
def _registered():
    register_attention()


def tiny_model(family: str, attention: str = "eager", **more) -> transformers.PreTrainedModel:
    """The same weights for every attention, in float32, with attention that matters."""
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | more))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.2, generator=generator)
        if "sinks" in name:
            parameter.data.add_(1.0)
    return model


def padded_prompts(pads: tuple[int, ...] = (3, 17, 0), length: int = 22) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 97, (len(pads), length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, prompts, **options) -> torch.Tensor:
    return model.generate(**prompts, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize("worth_packing", [0, 10**6])
@pytest.mark.parametrize("family", FAMILIES)
def test_d17_generate_gives_eagers_tokens(monkeypatch, worth_packing, family):
    """Rows padded on the left by 3, 17 and 0, longer than the windows of 8; also with a static cache."""
    monkeypatch.setattr("headfold.kernels.attention._WORTH_PACKING", worth_packing)
    prompts = padded_prompts()
    expected = generate(tiny_model(family), prompts)
    model = tiny_model(family, "headfold")
    assert torch.equal(generate(model, prompts), expected)
    cache = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(generate(model, prompts, cache=cache), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_logits_are_eagers(family):
    """Every decode step's logits, not only the tokens, for a row without padding and one with."""
    prompts = padded_prompts(pads=(5, 0))
    logits = []
    for attention in ("eager", "headfold"):
        model = tiny_model(family, attention)
        out = generate(model, prompts, return_dict_in_generate=True, output_logits=True)
        logits.append(torch.stack(out.logits))
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].abs().max()


def test_what_softcap_and_sinks_change():
    """Guards the tests above: without the cap or the sinks the logits would be others."""
    for family, change in (("gemma2", {"attn_logit_softcapping": None}), ("gpt_oss", None)):
        prompts = padded_prompts(pads=(0,))
        model = tiny_model(family, "headfold")
        changed = tiny_model(family, "headfold", **(change or {}))
        if change is None:
            for name, parameter in changed.named_parameters():
                if "sinks" in name:
                    parameter.data.fill_(-30.0)
        assert (model(**prompts).logits - changed(**prompts).logits).abs().max() > 1e-2


def test_beam_search_and_long_prompts_in_parts():
    prompts = padded_prompts(pads=(4, 0))
    models = [tiny_model("llama", attention) for attention in ("eager", "headfold")]
    for options in ({"num_beams": 3}, {"prefill_chunk_size": 5}):
        eager, ours = (generate(model, prompts, **options) for model in models)
        assert torch.equal(eager, ours)


def test_right_padding_leaves_holes_and_is_honoured():
    """Padding between prompt and new tokens is no span: the step then takes the mask itself."""
    ids = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:8] = 0
    results = []
    for attention in ("eager", "headfold"):
        model = tiny_model("llama", attention)
        out = model(input_ids=ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
        positions = mask.cumsum(1)[:, -1:] - 1
        out = model(input_ids=ids[:, 8:], attention_mask=mask, position_ids=positions, cache=out.cache)
        results.append(out.logits)
    assert (results[0] - results[1]).abs().max() < 1e-4


def test_half_precision():
    for dtype in (torch.float16, torch.bfloat16):
        prompts = padded_prompts(pads=(2, 0))
        logits = []
        for attention in ("sdpa", "headfold"):
            model = tiny_model("llama", attention).to(dtype)
            out = model(**prompts, use_cache=True)
            step = model(
                input_ids=prompts["input_ids"][:, -1:],
                attention_mask=torch.nn.functional.pad(prompts["attention_mask"], (0, 1), value=1),
                position_ids=torch.tensor([[20], [22]]),
                cache=out.cache,
            )
            logits.append(step.logits.float())
        assert (logits[0] - logits[1]).abs().max() < 20 * torch.finfo(dtype).eps * logits[0].abs().max()


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_d13_alibi_is_exact_or_refused(family):
    """These models add ALiBi in attention code of their own, which no registered implementation reaches."""
    small = {"vocab_size": 97, "hidden_size": 64, "n_head": 4, "n_layer": 2, "num_hidden_layers": 2}
    if family == "mpt":
        small = {"vocab_size": 97, "d_model": 64, "n_heads": 4, "n_layers": 2}
    if family == "falcon":
        small |= {"num_attention_heads": 4, "alibi": True}
    config = AutoConfig.for_model(family, **small)
    ids = torch.arange(2, 12)[None]
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    expected = eager(ids).logits
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="headfold").eval()
        model.load_state_dict(eager.state_dict())
        found = model(ids).logits
    except (ValueError, KeyError) as error:
        assert "headfold" in str(error)
    else:
        assert (found - expected).abs().max() < 1e-4


def test_what_cannot_be_honoured_is_refused():
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2, training=False)
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 5, 16)
    for name, value in (("output_attentions", True), ("block_indices", q), ("head_mask", q)):
        with pytest.raises(KernelError, match=name):
            headfold_attention(module, q, k, k, None, **{name: value})
    with pytest.raises(KernelError, match="cu_seq_lens_q"):
        headfold_attention(module, q, k, k, None, cu_seq_lens_q=torch.tensor([0, 1]))
    long = torch.randn(1, 4, 5, 16)
    with pytest.raises(KernelError, match="window of 3"):
        headfold_attention(module, long, k, k, None, sliding_window=3)
    with pytest.raises(KernelError, match="dropout"):
        headfold_attention(module, long, k, k, None, softcap=5.0, dropout=0.1)


def test_a_position_bias_and_custom_masks_are_honoured():
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2, training=False)
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    bias = torch.randn(1, 4, 1, 7)
    expanded = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    for spans in (None, torch.tensor([[2, 7], [0, 5]], dtype=torch.int32)[:, None, None]):
        mask = bias if spans is None else bias.masked_fill(~spans_to_mask(spans, 7), -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(q, *expanded, attn_mask=mask)
        found, _ = headfold_attention(module, q, k, v, spans, position_bias=bias)
        assert (found.transpose(1, 2) - expected).abs().max() < 1e-5
        found, _ = headfold_attention(module, q, k, v, mask)
        assert (found.transpose(1, 2) - expected).abs().max() < 1e-5


def test_the_mask_of_one_token_is_a_span_per_row():
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    common = {"batch_size": 2, "q_length": 1, "attention_mask": padding, "q_offset": 5}
    assert headfold_mask(kv_length=6, **common)[:, 0, 0].tolist() == [[2, 6], [0, 6]]
    # A static cache of 10 slots: those that are not filled yet are not attended to.
    assert headfold_mask(kv_length=10, **common)[:, 0, 0].tolist() == [[2, 6], [0, 6]]
    window = transformers.masking_utils.sliding_window_causal_mask_function(3)
    assert headfold_mask(kv_length=6, mask_function=window, **common)[:, 0, 0].tolist() == [[3, 6], [3, 6]]
    # Nothing to leave out: no mask; but never where slots are unfilled.
    common["attention_mask"] = None
    assert headfold_mask(kv_length=6, **common) is None
    assert headfold_mask(kv_length=10, **common)[:, 0, 0].tolist() == [[0, 6], [0, 6]]
    padding[1, 3] = False  # a hole
    common["attention_mask"] = padding
    assert headfold_mask(kv_length=6, **common).dtype == torch.bool


@pytest.mark.parametrize("worth_packing", [0, 10**6])
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("ends", [(9, 9, 9), (9, 5, 2), (7, 7, 7)])
@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 2, 1), (4, 4, 1), (9, 9, 9)])
def test_d17_one_token_on_cpus_is_the_reference(monkeypatch, worth_packing, window, ends, starts):
    """Rows that begin or end at different keys, all alike or nowhere, with a window on top; each layer with its own
    window; the group packed and not."""
    monkeypatch.setattr("headfold.kernels.attention._WORTH_PACKING", worth_packing)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2, training=False)
    q, k, v = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16)
    spans = torch.tensor([starts, ends], dtype=torch.int32).t()[:, None, None, :]
    for layer_window in (window, None):
        found, _ = headfold_attention(module, q, k, v, spans, sliding_window=layer_window)
        expected = gqa_decode_reference(
            q[:, :, 0],
            k.transpose(1, 2),
            v.transpose(1, 2),
            spans[:, 0, 0, 1],
            seq_starts=spans[:, 0, 0, 0],
            window=layer_window,
        )
        assert (found[:, 0] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("num_slots", [6, 10])
@pytest.mark.parametrize("window", [None, 3])
def test_d17_padding_on_the_left_is_the_mask_on_cpus(num_slots, window):
    """The padding that goes with its spans says what they say. Slots that are not filled yet hold NaN."""
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2, training=False)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    q, k, v = torch.randn(3, 4, 1, 16), torch.randn(3, 2, num_slots, 16), torch.randn(3, 2, num_slots, 16)
    k[:, :, 6:], v[:, :, 6:] = torch.nan, torch.nan
    for dtype in (torch.bool, torch.int64):
        spans = headfold_mask(
            batch_size=3, q_length=1, kv_length=num_slots, q_offset=5, attention_mask=padding.to(dtype)
        )
        assert spans[:, 0, 0].tolist() == [[2, 6], [1, 6], [5, 6]]
        found, _ = headfold_attention(module, q, k, v, spans, sliding_window=window)
        alone = spans.clone()  # without what goes with it
        assert not alone.__dict__
        expected, _ = headfold_attention(module, q, k, v, alone, sliding_window=window)
        assert (found - expected).abs().max() < 1e-6


def test_prefill_in_blocks():
    """More query tokens than one block of the plain path, capped, against the reference one token at a time."""
    module = SimpleNamespace(is_causal=True)
    num_tokens = 530
    q, k, v = (torch.randn(1, heads, num_tokens, 16) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    found, _ = headfold_attention(module, q, k, v, None, softcap=3.0, s_aux=sinks, scaling=0.5)
    for t in (0, 1, 511, 512, 529):
        expected = gqa_decode_reference(
            q[:, :, t],
            k.transpose(1, 2),
            v.transpose(1, 2),
            torch.tensor([t + 1], dtype=torch.int32),
            softcap=3.0,
            sinks=sinks,
            softmax_scale=0.5,
        )
        assert (found[:, t] - expected).abs().max() < 1e-5


def test_our_folder_is_named_like_a_package_of_hugging_face(tmp_path):
    """With the repository root first on sys.path, and a fake installed `kernels`, transformers finds our folder."""
    (tmp_path / "site" / "kernels").mkdir(parents=True)
    (tmp_path / "site" / "kernels" / "__init__.py").write_text("__version__ = '0.99'\n")
    (tmp_path / "site" / "kernels-0.99.dist-info").mkdir()
    (tmp_path / "site" / "kernels-0.99.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.99\n")
    import headfold.kernels

    root = str(next(iter(headfold.kernels.__path__))).removesuffix("kernels")
    code = (
        f"import sys; sys.path[:0] = [{root!r}, {str(tmp_path / 'site')!r}]\n"
        "import kernels; assert 'headfold' not in sys.modules and 'torch' not in sys.modules\n"
        "import transformers, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=1,\n"
        "                     num_attention_heads=2)\n"
        "LlamaForCausalLM(config)(torch.tensor([[1, 2]]))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
