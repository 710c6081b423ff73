"""Models built by the tensor: the same as transformers loads, cut before the head, and with documents kept apart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.errors import CheckpointError, RefusedError
from headfold.uptrain.model import CausalModel, decoder_layers, load_model

from .conftest import make_checkpoint

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "phi": {},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.1, "attn_logit_softcapping": 1.0, "sliding_window": 5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5},
    "stablelm": {},
    "granite": {"logits_scaling": 7.0},
    "starcoder2": {},
    "cohere": {"logit_scale": 0.3},
}


def make_family(folder: Path, family: str) -> Path:
    config = AutoConfig.for_model(
        family,
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # large enough for attention to matter
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / family)
    return folder / family


def load(path: Path, **options: Any) -> CausalModel:
    values = {"dtype": torch.float32, "device": CPU, "trainable": True, **options}
    return CausalModel(load_model(Checkpoint.open(path), **values))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_logits_that_transformers_gives(tmp_path: Path, family: str):
    """Weights, buffers, ties, and what a family does to its logits behind the head."""
    path = make_family(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = load(path).eval()
    ids = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
        got = model.logits(model(ids).flatten(0, 1)).view(3, 17, -1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len(decoder_layers(model.model)) == 2


@pytest.mark.parametrize("flatten", [False, True], ids=["rows", "flattened"])
@pytest.mark.parametrize("family", FAMILIES)
def test_b8_a_changed_token_of_one_document_leaves_the_next_one_unchanged(tmp_path: Path, family: str, flatten: bool):
    """Isolated, B is computed as if it stood alone; without restarting positions, A shows in B."""
    model = load(make_family(tmp_path, family)).eval()
    model.flatten_rows = flatten
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(0, 96, (2, 9), generator=generator), torch.randint(0, 96, (2, 8), generator=generator)
    rows = torch.cat([first, second], dim=1)
    changed = rows.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 96
    positions = torch.cat([torch.arange(9), torch.arange(8)]).expand(2, -1)
    with torch.no_grad():
        plain, plain_changed = model(rows), model(changed)
        isolated, isolated_changed = model(rows, positions), model(changed, positions)
        alone = model(second, torch.arange(8).expand(2, -1))
    assert torch.equal(isolated[:, 9:], isolated_changed[:, 9:])
    torch.testing.assert_close(isolated[:, 9:], alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(isolated[:, 4:9], isolated_changed[:, 4:9], atol=1e-3)
    assert not torch.allclose(plain[:, 9:13], plain_changed[:, 9:13], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b13_weights_are_held_in_the_asked_dtype(tmp_path: Path, dtype: torch.dtype):
    model = load(make_checkpoint(tmp_path / "m"), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(parameter.requires_grad for parameter in model.parameters())
    frozen = load(tmp_path / "m", trainable=False)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_b11_tied_embeddings_are_one_parameter_and_untied_ones_two(tmp_path: Path):
    tied = load(make_checkpoint(tmp_path / "tied")).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = load(make_checkpoint(tmp_path / "untied", tie_word_embeddings=False)).model
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def rewrite(path: Path, target: Path, change) -> Path:
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a6_a_head_stored_beside_the_embeddings_it_is_tied_to(tmp_path: Path):
    """Equal, they are one parameter; different, they are two, as transformers makes them."""
    path = make_checkpoint(tmp_path / "m")
    key, head = "model.embed_tokens.weight", "lm_head.weight"
    same = rewrite(path, tmp_path / "same", lambda tensors: tensors.update({head: tensors[key].clone()}))
    other = rewrite(path, tmp_path / "other", lambda tensors: tensors.update({head: tensors[key] + 1}))
    model = load(same).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model = load(other).model
    torch.testing.assert_close(model.lm_head.weight, (model.model.embed_tokens.weight + 1).bfloat16().float())


def test_a20_names_and_shapes_that_differ_are_errors(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m")
    norm = "model.layers.1.input_layernorm.weight"
    key = "model.layers.0.self_attn.k_proj.weight"
    missing = rewrite(path, tmp_path / "missing", lambda tensors: tensors.pop(norm))
    strange = rewrite(path, tmp_path / "strange", lambda tensors: tensors.update({"adapter.weight": torch.ones(2)}))
    narrow = rewrite(path, tmp_path / "narrow", lambda tensors: tensors.update({key: tensors[key][:8].clone()}))
    for directory, words in (
        (missing, rf"{norm} is missing \(1 missing, 0 without a place\)"),
        (strange, "adapter.weight has no place"),
        (narrow, rf"{key} is stored as \[8, 32\].*\[16, 32\]"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load(directory)


def test_old_rotary_frequencies_are_ignored(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    old = rewrite(path, tmp_path / "old", lambda tensors: tensors.update({name: torch.full((4,), 7.0)}))
    assert torch.equal(load(old).model.model.rotary_emb.inv_freq, load(path).model.model.rotary_emb.inv_freq)


def test_what_transformers_cannot_build_is_refused_in_one_line(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m")
    with pytest.raises(RefusedError, match="transformers cannot build this model") as caught:
        load(path, attention="no_such_attention")
    assert "\n" not in str(caught.value)
