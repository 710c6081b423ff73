"""Folding whole checkpoints: planted solutions come back, and what cannot be folded is refused.

A planted checkpoint is a GQA model written as one with more KV heads and then scrambled by what changes nothing: its
heads are permuted, its V heads mixed by matrices, its K heads turned pair by pair. All oracles here are independent of
headfold's own tensor code.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headfold.convert import convert_checkpoint
from headfold.convert.calibrate import fold_layers
from headfold.convert.checkpoint import Checkpoint
from headfold.convert.errors import RefusedError
from headfold.convert.families import describe
from headfold.convert.families.declared import FAMILIES
from headfold.recipes.schema import SHIPPED

HEAD_DIM, NUM_HEADS = 12, 6


def windows(num_windows: int = 24, length: int = 40) -> torch.Tensor:
    return torch.randint(3, 61, (num_windows, length), generator=torch.Generator().manual_seed(5))


def pairs_of(kind: str, num_channels: int) -> list[tuple[int, int]]:
    half = num_channels // 2
    return [(p, p + half) if kind == "half" else (2 * p, 2 * p + 1) for p in range(half)]


def invariance(kind: str, num_channels: int, generator: torch.Generator, head_dim: int = HEAD_DIM) -> torch.Tensor:
    """A random matrix (D, D) that rotary commutes with: complex factors of modulus 1/2 to 2, any matrix on the rest."""
    matrix = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    for a, b in pairs_of(kind, num_channels):
        angle, modulus = torch.rand(2, generator=generator, dtype=torch.float64) * torch.tensor([6.28, 1.5])
        re, im = (modulus + 0.5) * angle.cos(), (modulus + 0.5) * angle.sin()
        matrix[[a, a, b, b], [a, b, a, b]] = torch.stack([re, -im, im, re])
    rest = slice(num_channels, head_dim)
    matrix[rest, rest] = conditioned(head_dim - num_channels, generator)
    return matrix


def conditioned(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random matrix of condition number up to 10."""
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q for _ in "ab")
    return left * (1 + 9 * torch.rand(size, generator=generator, dtype=torch.float64)) @ right


def scramble(
    path: Path, rotary_of_layer: list[tuple[str, int]], num_kv_heads: int, seed: int = 0, head_dim: int = HEAD_DIM
) -> None:
    """Change the weights of a checkpoint in place, and not what it computes."""
    generator = torch.Generator().manual_seed(seed)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer, (kind, num_channels) in enumerate(rotary_of_layer):
        prefix = next(name for name in tensors if f"layers.{layer}." in name).split("layers.")[0]
        prefix = f"{prefix}layers.{layer}.self_attn."
        output = next(o for o in ("o_proj", "dense") if f"{prefix}{o}.weight" in tensors)
        order = torch.randperm(num_kv_heads, generator=generator)
        turns = torch.stack([invariance(kind, num_channels, generator, head_dim) for _ in range(num_kv_heads)])
        mixes = torch.stack([conditioned(head_dim, generator) for _ in range(num_kv_heads)])

        def change(name: str, maps: torch.Tensor, order: torch.Tensor = order, prefix: str = prefix) -> None:
            for part in ("weight", "bias"):
                tensor = tensors.get(f"{prefix}{name}.{part}")
                if tensor is not None:
                    heads = tensor.double().unflatten(0, (-1, head_dim)).unflatten(0, (num_kv_heads, -1))
                    moved = torch.einsum("gde,gqe...->gqd...", maps, heads)[order]
                    tensors[f"{prefix}{name}.{part}"] = moved.flatten(0, 2).to(tensor.dtype).contiguous()

        change("q_proj", torch.linalg.inv(turns).mT)
        change("k_proj", turns)
        change("v_proj", mixes)
        weight = tensors[f"{prefix}{output}.weight"]
        heads = weight.double().unflatten(1, (num_kv_heads, -1, head_dim))
        moved = torch.einsum("egqd,gdc->egqc", heads, torch.linalg.inv(mixes))[:, order]
        tensors[f"{prefix}{output}.weight"] = moved.flatten(1).to(weight.dtype).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


# name: (family, what differs in its config, rotary of its two layers)
PLANTED: dict[str, tuple[str, dict[str, Any], list[tuple[str, int]]]] = {
    "half": ("llama", {"attention_bias": True}, [("half", 12)] * 2),
    "biased-k-and-v": ("qwen2", {}, [("half", 12)] * 2),
    "interleaved": ("cohere", {"use_qk_norm": False, "attention_bias": True}, [("interleaved", 12)] * 2),
    "partial-half": ("phi", {"qk_layernorm": False, "partial_rotary_factor": 0.5}, [("half", 6)] * 2),
    "partial-interleaved": ("glm", {"attention_bias": True}, [("interleaved", 6)] * 2),
    "none": ("smollm3", {"no_rope_layers": [1, 0], "attention_bias": True}, [("half", 12), ("half", 0)]),
    "norm-behind-output": ("gemma2", {"query_pre_attn_scalar": 12, "attention_bias": True}, [("half", 12)] * 2),
    "scaled-residual": ("granite", {"residual_multiplier": 0.22, "attention_bias": True}, [("half", 12)] * 2),
}


def planted(tiny: Any, name: str, directory: Path, num_kv_heads: int) -> tuple[Path, torch.Tensor]:
    """A scrambled checkpoint that came from 2 KV heads, with its logits."""
    family, overrides, rotary = PLANTED[name]
    small = tiny.save(
        tiny.tiny_model(tiny.tiny_config(family, num_key_value_heads=2, **overrides)), directory / "small"
    )
    expanded = tiny.expand(small, directory / "expanded", num_kv_heads)
    logits = tiny.logits(tiny.load(small))
    scramble(expanded, rotary, num_kv_heads)
    assert torch.allclose(tiny.logits(tiny.load(expanded)), logits, atol=2e-4 * logits.abs().max())
    return expanded, logits


def fold(path: Path, output: Path, monkeypatch: pytest.MonkeyPatch, num_kv_heads: int, **kwargs: Any) -> None:
    monkeypatch.setattr("headfold.convert.windows.read_windows", lambda *_, **__: windows())
    convert_checkpoint(path, output, num_key_value_heads=num_kv_heads, calibration=str(path), **kwargs)


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    return ((first - second).norm() / second.norm()).item()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_heads_fold_back_to_the_same_logits(tiny, tmp_path, monkeypatch, name):
    expanded, logits = planted(tiny, name, tmp_path, 6)
    fold(expanded, tmp_path / "folded", monkeypatch, 2, grouping="similar")
    assert relative(tiny.logits(tiny.load(tmp_path / "folded")), logits) < 1e-3
    convert_checkpoint(expanded, tmp_path / "mean", num_key_value_heads=2, method="mean")
    assert relative(tiny.logits(tiny.load(tmp_path / "mean")), logits) > 0.1
    for layer in json.loads((tmp_path / "folded" / "headfold.json").read_text())["layers"]:
        assert layer["key_energy_kept"] > 1 - 1e-5 and layer["value_energy_kept"] > 1 - 1e-5
        assert layer["output_error_repaired"] < 1e-3


def test_planted_heads_of_a_fused_layout_fold_back(tiny, tmp_path, monkeypatch):
    """Phi-3: one tensor holds q, k and v. The scrambled Llama is written into it by hand."""
    expanded, logits = planted(tiny, "half-without-biases", tmp_path, 6)
    tensors = load_file(expanded / "model.safetensors")
    fused = {}
    for key, tensor in tensors.items():
        if "q_proj" in key:
            parts = [tensors[key.replace("q_proj", other)] for other in ("q_proj", "k_proj", "v_proj")]
            fused[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in key:
            fused[key.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [tensor, tensors[key.replace("gate_proj", "up_proj")]]
            )
        elif not any(other in key for other in ("k_proj", "v_proj", "up_proj")):
            fused[key] = tensor
    config = tiny.tiny_config("phi3", num_key_value_heads=6, hidden_size=72)
    path = tiny.save(tiny.tiny_model(config), tmp_path / "phi3")
    save_file(fused, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.allclose(tiny.logits(tiny.load(path)), logits, atol=2e-4 * logits.abs().max())
    fold(path, tmp_path / "folded", monkeypatch, 2, grouping="similar")
    assert relative(tiny.logits(tiny.load(tmp_path / "folded")), logits) < 1e-3


PLANTED["half-without-biases"] = ("llama", {"hidden_size": 72}, [("half", 12)] * 2)


@pytest.mark.slow
@pytest.mark.skipif(
    "HEADFOLD_SMOLLM2" not in os.environ,
    reason="HEADFOLD_SMOLLM2 names no directory with SmolLM2-135M (9 query heads on 3 KV heads) as a plain checkpoint",
)
def test_a_real_model_with_planted_heads_folds_back(tiny, tmp_path):
    original = Path(os.environ["HEADFOLD_SMOLLM2"])
    expanded = tiny.expand(original, tmp_path / "expanded", 9)
    shutil.copy(original / "tokenizer.json", expanded)
    shutil.copy(original / "tokenizer_config.json", expanded)
    scramble(expanded, [("half", 64)] * 30, 9, head_dim=64)
    logits = tiny.logits(tiny.load(original))
    assert relative(tiny.logits(tiny.load(expanded)), logits) < 1e-4
    text = str(SHIPPED / "quickstart_text" / "eval.jsonl")
    convert_checkpoint(
        expanded,
        tmp_path / "folded",
        num_key_value_heads=3,
        grouping="similar",
        calibration=text,
        calibration_tokens=4096,
    )
    error = relative(tiny.logits(tiny.load(tmp_path / "folded")), logits)
    convert_checkpoint(expanded, tmp_path / "mean", num_key_value_heads=3)
    print(f"relative error of the logits: fold {error:.1e}")
    assert error < 1e-3 and relative(tiny.logits(tiny.load(tmp_path / "mean")), logits) > 0.1


@pytest.mark.parametrize("method", ["fold", "aligned", "mean", "first"])
def test_as_many_heads_as_before_is_the_identity_to_the_last_bit(tiny, llama, tmp_path, monkeypatch, method):
    if method in ("fold", "aligned"):
        fold(llama, tmp_path / "out", monkeypatch, 6, method=method)
    else:
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=6, method=method)
    before, after = (load_file(path / "model.safetensors") for path in (llama, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_aligned_undoes_planted_rotations(tiny, tmp_path, monkeypatch):
    """With phases and orthogonal mixes alone, the aligned heads are equal and their mean loses nothing."""
    monkeypatch.setitem(globals(), "conditioned", orthogonal)
    monkeypatch.setitem(globals(), "invariance", phases)
    expanded, logits = planted(tiny, "half", tmp_path, 6)
    fold(expanded, tmp_path / "folded", monkeypatch, 2, method="aligned", grouping="similar")
    assert relative(tiny.logits(tiny.load(tmp_path / "folded")), logits) < 1e-3


def orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def phases(kind: str, num_channels: int, generator: torch.Generator, head_dim: int) -> torch.Tensor:
    matrix = torch.eye(head_dim, dtype=torch.float64)
    for a, b in pairs_of(kind, num_channels):
        angle = 6.28 * torch.rand((), generator=generator, dtype=torch.float64)
        matrix[[a, a, b, b], [a, b, a, b]] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()])
    return matrix


def test_folding_is_deterministic_and_copies_what_it_does_not_change(tiny, llama, tmp_path, monkeypatch):
    for name in ("one", "two"):
        fold(llama, tmp_path / name, monkeypatch, 2)
    one, two, before = (load_file(path / "model.safetensors") for path in (tmp_path / "one", tmp_path / "two", llama))
    assert all(torch.equal(one[name], two[name]) for name in one)
    changed = {
        name for name in one if one[name].shape != before[name].shape or not torch.equal(one[name], before[name])
    }
    projections = {name for name in one if ("_proj" in name and "self_attn" in name) or "down_proj" in name}
    assert changed == projections | {"model.norm.weight"}


NOT_CALIBRATED = {
    **dict.fromkeys(("gemma3_text", "qwen3", "qwen3_moe", "apertus", "apertus1p5_text", "dots1", "exaone4"), "norm"),
    **dict.fromkeys(("exaone_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "glm4_moe", "olmo2"), "norm"),
    **dict.fromkeys(("olmo3", "flex_olmo", "olmoe", "phi", "stablelm", "cohere", "hy_v3", "minimax_m2"), "norm"),
    **dict.fromkeys(("kolibri1", "lara_mini", "mellum", "minimax_m3_vl_text"), "norm"),
    **dict.fromkeys(("cohere2_moe", "falcon_h1", "jamba", "llama4_text", "nanochat"), "its family is not declared"),
    "olmo": "clip_qkv",
    "exaone": r"are not called layers\.N",
}


@pytest.mark.parametrize("family", sorted({*FAMILIES, *NOT_CALIBRATED}))
def test_every_family_is_folded_or_refused_with_the_reason(tiny, tmp_path, monkeypatch, family):
    """A planted solution comes back, also by aligned; heads with nothing in common lose less than by their mean."""
    model = tiny.tiny_model(tiny.tiny_config(family))
    tiny.save(model, tmp_path / "mha")
    if family in NOT_CALIBRATED:
        with pytest.raises(RefusedError, match=NOT_CALIBRATED[family]):
            fold(tmp_path / "mha", tmp_path / "out", monkeypatch, 2)
        assert not (tmp_path / "out").exists()
        return
    fold(tmp_path / "mha", tmp_path / "folded", monkeypatch, 2)
    convert_checkpoint(tmp_path / "mha", tmp_path / "mean", num_key_value_heads=2, method="mean")
    folded, mean = (
        relative(tiny.logits(tiny.load(tmp_path / name)), tiny.logits(model)) for name in ("folded", "mean")
    )
    assert folded < mean
    small = tiny.tiny_model(tiny.tiny_config(family, num_key_value_heads=2))
    tiny.save(small, tmp_path / "small")
    tiny.expand(tmp_path / "small", tmp_path / "expanded", 6)
    for method in ("fold", "aligned"):
        fold(tmp_path / "expanded", tmp_path / method, monkeypatch, 2, method=method)
        assert relative(tiny.logits(tiny.load(tmp_path / method)), tiny.logits(small)) < 1e-4


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", "q_norm|k_norm"),
        ("stablelm", "layernorm"),
        ("olmo2", "k_norm"),
        ("olmo", "clip_qkv"),
        ("cohere", "k_norm"),
    ],
)
@pytest.mark.parametrize("method", ["fold", "aligned"])
def test_a12_layers_whose_heads_cannot_be_turned_are_refused(tiny, tmp_path, monkeypatch, family, reason, method):
    path = tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / "in")
    with pytest.raises(RefusedError, match=reason):
        fold(path, tmp_path / "out", monkeypatch, 2, method=method)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_a_wrongly_described_rotary_is_refused(tiny, llama):
    from dataclasses import replace

    from headfold.convert.families import Rotary

    checkpoint = Checkpoint.open(llama)
    layers = [replace(layer, rotary=Rotary("interleaved", 12)) for layer in describe(checkpoint)]
    with pytest.raises(RefusedError, match="does not rotate its queries and keys in interleaved pairs"):
        list(fold_layers(checkpoint, layers, windows(), num_key_value_heads=2))


def test_e3_one_head_is_possible_and_better_than_the_mean(tiny, llama, tmp_path, monkeypatch):
    logits = tiny.logits(tiny.load(llama))
    fold(llama, tmp_path / "fold", monkeypatch, 1)
    convert_checkpoint(llama, tmp_path / "mean", num_key_value_heads=1, method="mean")
    errors = [relative(tiny.logits(tiny.load(tmp_path / name)), logits) for name in ("fold", "mean")]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "gemma2", "granite", "phi", "nemotron", "ernie4_5"])
def test_families_with_other_blocks_fold(tiny, tmp_path, monkeypatch, family):
    """Learned sinks, experts, soft caps, parallel blocks: half of the heads, and stock loading."""
    overrides = {"qk_layernorm": False} if family == "phi" else {}
    path = tiny.save(tiny.tiny_model(tiny.tiny_config(family, **overrides)), tmp_path / "in")
    fold(path, tmp_path / "out", monkeypatch, 3, grouping="similar")
    assert tiny.logits(tiny.load(tmp_path / "out")).isfinite().all()
