"""Whole conversions: what is in the weights, in the config and beside them. A1-A6, A11, A14, A18-A22."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headfold.convert import convert_checkpoint
from headfold.convert.card import amended_card
from headfold.convert.check import check_checkpoint
from headfold.convert.checkpoint import Checkpoint
from headfold.convert.conversion import tensor_parallel_sizes
from headfold.convert.errors import CheckpointError, RefusedError


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def change_weights(path: Path, change) -> None:
    """Replace the tensors of a checkpoint by what `change` makes of them."""
    save_file(change(weights(path)), path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **values) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in values.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    (path / "config.json").write_text(json.dumps(config, indent=2))


@pytest.mark.parametrize(("num_heads", "num_new"), [(32, 4), (12, 4), (6, 2), (12, 3), (5, 1), (9, 9)])
def test_a1_new_head_g_merges_the_adjacent_heads_of_its_query_heads(tiny, tmp_path, num_heads, num_new):
    config = tiny.tiny_config(
        "llama", num_attention_heads=num_heads, num_key_value_heads=num_heads, hidden_size=num_heads
    )
    tiny.save(tiny.tiny_model(config), tmp_path / "in")

    def number_heads(tensors):
        for name, tensor in tensors.items():
            if "k_proj" in name or "v_proj" in name:
                tensor[:] = torch.arange(num_heads).repeat_interleave(12)[:, None]
        return tensors

    change_weights(tmp_path / "in", number_heads)
    group_size = num_heads // num_new
    expected = {
        "first": torch.arange(num_new) * float(group_size),
        "mean": torch.arange(num_new) * group_size + (group_size - 1) / 2,
    }
    for method, heads in expected.items():
        convert_checkpoint(tmp_path / "in", tmp_path / method, num_key_value_heads=num_new, method=method)
        for name, tensor in weights(tmp_path / method).items():
            if "k_proj" in name or "v_proj" in name:
                assert tensor.shape[0] == num_new * 12
                assert torch.equal(tensor[:, 0], heads.repeat_interleave(12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a1_gqa_to_mha_to_gqa_gives_the_same_bits(tiny, tmp_path, dtype):
    tiny.save(tiny.tiny_model(tiny.tiny_config("llama", num_key_value_heads=2), dtype), tmp_path / "gqa")
    tiny.expand(tmp_path / "gqa", tmp_path / "mha", 6)
    for method in ("mean", "first"):
        convert_checkpoint(tmp_path / "mha", tmp_path / method, num_key_value_heads=2, method=method)
        before, after = weights(tmp_path / "gqa"), weights(tmp_path / method)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == dtype and torch.equal(after[name], tensor), name


def test_gqa_input_to_fewer_heads_is_the_same_as_at_once_and_one_is_mqa(tiny, tmp_path):
    tiny.save(tiny.tiny_model(tiny.tiny_config("llama")), tmp_path / "6")
    convert_checkpoint(tmp_path / "6", tmp_path / "3", num_key_value_heads=3)
    convert_checkpoint(tmp_path / "3", tmp_path / "3to1", num_key_value_heads=1)
    convert_checkpoint(tmp_path / "6", tmp_path / "1", num_key_value_heads=1)
    for name, tensor in weights(tmp_path / "1").items():
        assert torch.allclose(tensor, weights(tmp_path / "3to1")[name], atol=1e-6), name
    assert tiny.load(tmp_path / "1").config.num_key_value_heads == 1
    record = json.loads((tmp_path / "3to1" / "headfold.json").read_text())
    assert record["num_key_value_heads"] == {"before": 3, "after": 1}
    assert record["source"]["record"]["num_key_value_heads"] == {"before": 6, "after": 3}


def test_random_depends_on_the_seed_alone(tiny, llama, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert_checkpoint(llama, tmp_path / name, num_key_value_heads=2, method="random", seed=seed)
    key = "model.layers.0.self_attn.k_proj.weight"
    a, b, c = (weights(tmp_path / name)[key] for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert 0.015 < a.std() < 0.025  # initializer_range 0.02
    assert not torch.equal(a, weights(tmp_path / "a")["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("std", [None, "x", -1.0, float("nan"), float("inf"), [], True])
def test_an_initializer_range_that_is_none_is_refused_where_it_is_used(llama, tmp_path, std):
    change_config(llama, initializer_range=std)
    convert_checkpoint(llama, tmp_path / "mean", num_key_value_heads=2, method="mean")
    if std is None:
        convert_checkpoint(llama, tmp_path / "random", num_key_value_heads=2, method="random")
        return
    with pytest.raises(CheckpointError, match="no standard deviation"):
        convert_checkpoint(llama, tmp_path / "random", num_key_value_heads=2, method="random")


@pytest.mark.parametrize("count", [1, 3])
def test_a2_mha_weights_under_a_config_that_says_one_head(llama, tmp_path, count):
    change_config(llama, num_key_value_heads=1)
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=count)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "num_key_value_heads 1",
        "should have 12 rows; it has 72",
        "Set num_key_value_heads to 6",
        "--kv-heads 1",
    ):
        assert part in message
    assert message.endswith(f"headfold convert {llama} OUTPUT --kv-heads 1")


@pytest.mark.parametrize("absent", [..., None])
def test_a3_an_absent_or_null_number_means_mha_and_is_written_afterwards(tiny, llama, tmp_path, absent):
    change_config(llama, num_key_value_heads=absent)
    for num_new in (6, 2):
        output = tmp_path / str(num_new)
        convert_checkpoint(llama, output, num_key_value_heads=num_new)
        assert json.loads((output / "config.json").read_text())["num_key_value_heads"] == num_new
        tiny.load(output)


@pytest.mark.parametrize("absent", [..., None])
def test_a3_an_absent_number_that_contradicts_the_rows(tiny, tmp_path, absent):
    tiny.save(tiny.tiny_model(tiny.tiny_config("llama", num_key_value_heads=2)), tmp_path / "in")
    change_config(tmp_path / "in", num_key_value_heads=absent)
    with pytest.raises(
        CheckpointError, match=r"has no num_key_value_heads, which means 6, .* 72 rows; it has 24, those of 2"
    ):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=1)


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "head_dim"),
    [(160, 8, 32), (40, 4, 16), (96, 8, None), (2560 // 16, 32, 8), (64, 4, 80)],
)
def test_a4_explicit_head_dim_is_used_and_unchanged(tiny, tmp_path, hidden_size, num_heads, head_dim):
    config = tiny.tiny_config(
        "llama",
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
    )
    tiny.save(tiny.tiny_model(config), tmp_path / "in")
    change_config(tmp_path / "in", head_dim=head_dim)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == head_dim
    rows = 2 * (head_dim or hidden_size // num_heads)
    assert weights(tmp_path / "out")["model.layers.0.self_attn.v_proj.weight"].shape == (rows, hidden_size)
    tiny.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("num_heads", "num_new", "possible"),
    [(33, 2, "1, 3, 11, 33"), (7, 2, "1, 7"), (12, 5, "1, 2, 3, 4, 6, 12"), (12, 24, "1, 2, 3, 4, 6, 12")],
)
def test_a5_indivisible_numbers_are_refused_before_weights_are_read(tmp_path, num_heads, num_new, possible):
    config = {
        "model_type": "llama",
        "hidden_size": num_heads,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))  # there are no weights to read
    with pytest.raises(
        RefusedError, match=f"{num_new} KV heads per layer are not possible: .*; possible are {possible}$"
    ):
        convert_checkpoint(tmp_path, tmp_path / "out", num_key_value_heads=num_new)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_stored", [True, False])
def test_a6_ties_and_stored_heads_are_kept_as_they_are(tiny, tmp_path, tied, head_stored):
    tiny.save(tiny.tiny_model(tiny.tiny_config("llama", tie_word_embeddings=tied)), tmp_path / "in")

    def change(tensors):
        if head_stored:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        else:
            tensors.pop("lm_head.weight", None)
        return tensors

    change_weights(tmp_path / "in", change)
    if not tied and not head_stored:
        with pytest.raises(CheckpointError, match=r"no lm_head\.weight, and tie_word_embeddings is not true"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=2)
        change_config(tmp_path / "in", tie_word_embeddings=...)  # Llama's default is false
        assert [finding.severity for finding in check_checkpoint(tmp_path / "in")] == ["error"]
        return
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=2)
    assert weights(tmp_path / "out").keys() == weights(tmp_path / "in").keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    tiny.logits(tiny.load(tmp_path / "out"))


def test_a11_biases_without_a_config_field_are_merged_like_the_rows(tiny, tmp_path):
    tiny.save(tiny.tiny_model(tiny.tiny_config("qwen2")), tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=2)
    before, after = weights(tmp_path / "in"), weights(tmp_path / "out")
    module = "model.layers.1.self_attn"
    for name in ("k_proj.bias", "v_proj.bias", "k_proj.weight", "v_proj.weight"):
        heads = before[f"{module}.{name}"].view(2, 3, 12, -1).mean(1).flatten(0, 1)
        assert torch.allclose(after[f"{module}.{name}"], heads.view(after[f"{module}.{name}"].shape), atol=1e-7)
    for name in ("q_proj.bias", "q_proj.weight", "o_proj.weight"):
        assert torch.equal(after[f"{module}.{name}"], before[f"{module}.{name}"])


def test_a12_a_flat_norm_and_norms_of_single_heads_change_size(tiny, tmp_path):
    tiny.save(tiny.tiny_model(tiny.tiny_config("olmo2")), tmp_path / "olmo2")
    convert_checkpoint(tmp_path / "olmo2", tmp_path / "olmo2_out", num_key_value_heads=2)
    name = "model.layers.0.self_attn.k_norm.weight"
    expected = weights(tmp_path / "olmo2")[name].view(2, 3, 12).mean(1).flatten()
    assert torch.allclose(weights(tmp_path / "olmo2_out")[name], expected, atol=1e-7)
    tiny.save(tiny.tiny_model(tiny.tiny_config("stablelm")), tmp_path / "stablelm")
    convert_checkpoint(tmp_path / "stablelm", tmp_path / "stablelm_out", num_key_value_heads=2, method="first")
    names = [name for name in weights(tmp_path / "stablelm_out") if "layers.0.self_attn.k_layernorm" in name]
    assert sorted(names) == [f"model.layers.0.self_attn.k_layernorm.norms.{head}.weight" for head in (0, 1)]
    before = weights(tmp_path / "stablelm")["model.layers.0.self_attn.k_layernorm.norms.3.weight"]
    assert torch.equal(weights(tmp_path / "stablelm_out")[names[0].replace("norms.0", "norms.1")], before)


def test_a13_a_fused_tensor_keeps_the_rows_of_q(tiny, tmp_path):
    tiny.save(tiny.tiny_model(tiny.tiny_config("phi3")), tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=2)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    before, after = weights(tmp_path / "in")[name], weights(tmp_path / "out")[name]
    assert after.shape == (72 + 2 * 24, 72)
    assert torch.equal(after[:72], before[:72])
    for start, old_start in ((72, 72), (96, 144)):
        expected = before[old_start : old_start + 72].view(2, 3, 12, 72).mean(1).flatten(0, 1)
        assert torch.allclose(after[start : start + 24], expected, atol=1e-7)


def test_a14_quantised_tensors_are_refused(llama, tmp_path):
    original = weights(llama)
    name = "model.layers.0.self_attn.k_proj.weight"
    for change in (
        {"model.layers.0.self_attn.k_proj.qweight": torch.zeros(2, dtype=torch.int32)},
        {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
        {name: original[name].to(torch.int8)},
        {name: original[name].to(torch.float8_e4m3fn)},
    ):
        change_weights(llama, lambda tensors, change=change: {**original, **change})
        with pytest.raises(RefusedError, match="unquantised"):
            convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)


def test_a_config_that_names_another_weight_file_is_refused(llama, tmp_path):
    """transformers would load that file in place of what was converted."""
    change_config(llama, transformers_weights="other.safetensors")
    with pytest.raises(RefusedError, match=r"transformers_weights .*'other.safetensors'"):
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)


def test_a18_code_in_the_directory_is_kept_and_not_run(llama, tmp_path):
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("modeling_own.py", "configuration_own.py", "conftest.py", "__init__.py", "torch.py"):
        (llama / name).write_text(code)
    change_config(llama, auto_map={"AutoModelForCausalLM": "modeling_own.Own"}, model_type="someones_own")
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    assert (tmp_path / "out" / "modeling_own.py").read_text() == code
    assert not (tmp_path / "ran").exists()


def test_a19_the_report_says_which_tensor_parallel_sizes_the_number_serves(llama, tmp_path):
    report = convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    assert report.tensor_parallel_sizes == [1, 2]
    assert "1, 2 ranks split the KV heads evenly" in report.render()
    assert tensor_parallel_sizes(32, 8) == [1, 2, 4, 8]
    assert tensor_parallel_sizes(9, 3) == [1, 3]


@pytest.mark.parametrize(
    ("family", "method", "num_new", "is_advised"),
    [
        ("llama", "mean", 2, True),
        ("llama", "first", 2, False),
        ("llama", "mean", 6, False),
        ("qwen3", "mean", 2, False),
    ],
)
def test_the_report_says_what_calibration_would_bring_where_it_is_possible(
    tiny, tmp_path, family, method, num_new, is_advised
):
    path = tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / "in")
    report = convert_checkpoint(path, tmp_path / "out", num_key_value_heads=num_new, method=method)
    assert ("--calibration TEXT" in report.render()) == is_advised == (report.advice is not None)


def test_the_report_counts_bytes(llama, tmp_path):
    report = convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    assert (report.cache_bytes_per_token_before, report.cache_bytes_per_token) == (
        2 * 2 * 6 * 12 * 4,
        2 * 2 * 2 * 12 * 4,
    )
    size = sum(tensor.numel() * 4 for tensor in weights(tmp_path / "out").values())
    assert report.weight_bytes == size == Checkpoint.open(tmp_path / "out").total_bytes()
    assert "6 -> 2" in report.render() and json.loads(report.model_dump_json())["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "model.layers.0.self_attn.g_proj.weight": torch.ones(6, 48)},
        lambda tensors: {name: t for name, t in tensors.items() if "layers.1.self_attn.v_proj" not in name},
        lambda tensors: {n: t[:, :40].clone() if "layers.1.self_attn.k_proj" in n else t for n, t in tensors.items()},
        lambda tensors: {n: t[:36].clone() if "layers.1.self_attn.v_proj" in n else t for n, t in tensors.items()},
        lambda tensors: {n: t[:60].clone() if "embed_tokens" in n else t for n, t in tensors.items()},
        lambda tensors: {**tensors, "model.layers.0.self_attn.k_proj.bias": torch.ones(5)},
        lambda tensors: {**tensors, "model.layers.0.self_attn.k_norm.weight": torch.ones(12)},
    ],
    ids=["extra", "missing", "columns", "rows", "vocabulary", "bias", "norm"],
)
def test_a20_tensors_that_differ_from_what_the_config_says_are_refused(llama, tmp_path, change):
    change_weights(llama, change)
    with pytest.raises(RefusedError) as caught:
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_config_edits_touch_nothing_else(llama, tmp_path):
    change_config(
        llama, zebra={"b": [1, None], "a": 1e-30}, rope_theta=12345.0, transformers_version="4.0.0", auto_map=...
    )
    before = json.loads((llama / "config.json").read_text())
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=3)
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(after) == list(before)
    assert after.pop("num_key_value_heads") == 3 and before.pop("num_key_value_heads") == 6
    assert after == before


def test_config_edits_keep_numbers_and_layout_to_the_byte(llama, tmp_path):
    """Of a file as transformers writes it, keys that it does not know included."""
    numbers = {"small": 1e-05, "tiny": 1e-30, "whole": 1.0, "minus": -0.0, "third": 0.1, "long": 10**40, "no": None}
    change_config(llama, **numbers, deep={"b": [1, [2.50, {"a": ""}]], "a": {}}, quoted='\\"\n\t')
    before = (llama / "config.json").read_bytes() + b"\n"
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    after = (tmp_path / "out" / "config.json").read_bytes()
    assert before.count(b'"num_key_value_heads": 6,') == 1
    assert after == before.replace(b'"num_key_value_heads": 6,', b'"num_key_value_heads": 2,')


def test_all_other_files_are_the_same_bytes(llama, tmp_path):
    kept = {
        "tokenizer.json": b"{ }",
        "chat_template.jinja": b"{{x}}\r\n",
        "LICENSE": b"free\n",
        "generation_config.json": b"{}",
    }
    for name, data in kept.items():
        (llama / name).write_bytes(data)
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in kept} == kept


def test_sharded_checkpoints(tiny, tmp_path):
    model = tiny.tiny_model(tiny.tiny_config("llama"))
    tiny.save(model, tmp_path / "one")
    tiny.save(model, tmp_path / "many", max_shard_size="30KB")
    assert len(Checkpoint.open(tmp_path / "many").shards()) > 2
    for name in ("one", "many"):
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}_out", num_key_value_heads=2)
    assert torch.equal(tiny.logits(tiny.load(tmp_path / "many_out")), tiny.logits(tiny.load(tmp_path / "one_out")))
    before, after = Checkpoint.open(tmp_path / "many"), Checkpoint.open(tmp_path / "many_out")
    assert {n: e.file for n, e in before.tensors.items()} == {n: e.file for n, e in after.tensors.items()}
    assert after.warnings == []


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_blocks_do_not_change_the_result(tiny, tmp_path, monkeypatch, family):
    tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / "in")
    for method in ("mean", "first"):
        convert_checkpoint(tmp_path / "in", tmp_path / method, num_key_value_heads=2, method=method)
        with monkeypatch.context() as patch:
            patch.setattr("headfold.convert.conversion.BLOCK_BYTES", 1)
            patch.setattr("headfold.convert.checkpoint.BLOCK_BYTES", 1000)
            convert_checkpoint(tmp_path / "in", tmp_path / f"{method}_blocks", num_key_value_heads=2, method=method)
        for name, tensor in weights(tmp_path / method).items():
            assert torch.equal(tensor, weights(tmp_path / f"{method}_blocks")[name])


def test_layers_with_numbers_of_their_own(tiny, llama, tmp_path):
    """transformers' per_layer_config: layer 0 has 6 KV heads, layer 1 has 3."""
    change_config(llama, per_layer_config={"1": {"num_key_value_heads": 3, "other": 1}})
    change_weights(
        llama,
        lambda t: {n: v[:36].clone() if "1.self_attn.k" in n or "1.self_attn.v" in n else v for n, v in t.items()},
    )
    report = convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=3)
    assert report.num_key_value_heads_before == [6, 3] and "6 or 3 -> 3" in report.render().replace("3 or 6", "6 or 3")
    assert "6 or 3 key/value heads per layer merged into 3" in (tmp_path / "out" / "README.md").read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_key_value_heads"] == 3
    assert config["per_layer_config"] == {"1": {"num_key_value_heads": 3, "other": 1}}
    assert {tuple(t.shape) for name, t in weights(tmp_path / "out").items() if "k_proj" in name} == {(36, 48)}
    with pytest.raises(RefusedError, match=r"6 KV heads per layer are not possible: .* possible are 1, 3$"):
        convert_checkpoint(llama, tmp_path / "refused", num_key_value_heads=6)


def test_a_list_with_a_number_per_layer_stays_a_list(llama, tmp_path):
    change_config(llama, num_key_value_heads=[6, 6], model_type="someones_own")
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == [2, 2]


def test_the_record(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2, seed=3)
    record = json.loads((tmp_path / "out" / "headfold.json").read_text())
    assert record["source"]["name"] == str(llama) and len(record["source"]["sha256"]) == 64
    assert record["source"]["sha256"] == Checkpoint.open(llama).fingerprint
    assert (record["method"], record["grouping"], record["seed"]) == ("mean", "adjacent", 3)
    assert record["num_attention_heads"] == 6 and record["num_key_value_heads"] == {"before": 6, "after": 2}
    assert record["versions"].keys() >= {"python", "torch", "transformers"} and record["time"].endswith("+00:00")


@pytest.mark.parametrize("name", ["README.md", "headfold.json"])
def test_a_card_or_record_that_leads_outside_is_not_read(llama, tmp_path, name):
    (tmp_path / "secret").write_text('{"secret": 1}')
    (llama / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2, progress=lambda *_: pytest.fail("written"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_refused_before_anything_is_written(llama, tmp_path):
    (llama / "headfold.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"headfold\.json: not JSON"):
        convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2, progress=lambda *_: pytest.fail("written"))


@pytest.mark.skipif(os.name == "nt", reason="names of files are bytes only elsewhere")
def test_the_report_is_text_whatever_files_are_called(llama, tmp_path):
    (llama / os.fsdecode(b"\xff\n.gguf")).write_bytes(b"old")
    output = tmp_path / os.fsdecode(b"out\xff")
    report = convert_checkpoint(llama, output, num_key_value_heads=2)
    assert report.left_out_files == ["\\udcff\\n.gguf"] and (output / "config.json").is_file()
    report.render().encode()
    json.loads(report.model_dump_json())


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"---",
        b"---\n---\n",
        b"---\nnot a mapping\n---\nText\n",
        b"---\na: [\n---\nText\n",
        b"\xff\xfe broken\r\n",
        b"---\r\nlicense: mit\r\n---\r\nText\r\n",
        b"---\na: &x [1]\nb: [*x, *x]\n---\n",
        b"\xef\xbb\xbf---\nlicense: mit\n---\nText\n",
        b"---\nlicense: mit\nauthor: Ren\xe9\n---\nText\n",
    ],
)
def test_odd_model_cards_keep_their_bytes(llama, tmp_path, card):
    (llama / "README.md").write_bytes(card)
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    result = (tmp_path / "out" / "README.md").read_bytes()
    assert b"Converted to grouped-query attention" in result
    for line in card.replace(b"---", b"").removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        assert line.strip() in result


@pytest.mark.parametrize(
    ("card", "linked"),
    [
        ("---\nlicense: mit\n---\nText\n", True),
        ("\n\n---\nlicense: mit\n---\nText\n", True),
        ("---\r\nlicense: mit\r\n---\r\nText\r\n", True),
        ("---\nlicense: mit\n---", True),
        ("\ufeff---\nlicense: mit\nemoji: \U0001f600\n---\n", True),
        ("---\n# SPDX\nlicense: mit\ndescription: |\n  a: b\n---\n", True),
        ("---\n{license: mit}\n---\nText\n", False),
        ("---\n  license: mit\n---\nText\n", False),
        ("---\nlicense: mit\n...\n---\nText\n", False),
        ("---\nlicense: mit\nbase_model: x/y\n---\nText\n", False),
        ('---\nlicense: mit\n"base_model": x/y\n---\nText\n', False),
    ],
)
def test_the_front_matter_stays_what_the_hub_reads_and_is_linked_where_a_line_can_be_added(card, linked):
    from huggingface_hub import ModelCard

    record = {"source": {"name": "a/b"}, "num_key_value_heads": {"before": 6, "after": 2}}
    result = amended_card(card, record)
    data = ModelCard(result).data.to_dict()
    assert data["license"] == "mit"
    assert data.get("base_model") == ("a/b" if linked else ModelCard(card).data.to_dict().get("base_model"))
    assert amended_card(result, record) == result


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"source": 3, "uptrain": {"tokens": "x"}},
        {"source": {"name": 3}, "num_key_value_heads": 6},
        *({"num_key_value_heads": heads} for heads in ({}, {"before": []}, {"before": 0, "after": 2}, {"before": "x"})),
    ],
)
def test_a_card_is_made_of_any_record(record):
    assert "Converted to grouped-query attention" in amended_card("Text", record)


def test_a_card_of_many_beginnings_takes_no_time():
    bomb = "<!-- headfold: begin -->\n" * 300_000
    assert bomb.strip() in amended_card(bomb, {})
    ends = "<!-- headfold: begin --><!-- headfold: end -->\n" * 200_000
    assert len(amended_card(ends, {})) < 1000


CARD = """---
license: llama2   # as it is
tags: [a, b]
---
# A model

Text.
"""


def test_the_model_card_is_amended_once(llama, tmp_path):
    (llama / "README.md").write_text(CARD)
    convert_checkpoint(llama, tmp_path / "out", num_key_value_heads=2)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: llama2   # as it is\ntags: [a, b]\n---\n") and "# A model\n\nText.\n" in card
    assert "6 key/value heads per layer merged into 2" in card and str(tmp_path) not in card
    convert_checkpoint(tmp_path / "out", tmp_path / "again", num_key_value_heads=1)
    again = (tmp_path / "again" / "README.md").read_text()
    assert again.count("headfold: begin") == 1 and "2 key/value heads per layer merged into 1" in again
    assert "# A model\n\nText.\n" in again


def test_wrong_combinations_of_settings_are_refused(llama, tmp_path):
    for settings, message in [
        ({"method": "fold"}, "method fold needs calibration text"),
        ({"method": "mean", "calibration": "x.txt"}, "method mean uses no calibration text"),
        ({"grouping": "similar"}, "grouping similar needs method fold or aligned"),
        ({"method": "median"}, "method: Input should be 'fold'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: Input should be greater than 0"),
    ]:
        with pytest.raises(RefusedError, match=message):
            convert_checkpoint(llama, tmp_path / "out", **{"num_key_value_heads": 2, **settings})
    assert not (tmp_path / "out").exists()


def test_a21_nothing_is_written_when_the_request_is_refused(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "taken")
    with pytest.raises(RefusedError, match="exists already"):
        convert_checkpoint(llama, tmp_path / "taken", num_key_value_heads=2)
    convert_checkpoint(llama, tmp_path / "taken", num_key_value_heads=2, force=True)
    assert json.loads((tmp_path / "taken" / "config.json").read_text())["num_key_value_heads"] == 2


def test_names_from_the_hub_come_from_its_cache(llama, tmp_path, monkeypatch):
    """A hub cache made by hand: snapshots of links to blobs."""
    cache = tmp_path / "hub" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    for file in llama.iterdir():
        shutil.copy(file, cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    report = convert_checkpoint("someone/tiny", tmp_path / "out", num_key_value_heads=2)
    assert report.source == "someone/tiny"
    record = json.loads((tmp_path / "out" / "headfold.json").read_text())
    assert (record["source"]["name"], record["source"]["revision"]) == ("someone/tiny", commit)
    assert "base_model: someone/tiny\n" in (tmp_path / "out" / "README.md").read_text()
