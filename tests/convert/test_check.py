"""What `check_checkpoint` finds, and that transformers itself agrees with what it passes."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from headfold.convert import convert_checkpoint
from headfold.convert.check import Finding, check_checkpoint, verify_checkpoint
from headfold.convert.errors import CheckpointError


def test_a_sound_checkpoint_has_no_findings(llama):
    assert check_checkpoint(llama) == []
    assert verify_checkpoint(llama).config["model_type"] == "llama"


def test_all_problems_are_listed_and_the_first_is_raised(llama):
    (llama / "model.safetensors").write_bytes(b"garbage")
    (llama / "config.json").write_text("{")
    findings = check_checkpoint(llama)
    assert [finding.severity for finding in findings] == ["error", "error"]
    assert "config.json: not JSON" in findings[0].message and "model.safetensors" in findings[1].message
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        verify_checkpoint(llama)


def test_no_directory_at_all(tmp_path):
    assert check_checkpoint(tmp_path / "nothing") == [
        Finding("error", f"{tmp_path / 'nothing'}: no such directory"),
    ]


def test_a_sound_model_that_cannot_be_converted_is_no_error(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    (finding,) = check_checkpoint(tmp_path)
    assert finding.severity == "warning" and finding.message.startswith("bloom: cannot be converted: ")
    verify_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_the_vocabulary_is_compared(llama, name):
    tensors = load_file(llama / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    (finding,) = check_checkpoint(llama)
    assert finding.severity == "error" and f"says vocab_size 61, but {name} has the shape [60, 48]" in finding.message


def test_a6_a_family_that_ties_by_default_needs_no_head(tiny, tmp_path):
    for family, sound in (("gemma", True), ("llama", False)):
        path = tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / family)
        tensors = load_file(path / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        (path / "config.json").write_text(json.dumps(config))
        assert (check_checkpoint(path) == []) is sound


def test_the_declared_defaults_are_those_of_the_classes():
    from transformers import CONFIG_MAPPING

    from headfold.convert.families.declared import FAMILIES

    for model_type, family in FAMILIES.items():
        config = CONFIG_MAPPING[model_type]()
        assert config.tie_word_embeddings == family.ties, model_type
        assert "num_key_value_heads" in CONFIG_MAPPING[model_type].__annotations__, model_type
        if family.head_dim is not None:
            assert config.head_dim == family.head_dim, model_type
        share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
        assert (share or 1.0) == (family.partial_rotary or 1.0), model_type


@pytest.mark.parametrize("model_type", ["llama", "bloom", "t5", "falcon"])
def test_a_config_that_names_another_weight_file_is_an_error_in_any_family(llama, model_type):
    """Or transformers would load what nothing here has looked at, from anywhere."""
    edit(
        llama, config={"model_type": model_type, "transformers_weights": "../x.safetensors", "is_encoder_decoder": True}
    )
    with pytest.raises(CheckpointError, match=r"transformers_weights .*'\.\./x\.safetensors'"):
        verify_checkpoint(llama)


def test_a_base_model_without_a_head_is_sound(tiny, llama):
    tensors = load_file(llama / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert check_checkpoint(llama) == []
    assert torch.is_tensor(verify_checkpoint(llama).read("layers.0.self_attn.k_proj.weight"))


def edit(path, tensors=(), config=()):
    """Changes tensors (None: removes them) and config fields of a single-file checkpoint."""
    changed = load_file(path / "model.safetensors") | dict(tensors)
    save_file({name: t for name, t in changed.items() if t is not None}, path / "model.safetensors")
    written = json.loads((path / "config.json").read_text()) | dict(config)
    (path / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            {},
            {"intermediate_size": 96},
            "says intermediate_size 96, but model.layers.0.mlp.gate_proj.weight has the shape",
        ),
        (
            {
                "model.layers.1.self_attn.q_proj.bias": torch.ones(72),
                "model.layers.1.self_attn.v_proj.bias": torch.ones(72),
            },
            {"attention_bias": True},
            "model.layers.1.self_attn.k_proj.weight has no bias, model.layers.1.self_attn.q_proj.weight has one",
        ),
        ({}, {"num_attention_heads": 12}, "config.json says 12 query heads of head_dim 12 and hidden_size 48"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.ones(47, 48)},
            {},
            "says intermediate_size 48, but model.layers.1.mlp.up_proj.weight has the shape [47, 48]",
        ),
    ],
)
def test_a20_what_the_names_and_shapes_contradict_is_not_converted(llama, tmp_path, tensors, config, message):
    """Without transformers' class, which takes longer to load than most models to convert."""
    edit(llama, tensors, config)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2, method="mean")
    assert not (tmp_path / "out").exists()


def test_a20_calibration_compares_with_the_class(llama, tmp_path):
    edit(llama, {"model.norm.weight": None})
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2, calibration=str(tmp_path / "text.txt"))


@pytest.mark.parametrize(
    ("tensors", "config", "severity", "message"),
    [
        (
            {"model.norm.weight": None},
            {},
            "error",
            "model.norm.weight is missing (the only one): LlamaForCausalLM would",
        ),
        ({f"model.layers.{i}.mlp.up_proj.weight": None for i in (0, 1)}, {}, "error", "is missing (2 such tensors)"),
        ({"model.extra.weight": torch.ones(2)}, {}, "warning", "model.extra.weight is not read by LlamaForCausalLM"),
        (
            {"model.layers.1.mlp.down_proj.weight": torch.ones(47, 48)},
            {},
            "error",
            "model.layers.1.mlp.down_proj.weight has the shape [47, 48], but in LlamaForCausalLM it is [48, 48]",
        ),
        ({}, {"mlp_bias": True}, "error", "mlp.down_proj.bias is missing (6 such tensors)"),
        ({}, {"hidden_act": "no such thing"}, "warning", "not compared with LlamaForCausalLM"),
    ],
)
def test_every_name_and_shape_is_compared_with_the_class(llama, tensors, config, severity, message):
    edit(llama, tensors, config)
    (finding,) = check_checkpoint(llama)
    assert finding.severity == severity and message in finding.message and finding.message.isprintable()
    verify_checkpoint(llama)  # which does not load the class


@pytest.mark.parametrize(
    "config",
    [
        {"_attn_implementation": "someones/kernel", "attn_implementation": "someones/kernel"},
        {"fusion_config": {"patch_embeddings": True}},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        {"architectures": ["SomeonesOwnForCausalLM"]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": []},
        *({"architectures": value} for value in (5, 0.5, True, "Llama", {"a": 1}, [None], [[1]])),
    ],
)
def test_a18_what_the_config_says_about_loading_is_not_heeded(llama, config):
    edit(llama, config=config)
    assert check_checkpoint(llama) == []


def test_a14_a_quantised_model_is_not_given_to_the_class(llama, monkeypatch):
    """transformers would look for the packages and kernels that run it."""
    from transformers.quantizers.auto import AutoHfQuantizer

    edit(llama, config={"quantization_config": {"quant_method": "fp8"}})
    monkeypatch.setattr(AutoHfQuantizer, "from_config", lambda *_, **__: pytest.fail("looked for"))
    (finding,) = check_checkpoint(llama)
    assert finding.severity == "warning" and "the weights are quantised ('fp8')" in finding.message


def test_a22_a_tensor_without_elements_but_of_huge_dimensions(llama):
    """Its sizes cannot even be multiplied in 64 bits."""
    raw = (llama / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    empty = {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}
    header = json.dumps({**json.loads(raw[8 : 8 + size]), "a": empty}).encode()
    (llama / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    assert [finding.severity for finding in check_checkpoint(llama)] == ["warning"]


def test_findings_are_printable(tmp_path):
    path = tmp_path / "a\x1b[2J\n"
    path.mkdir()
    assert all(finding.message.isprintable() for finding in check_checkpoint(path))
