"""The advisor against hand-made arithmetic and against transformers' own cache: E1, E8, A19."""

import json

import pytest
import torch

from headfold.convert.errors import RefusedError
from headfold.recipes.gpus import GPU_MEMORY_GB, find_gpu
from headfold.recipes.plan import plan, render_plan
from headfold.recipes.schema import SHIPPED

LLAMA_2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


def write_config(path, config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_e1_llama_2_7b_from_its_config_alone(tmp_path):
    result = plan(write_config(tmp_path / "llama", LLAMA_2_7B), gpu="A100-80GB")
    assert result.num_parameters == 6_738_415_616  # as published
    assert [option.num_key_value_heads for option in result.options] == [32, 16, 8, 4, 2, 1]
    mha, eight = result.options[0], result.options[2]
    assert mha.cache_bytes_per_token == 512 * 1024 and eight.cache_bytes_per_token == 128 * 1024
    assert (mha.saving_percent, eight.saving_percent) == (0, 75)
    assert {(size.context, size.batch): size.bytes for size in mha.cache}[4096, 1] == 2 * 1024**3
    # K and V of 24 heads are gone from each layer: 2 bytes * 2 * 24 * 128 * 4096 each
    assert mha.weight_bytes == 2 * 6_738_415_616
    assert mha.weight_bytes - eight.weight_bytes == 32 * 2 * 2 * 24 * 128 * 4096
    assert eight.tensor_parallel_sizes == [1, 2, 4, 8]
    for option in result.options:
        room = 0.9 * 80e9 - option.weight_bytes
        for entry in option.sequences:
            assert entry.num_sequences == int(room // (entry.context * option.cache_bytes_per_token))


def test_numbers_asked_for_stand_beside_the_model_as_it_is(tmp_path):
    path = write_config(tmp_path / "llama", LLAMA_2_7B)
    assert [option.num_key_value_heads for option in plan(path, kv_heads=[4, 8]).options] == [32, 8, 4]
    with pytest.raises(
        RefusedError, match=r"3 KV heads per layer are not possible: .*; possible are 1, 2, 4, 8, 16, 32$"
    ):
        plan(path, kv_heads=[3])


def test_e8_head_dim_is_the_configs_not_hidden_size_over_heads(tmp_path):
    config = {**LLAMA_2_7B, "hidden_size": 2560, "head_dim": 128, "num_hidden_layers": 2, "intermediate_size": 64}
    result = plan(write_config(tmp_path / "llama", config))
    assert result.head_dim == 128
    assert result.options[0].cache_bytes_per_token == 2 * 2 * 32 * 128 * 2
    gemma = {
        "model_type": "gemma",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 99,
    }
    gemma.update(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)
    assert plan(write_config(tmp_path / "gemma", gemma)).options[0].cache_bytes_per_token == 2 * 2 * 4 * 256 * 2


def test_contexts_end_where_the_positions_do(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 99}
    result = plan(write_config(tmp_path, config))
    assert result.max_context == 128 and {size.context for size in result.options[0].cache} == {128}


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3"])
def test_the_cache_is_the_one_that_transformers_fills(tmp_path, family):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=61,
        hidden_size=48,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        sliding_window=5 if family != "qwen3" else None,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    result = plan(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = model(torch.ones(1, 64, dtype=torch.long), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        slots = layer.keys.shape[-2]
        if layer.is_sliding:
            assert slots == 4  # transformers keeps window - 1; the current token makes the window full
            slots += 1
        held += 2 * slots * 2 * 12 * 2
    assert result.sliding_window_layers == sum(layer.is_sliding for layer in cache.layers)
    (at_64,) = [size.bytes for size in result.options[0].cache if (size.context, size.batch) == (64, 1)]
    assert at_64 == held


def test_parameters_come_from_the_weights_where_they_are(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=61,
        hidden_size=48,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    empty = plan(tmp_path)
    model.save_pretrained(tmp_path)
    stored = plan(tmp_path)
    assert empty.num_parameters == stored.num_parameters == model.num_parameters()
    assert "config" in empty.parameters_from and "weights" in stored.parameters_from
    assert stored.options[0].weight_bytes == 4 * model.num_parameters()


def test_unknown_gpus_are_refused_with_the_list(tmp_path):
    assert find_gpu("h100 80gb") == "H100-80GB" and find_gpu("L40s") == "L40S-48GB"
    with pytest.raises(RefusedError, match=r"GPU 'A100' may be A100-40GB or A100-80GB"):
        find_gpu("A100")
    with pytest.raises(RefusedError, match=r"GPU 'Voodoo2' is not known; known are T4-16GB, .*MI355X-288GB"):
        plan(write_config(tmp_path, LLAMA_2_7B), gpu="Voodoo2")
    assert all(name.endswith(f"-{memory}GB") for name, memory in GPU_MEMORY_GB.items())


def test_models_that_cannot_be_converted_are_refused(tmp_path):
    with pytest.raises(RefusedError, match="bloom: cannot be converted"):
        plan(write_config(tmp_path, {"model_type": "bloom", "n_head": 12}))
    with pytest.raises(RefusedError, match=r"no such directory|neither a directory"):
        plan(tmp_path / "nothing")


def test_the_rendered_plan_and_its_json(tmp_path):
    result = plan(write_config(tmp_path / "llama", LLAMA_2_7B), gpu="H100-80")
    text = render_plan(result)
    assert "512 KiB" in text and "75 %" in text and "1, 2, 4, 8" in text and "H100-80GB" in text and "10%" in text
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 150
    assert json.loads(result.model_dump_json())["options"][2]["num_key_value_heads"] == 8


def test_too_small_a_gpu_fits_nothing(tmp_path):
    result = plan(write_config(tmp_path / "llama", LLAMA_2_7B), gpu="T4")
    assert result.options[0].sequences is not None
    assert {entry.num_sequences for entry in result.options[0].sequences} <= {0, 1}


def test_e1_calibration_text_shows_what_each_count_would_keep(monkeypatch):
    monkeypatch.setattr("headfold.recipes.plan.CALIBRATION_TOKENS", 2048)
    seen = []
    text = str(SHIPPED / "quickstart_text" / "eval.jsonl")
    result = plan(SHIPPED / "quickstart", calibration=text, progress=lambda *step: seen.append(step))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (result.calibration, result.calibration_tokens) == (text, 2048)
    assert [option.num_key_value_heads for option in result.options] == [8, 4, 2, 1]
    for kind in ("keys", "values"):
        for layer in range(4):
            shares = [getattr(option.kept[layer], kind) for option in result.options]
            assert shares[0] == pytest.approx(1) and shares == sorted(shares, reverse=True) and 0 < shares[-1] < 1
    table = render_plan(result).partition("2,048 tokens")[2].splitlines()
    worst = min(kept.values for kept in result.options[3].kept)
    assert table[5].split()[0] == "1" and f"{worst:.1%}" in table[5]


def test_calibration_text_needs_the_weights(tmp_path):
    path = write_config(tmp_path / "llama", LLAMA_2_7B)
    with pytest.raises(RefusedError, match="no weights here to measure with calibration text"):
        plan(path, calibration=str(SHIPPED / "quickstart_text" / "eval.jsonl"))
