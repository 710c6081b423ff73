"""What `check_checkpoint` finds, and that transformers itself agrees with what it passes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_a_base_model_without_a_head_is_sound(tiny, llama):
    tensors = load_file(llama / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert check_checkpoint(llama) == []
    assert torch.is_tensor(verify_checkpoint(llama).read("layers.0.self_attn.k_proj.weight"))
