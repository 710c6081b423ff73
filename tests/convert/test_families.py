"""Every declared family on a tiny random model of its own class in transformers.

Four proofs each: logits after converting to as many heads as there are; a planted solution (a GQA model expanded by
repeating heads comes back with the same logits); the cache of the converted model, which transformers itself fills; and
the declared rotary style, by a change of K and Q that only the right style leaves without effect.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headfold.convert import convert_checkpoint
from headfold.convert.check import check_checkpoint
from headfold.convert.checkpoint import Checkpoint
from headfold.convert.errors import CheckpointError, RefusedError
from headfold.convert.families import describe, with_num_key_value_heads
from headfold.convert.families.declared import FAMILIES, MULTI_QUERY_FAMILIES, UNSUPPORTED, WITHOUT_KV_FIELD

TOLERANCE = 1e-4  # float32, logits of about 2

RECOGNISED = (
    "cohere2_moe",
    "falcon_h1",
    "jamba",
    "kolibri1",
    "lara_mini",
    "llama4_text",
    "mellum",
    "minimax_m3_vl_text",
    "nanochat",
)
"""Families that are not declared and converted all the same: names and shapes say enough to merge heads as they are."""


@pytest.mark.parametrize("family", [*FAMILIES, *RECOGNISED])
def test_a11_a12_a13_identity_at_as_many_heads_and_planted_solution_at_fewer(tiny, tmp_path, family):
    mha = tiny.tiny_model(tiny.tiny_config(family))
    tiny.save(mha, tmp_path / "mha")
    convert_checkpoint(tmp_path / "mha", tmp_path / "same", num_key_value_heads=6)
    difference = (tiny.logits(tiny.load(tmp_path / "same")) - tiny.logits(mha)).abs().max()
    assert difference == 0 or (
        family == "lara_mini" and difference < TOLERANCE
    )  # its linear attention varies by itself

    gqa = tiny.tiny_model(tiny.tiny_config(family, num_key_value_heads=2))
    tiny.save(gqa, tmp_path / "gqa")
    wanted = tiny.logits(gqa)
    expanded = tiny.load(tiny.expand(tmp_path / "gqa", tmp_path / "expanded", 6))
    assert (tiny.logits(expanded) - wanted).abs().max() < TOLERANCE, "the oracle itself"
    assert check_checkpoint(tmp_path / "mha") == []
    for method in ("mean", "first"):
        convert_checkpoint(tmp_path / "expanded", tmp_path / method, num_key_value_heads=2, method=method)
        assert check_checkpoint(tmp_path / method) == []
        converted = tiny.load(tmp_path / method)
        assert (tiny.logits(converted) - wanted).abs().max() < TOLERANCE
        assert 3 * tiny.cached_bytes(converted) == tiny.cached_bytes(expanded)

    convert_checkpoint(tmp_path / "mha", tmp_path / "mqa", num_key_value_heads=1, method="random")
    mqa = tiny.load(tmp_path / "mqa")
    assert 6 * tiny.cached_bytes(mqa) == tiny.cached_bytes(mha)
    assert tiny.logits(mqa).isfinite().all()


def rescale_pairs(layer, weight_of, kind):
    """K times a random complex number per head and frequency pair, Q divided by its conjugate; free channels alike."""
    generator = torch.Generator().manual_seed(layer.index)
    num_heads, head_dim = layer.num_key_value_heads, layer.head_dim
    num_pairs = layer.rotary.num_channels // 2 if kind in ("half", "interleaved") else 0
    channels = torch.arange(2 * num_pairs)
    real, imaginary = channels.chunk(2) if kind == "half" else (channels[0::2], channels[1::2])
    free = torch.arange(2 * num_pairs, head_dim)
    factor = torch.randn(num_heads, num_pairs, 1, dtype=torch.complex64, generator=generator)
    scale = 0.5 + torch.rand(num_heads, len(free), 1, generator=generator)

    def apply(tensor, factor, scale):
        heads = tensor.unflatten(0, (num_heads, head_dim)).clone()
        trailing = heads.reshape(num_heads, head_dim, -1)
        z = torch.complex(trailing[:, real], trailing[:, imaginary]) * factor
        trailing[:, real], trailing[:, imaginary] = z.real, z.imag
        trailing[:, free] = trailing[:, free] * scale
        return trailing.reshape(tensor.shape)

    for projection, f, s in ((layer.k, factor, scale), (layer.q, 1 / factor.conj(), 1 / scale)):
        for name in filter(None, (projection.weight, projection.bias)):
            tensor = weight_of(name)
            rows = slice(projection.first_row, projection.first_row + num_heads * head_dim)
            tensor.data[rows] = apply(tensor.data[rows], f, s)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_declared_rotary_style_is_the_models(tiny, tmp_path, family):
    config = tiny.tiny_config(family)
    for switch in ("qk_layernorm", "use_qk_norm"):
        if getattr(config, switch, False):
            setattr(config, switch, False)
    model = tiny.tiny_model(config)
    if family == "olmo":
        model.config.clip_qkv = None
    tiny.save(model, tmp_path / "model")
    layers = describe(Checkpoint.open(tmp_path / "model"))
    if any(layer.k_norm for layer in layers):
        pytest.skip("a norm between K and its rotation: nothing may be folded, so the style is not used")
    wanted = tiny.logits(model)

    def error(kind_of):
        changed = copy.deepcopy(model)
        parameters = dict(changed.named_parameters())
        if family == "exaone":  # has other names on disk
            parameters = {n.replace("model.layers", "transformer.h"): p for n, p in parameters.items()}
            parameters = {n.replace("self_attn", "attn.attention"): p for n, p in parameters.items()}
        for layer in layers:
            rescale_pairs(layer, parameters.__getitem__, kind_of(layer))
        return (tiny.logits(changed) - wanted).abs().max()

    assert error(lambda layer: layer.rotary.kind) < 1e-3
    swapped = {"half": "interleaved", "interleaved": "half", "none": "none"}
    if any(layer.rotary.kind != "none" for layer in layers):
        assert error(lambda layer: swapped[layer.rotary.kind]) > 1e-2, "the test cannot tell the styles apart"


def test_per_layer_rotary(tiny, tmp_path):
    for family in ("cohere2", "exaone4"):
        tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / family)
        kinds = [layer.rotary.kind for layer in describe(Checkpoint.open(tmp_path / family))]
        assert kinds == ["interleaved" if family == "cohere2" else "half", "none"]
    tiny.save(tiny.tiny_model(tiny.tiny_config("smollm3", no_rope_layers=[0, 1])), tmp_path / "smollm3")
    assert [layer.rotary.kind for layer in describe(Checkpoint.open(tmp_path / "smollm3"))] == ["none", "half"]


@pytest.mark.parametrize(("family", "channels"), [("phi", 6), ("glm", 6), ("nemotron", 6), ("llama", 12)])
def test_partial_rotary(tiny, tmp_path, family, channels):
    tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / "model")
    assert {layer.rotary.num_channels for layer in describe(Checkpoint.open(tmp_path / "model"))} == {channels}


def test_norms_are_described_by_kind(tiny, tmp_path):
    kinds = {}
    for family in ("qwen3", "olmo2", "cohere", "stablelm", "phi"):
        tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / family)
        layer = describe(Checkpoint.open(tmp_path / family))[0]
        kinds[family] = (layer.q_norm.kind, layer.k_norm.kind, layer.k_norm.bias is not None)
    assert kinds == {
        "qwen3": ("shared", "shared", False),
        "olmo2": ("flat", "flat", False),
        "cohere": ("per_head", "per_head", False),
        "stablelm": ("per_head", "per_head", False),
        "phi": ("shared", "shared", True),
    }


def test_undeclared_family_is_recognised_from_names_and_shapes(tiny, llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "model_type": "someones_own"}))
    layers = describe(Checkpoint.open(llama))
    assert {layer.rotary.kind for layer in layers} == {"unknown"}
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    converted = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**converted, "model_type": "llama"}))
    assert tiny.load(tmp_path / "out").config.num_key_value_heads == 2


def test_undeclared_family_with_cross_attention_is_refused(tiny, llama):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "model_type": "someones_own"}))
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.cross_attn.k_proj.weight"] = torch.ones(72, 48)
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"cross_attn\.k_proj\.weight belongs to no self-attention layer"):
        describe(Checkpoint.open(llama))


def test_the_text_tower_of_a_multimodal_model(tiny, tmp_path):
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=24,
    )
    config = LlavaConfig(vision_config=vision, text_config=tiny.tiny_config("llama"), image_token_index=60)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "in")
    for num_new in (6, 2):
        convert_checkpoint(tmp_path / "in", tmp_path / str(num_new), num_key_value_heads=num_new)
        converted, info = LlavaForConditionalGeneration.from_pretrained(
            tmp_path / str(num_new), output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert 6 * tiny.cached_bytes(converted) == num_new * tiny.cached_bytes(model)
        if num_new == 6:
            assert torch.equal(tiny.logits(converted), tiny.logits(model))
        written = json.loads((tmp_path / str(num_new) / "config.json").read_text())
        assert written["text_config"]["num_key_value_heads"] == num_new and "num_key_value_heads" not in written
        for name, parameter in model.model.vision_tower.named_parameters():
            assert torch.equal(converted.model.vision_tower.get_parameter(name), parameter)


def test_undeclared_family_without_the_field_is_refused(llama):
    config = json.loads((llama / "config.json").read_text())
    config.update(model_type="someones_own")
    del config["num_key_value_heads"]
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=r"neither its config.json nor a known class has num_key_value_heads"):
        describe(Checkpoint.open(llama))


@pytest.mark.parametrize("family", sorted(set(WITHOUT_KV_FIELD) - {"dbrx"}))
def test_families_without_a_kv_field_are_refused_and_have_none(family):
    from transformers import CONFIG_MAPPING

    from headfold.convert.families import attention_config

    if family != "phi4_multimodal":
        assert "num_key_value_heads" not in getattr(CONFIG_MAPPING[family], "__annotations__", {})
    with pytest.raises(RefusedError, match=f"^{family}: cannot be converted: .+") as caught:
        attention_config({"model_type": family, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        *({"model_type": model_type} for model_type in UNSUPPORTED),
    ],
)
def test_a14_unsupported_configs_are_refused(config):
    from headfold.convert.families import attention_config

    counts = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(RefusedError) as caught:
        attention_config({**counts, **config})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": None}, "without num_attention_heads"),
        ({"hidden_size": "48"}, "hidden_size is '48', not a positive number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": 3}, "layer 2 has no self_attn.k_proj.weight"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"num_key_value_heads": -6}, "num_key_value_heads is -6"),
        ({"head_dim": 8}, r"q_proj.weight should have the shape \[48, 48\], it has \[72, 48\]"),
        ({"num_key_value_heads": [6]}, "num_key_value_heads has 1 entries, too few for layer 1"),
        ({"num_attention_heads": 10**12, "head_dim": 1}, "not a positive number up to 1,000,000"),
        ({"num_hidden_layers": 10**6}, "not a positive number up to 10,000"),
    ],
)
def test_a22_configs_that_contradict_the_tensors(llama, change, message):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message) as caught:
        describe(Checkpoint.open(llama))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "cohere2", "exaone4", "smollm3", "stablelm", "lfm2", "jamba"])
def test_a22_no_value_in_a_config_is_more_than_refused(tiny, tmp_path, family):
    tiny.refuses_hostile_configs(tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / "in"))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers." + "9" * 5000 + ".self_attn.k_proj.weight",
        "model.layers.\N{ARABIC-INDIC DIGIT ONE}.self_attn.k_proj.weight",
        "{0.x}.layers.0.self_attn.k_proj.weight",
        "model.layers.{head}.self_attn.k_proj.weight",
    ],
)
def test_a22_hostile_names_of_layers(tiny, tmp_path, name):
    """Of a family in which each head has a norm of its own, so that a name with braces would be filled in."""
    path = tiny.save(tiny.tiny_model(tiny.tiny_config("stablelm")), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    for only in (False, True):
        prefix = name.removesuffix("0.self_attn.k_proj.weight")
        renamed = {key.replace("model.layers.", prefix): tensor for key, tensor in tensors.items()} if only else tensors
        save_file({**renamed, name: torch.ones(72, 72)}, path / "model.safetensors", metadata={"format": "pt"})
        try:
            describe(Checkpoint.open(path))
        except RefusedError as error:
            assert str(error).isprintable()


def test_layers_that_may_lack_attention_may_not_lack_a_part_of_it(tiny, tmp_path):
    path = tiny.save(tiny.tiny_model(tiny.tiny_config("jamba")), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(72, 48)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layer 0 has no self_attn\.k_proj\.weight"):
        describe(Checkpoint.open(path))


def test_a14_a_quantization_config_of_null_is_none(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**config, "quantization_config": None, "num_key_value_heads": 2}


def test_a_number_that_stands_beside_the_text_config_too_is_changed_with_it():
    """transformers 4.52 to 4.56 wrote the fields of some multimodal models in both places."""
    config = {"model_type": "x", "num_key_value_heads": 6, "text_config": {"num_key_value_heads": 6, "other": 6}}
    assert with_num_key_value_heads(config, 2) == {
        "model_type": "x",
        "num_key_value_heads": 2,
        "text_config": {"num_key_value_heads": 2, "other": 6},
    }


def test_the_table_in_the_docs_claims_what_is_tested_here():
    from headfold.convert.families.remap import REMAPPED

    lines = (Path(__file__).parents[2] / "docs" / "families.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    by_answer = {
        answer: {row[0] for row in rows if row[1] == answer} for answer in ("yes", "re-mapped", "recognised", "no")
    }
    assert by_answer["yes"] == set(FAMILIES)
    assert by_answer["re-mapped"] == {*REMAPPED, *MULTI_QUERY_FAMILIES}
    assert by_answer["recognised"] == set(RECOGNISED)
    assert all(row[2] for row in rows if row[1] == "no")
    assert sum(map(len, by_answer.values())) == len(rows) > 150
