"""Re-maps: GPT-NeoX and GPT-J as Phi, GPT-2 and OPT as GPTBigCode: the same logits, then fewer KV heads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headfold.convert import convert_checkpoint
from headfold.convert.check import check_checkpoint
from headfold.convert.errors import RefusedError


def neox(**overrides):
    from transformers import GPTNeoXConfig

    settings: dict = {"hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40}
    settings |= {"vocab_size": 61, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    return GPTNeoXConfig(**{**settings, **overrides})


def gptj(**overrides):
    from transformers import GPTJConfig

    settings = {"n_embd": 72, "n_layer": 2, "n_head": 6, "rotary_dim": 8, "vocab_size": 61, "n_positions": 64}
    return GPTJConfig(**{**settings, "bos_token_id": 1, "eos_token_id": 2, **overrides})


CONFIGS = {"neox": neox, "gptj": gptj}


@pytest.mark.parametrize("family", CONFIGS)
def test_a13_re_mapped_to_phi_with_the_same_logits(tiny, tmp_path, family):
    model = tiny.tiny_model(CONFIGS[family]())
    tiny.save(model, tmp_path / "in")
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=6)
    assert report.model_type == "phi" and report.remapped_from == model.config.model_type
    phi = tiny.load(tmp_path / "out")
    assert type(phi).__name__ == "PhiForCausalLM"
    wanted = tiny.logits(model)
    assert (tiny.logits(phi) - wanted).abs().max() < 2e-5 * wanted.abs().max()
    exact = (tiny.logits(phi.double()) - tiny.logits(model.double())).abs().max()
    assert exact < 5e-6 * wanted.abs().max()  # float32 rounding of the folded weights


@pytest.mark.parametrize("family", CONFIGS)
def test_a13_planted_solution_after_the_re_map(tiny, tmp_path, family):
    """Heads 3g .. 3g + 2 are made alike in the source's own layout; then merging them changes nothing."""
    model = tiny.tiny_model(CONFIGS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query_key_value" in name:
                heads = parameter.unflatten(0, (6, 3, 12))
                heads[:, 1:] = heads[[0, 0, 0, 3, 3, 3], 1:]
            elif "attn.k_proj" in name or "attn.v_proj" in name:
                heads = parameter.unflatten(0, (6, 12))
                heads[:] = heads[[0, 0, 0, 3, 3, 3]]
    tiny.save(model, tmp_path / "in")
    wanted = tiny.logits(model)
    for method in ("mean", "first"):
        convert_checkpoint(tmp_path / "in", tmp_path / method, num_key_value_heads=2, method=method)
        assert check_checkpoint(tmp_path / method) == []
        converted = tiny.load(tmp_path / method)
        assert (tiny.logits(converted) - wanted).abs().max() < 2e-5 * wanted.abs().max()
        assert 3 * tiny.cached_bytes(converted) == tiny.cached_bytes(model)


@pytest.mark.parametrize("overrides", [{"attention_bias": False}, {"tie_word_embeddings": True}])
def test_variants_of_neox(tiny, tmp_path, overrides):
    model = tiny.tiny_model(neox(**overrides))
    tiny.save(model, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=6)
    wanted = tiny.logits(model)
    assert (tiny.logits(tiny.load(tmp_path / "out")) - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", CONFIGS)
def test_stored_dtype_shards_bin_files_and_blocks(tiny, tmp_path, monkeypatch, family):
    model = tiny.tiny_model(CONFIGS[family](), torch.bfloat16)
    tiny.save(model, tmp_path / "one")
    tiny.save(model, tmp_path / "many", max_shard_size="40KB")
    (tmp_path / "bin").mkdir()
    torch.save(load_file(tmp_path / "one" / "model.safetensors"), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    results = []
    for name in ("one", "many", "bin"):
        if name == "many":
            monkeypatch.setattr("headfold.convert.checkpoint.BLOCK_BYTES", 700)
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}_out", num_key_value_heads=3)
        results.append(tiny.load(tmp_path / f"{name}_out", torch.bfloat16).state_dict())
    for name, tensor in results[0].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, results[1][name]) and torch.equal(tensor, results[2][name]), name
    assert len(list((tmp_path / "many_out").glob("model-*.safetensors"))) > 2


def test_old_configs_and_names(tiny, tmp_path):
    """As Pythia's files have them: rotary_pct, rotary_emb_base, embed_out, and buffers of attention masks."""
    model = tiny.tiny_model(neox())
    tiny.save(model, tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["rope_parameters"]
    config.update(rotary_pct=0.5, rotary_emb_base=500, torch_dtype=config.pop("dtype"), model_card="kept")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    assert "embed_out.weight" in tensors
    for layer in range(2):
        attention = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{attention}.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
        tensors[f"{attention}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{attention}.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    assert check_checkpoint(tmp_path / "in") == []
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=6)
    wanted = tiny.logits(model)
    assert (tiny.logits(tiny.load(tmp_path / "out")) - wanted).abs().max() < 2e-5 * wanted.abs().max()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == 500 and written["partial_rotary_factor"] == 0.5 and written["model_card"] == "kept"
    assert not {"rotary_pct", "rotary_emb_base", "use_parallel_residual"} & written.keys()
    record = json.loads((tmp_path / "out" / "headfold.json").read_text())
    assert record["source"]["model_type"] == "gpt_neox"


def test_what_has_no_exact_counterpart_is_refused(tiny, tmp_path):
    tiny.save(tiny.tiny_model(neox(use_parallel_residual=False)), tmp_path / "sequential")
    with pytest.raises(RefusedError, match="use_parallel_residual is false"):
        convert_checkpoint(tmp_path / "sequential", tmp_path / "out", num_key_value_heads=2)
    path = tiny.save(tiny.tiny_model(neox()), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    for change, message in [
        ({"gpt_neox.layers.0.attention.extra": torch.ones(1)}, "is a tensor that is not known"),
        (
            {"gpt_neox.layers.1.attention.query_key_value.weight": torch.ones(72, 72)},
            r"should have the shape \[216, 72\]",
        ),
        ({"gpt_neox.layers.1.input_layernorm.bias": torch.ones(71)}, r"should have the shape \[72\]"),
        ({"gpt_neox.layers.1.post_attention_layernorm.bias": None}, "is missing"),
    ]:
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RefusedError, match=message) as caught:
            convert_checkpoint(path, tmp_path / "out", num_key_value_heads=2)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_folding_that_overflows_is_an_error(tiny, tmp_path):
    path = tiny.save(tiny.tiny_model(neox(), torch.float16), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    tensors["gpt_neox.layers.0.input_layernorm.weight"] += 60000
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] *= 100
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"is not finite in F16 after the re-map"):
        convert_checkpoint(path, tmp_path / "out", num_key_value_heads=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("family", CONFIGS)
def test_plan_knows_re_mapped_models(tiny, tmp_path, family):
    from headfold.recipes.plan import plan

    tiny.save(tiny.tiny_model(CONFIGS[family]()), tmp_path)
    stored = plan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    empty = plan(tmp_path)
    assert [option.num_key_value_heads for option in stored.options] == [6, 3, 2, 1]
    assert stored.options == empty.options and stored.num_parameters == empty.num_parameters


def calibration_windows(monkeypatch) -> None:
    windows = torch.randint(3, 61, (24, 40), generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr("headfold.convert.windows.read_windows", lambda *_, **__: windows)


@pytest.mark.parametrize(
    "config", [neox(), gptj(), neox(attention_bias=False), neox(tie_word_embeddings=True)], ids=lambda c: c.model_type
)
def test_calibration_goes_through_the_re_mapped_model(tiny, tmp_path, monkeypatch, config):
    """In one step what two give, the exact re-map first; and the plan measures the same shares."""
    from headfold.recipes.plan import plan

    calibration_windows(monkeypatch)
    text = str(tiny.save(tiny.tiny_model(config), tmp_path / "in"))
    once = convert_checkpoint(tmp_path / "in", tmp_path / "once", num_key_value_heads=2, calibration=text)
    assert once.method == "fold" and once.remapped_from == config.model_type
    convert_checkpoint(tmp_path / "in", tmp_path / "phi", num_key_value_heads=6)
    convert_checkpoint(tmp_path / "phi", tmp_path / "twice", num_key_value_heads=2, calibration=text)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert check_checkpoint(tmp_path / "once") == []
    kept = [option.kept for option in plan(tmp_path / "in", calibration=text).options]
    assert kept == [option.kept for option in plan(tmp_path / "phi", calibration=text).options] and None not in kept


# -------------------------------------------------------------------------------------- GPT-2, OPT, GPTBigCode, Falcon


def gpt2(**overrides):
    from transformers import GPT2Config

    settings = {"n_embd": 72, "n_layer": 2, "n_head": 6, "vocab_size": 61, "n_positions": 64, "n_inner": 40}
    return GPT2Config(**{**settings, "bos_token_id": 1, "eos_token_id": 2, **overrides})


def bigcode(**overrides):
    from transformers import GPTBigCodeConfig

    settings = {"n_embd": 72, "n_layer": 2, "n_head": 6, "vocab_size": 61, "n_positions": 64, "n_inner": 40}
    return GPTBigCodeConfig(**{**settings, "bos_token_id": 1, "eos_token_id": 2, "multi_query": False, **overrides})


def opt(**overrides):
    from transformers import OPTConfig

    settings = {"hidden_size": 72, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 61}
    settings |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return OPTConfig(**{**settings, **overrides})


def falcon(**overrides):
    """As falcon-rw-1b: a KV head for every query head, ALiBi, biases, attention before the MLP."""
    from transformers import FalconConfig

    settings: dict = {"hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_hidden_size": 40}
    settings |= {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "bias": True, "max_position_embeddings": 64}
    return FalconConfig(**{**settings, "multi_query": False, "alibi": True, "parallel_attn": False, **overrides})


def falcon_with_rotary(**overrides):
    return falcon(**{"alibi": False, "parallel_attn": True, "bias": False, **overrides})


def galactica(**overrides):
    """OPT without biases and without weights in its norms, as Galactica has it."""
    return opt(enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu", **overrides)


TO_ONE_HEAD = [gpt2, bigcode, opt, galactica, falcon, falcon_with_rotary]


def make_heads_alike(model) -> None:
    """All K heads of a layer become its first one, and all V heads, each in the layout of the model's own class."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn.k_proj" in name or "self_attn.v_proj" in name:  # OPT
                heads = parameter.unflatten(0, (6, 12))
                heads[:] = heads[:1].clone()
            elif "c_attn" in name and model.config.model_type == "gpt2":  # columns: blocks of q, k, v
                blocks = parameter.unflatten(-1, (3, 6, 12))
                blocks[..., 1:, :, :] = blocks[..., 1:, :1, :]
            elif "c_attn" in name or "query_key_value" in name:  # rows: [q k v] of each head
                heads = parameter.unflatten(0, (6, 3, 12))
                heads[:, 1:] = heads[:1, 1:]


@pytest.mark.parametrize("config", TO_ONE_HEAD)
def test_a13_to_one_kv_head(tiny, tmp_path, config):
    model = tiny.tiny_model(config())
    make_heads_alike(model)
    tiny.save(model, tmp_path / "in")
    assert check_checkpoint(tmp_path / "in") == []
    wanted = tiny.logits(model)
    for method in ("mean", "first"):
        convert_checkpoint(tmp_path / "in", tmp_path / method, num_key_value_heads=1, method=method)
        assert check_checkpoint(tmp_path / method) == []
        converted = tiny.load(tmp_path / method)
        wanted_class = "FalconForCausalLM" if "falcon" in config.__name__ else "GPTBigCodeForCausalLM"
        assert type(converted).__name__ == wanted_class and converted.config.multi_query
        assert (tiny.logits(converted) - wanted).abs().max() < 2e-5 * wanted.abs().max()
        assert 6 * tiny.cached_bytes(converted) == tiny.cached_bytes(model)


@pytest.mark.parametrize("config", TO_ONE_HEAD)
@pytest.mark.parametrize("count", [2, 6, 12])
def test_one_kv_head_or_all(tiny, tmp_path, config, count):
    tiny.save(tiny.tiny_model(config()), tmp_path / "in")
    with pytest.raises(RefusedError, match=rf"{count} KV heads per layer are not possible: .*; possible are 1$"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=count)


def test_gpt2_as_the_hub_has_it(tiny, tmp_path):
    """Names without `transformer.`, mask buffers, and a config with fields that GPTBigCode does not have."""
    model = tiny.tiny_model(gpt2())
    make_heads_alike(model)
    tiny.save(model, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config.update(n_ctx=64, summary_type="cls_index", task_specific_params={"x": 1})
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=1)
    wanted = tiny.logits(model)
    assert (tiny.logits(tiny.load(tmp_path / "out")) - wanted).abs().max() < 2e-5 * wanted.abs().max()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        written["task_specific_params"] == {"x": 1} and "n_ctx" not in written and written["num_key_value_heads"] == 1
    )


@pytest.mark.parametrize("config", [bigcode, falcon_with_rotary])
def test_with_multi_query_it_is_the_identity(tiny, tmp_path, config):
    model = tiny.tiny_model(config(multi_query=True))
    tiny.save(model, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=1)
    assert torch.equal(tiny.logits(tiny.load(tmp_path / "out")), tiny.logits(model))


def test_gpt2_that_gptbigcode_cannot_express_is_refused(tiny, tmp_path):
    for field in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        path = tiny.save(tiny.tiny_model(gpt2(**{field: True})), tmp_path / field)
        with pytest.raises(RefusedError, match=f"{field} is set"):
            convert_checkpoint(path, tmp_path / "out", num_key_value_heads=1)


@pytest.mark.parametrize("config", [opt, falcon])
def test_mean_of_heads_that_differ_and_stored_dtype(tiny, tmp_path, monkeypatch, config):
    """In bfloat16, from shards, in small blocks: the K and V rows of the result are the means, q's are as they were."""
    model = tiny.tiny_model(config(), torch.bfloat16)
    tiny.save(model, tmp_path / "one")
    tiny.save(model, tmp_path / "many", max_shard_size="20KB")
    convert_checkpoint(tmp_path / "one", tmp_path / "one_out", num_key_value_heads=1)
    monkeypatch.setattr("headfold.convert.checkpoint.BLOCK_BYTES", 700)
    convert_checkpoint(tmp_path / "many", tmp_path / "many_out", num_key_value_heads=1)
    state = tiny.load(tmp_path / "one_out", torch.bfloat16).state_dict()
    other = tiny.load(tmp_path / "many_out", torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    old = model.state_dict()
    if config is opt:
        q, k, v = (old[f"model.decoder.layers.1.self_attn.{name}_proj.weight"].unflatten(0, (6, 12)) for name in "qkv")
        fused = state["transformer.h.1.attn.c_attn.weight"]
    else:
        name = "transformer.h.1.self_attention.query_key_value.weight"
        q, k, v = old[name].unflatten(0, (6, 3, 12)).unbind(1)
        fused = state[name]
    wanted = torch.cat([q.flatten(0, 1), *(heads.float().mean(0).bfloat16() for heads in (k, v))])
    assert torch.equal(fused, wanted)


def test_opt_as_the_hub_has_it(tiny, tmp_path):
    """Names that begin with `decoder.`, and positions beyond the first two tokens' worth of padding."""
    model = tiny.tiny_model(opt())
    make_heads_alike(model)
    tiny.save(model, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config.update(prefix="</s>", kept_key=[1])
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=1)
    wanted = tiny.logits(model)
    converted = tiny.load(tmp_path / "out")
    assert (tiny.logits(converted) - wanted).abs().max() < 2e-5 * wanted.abs().max()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["prefix"] == "</s>" and written["kept_key"] == [1] and written["n_positions"] == 64
    assert not {"do_layer_norm_before", "ffn_dim", "hidden_size", "word_embed_proj_dim"} & written.keys()
    prompt = torch.tensor([[5, 6, 7, 8]])
    wanted_tokens = model.generate(prompt, max_new_tokens=20, do_sample=False, min_new_tokens=20)
    assert torch.equal(converted.generate(prompt, max_new_tokens=20, do_sample=False, min_new_tokens=20), wanted_tokens)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (opt, {"do_layer_norm_before": False}, "do_layer_norm_before is false"),
        (opt, {"word_embed_proj_dim": 24}, "word_embed_proj_dim is not hidden_size"),
        (opt, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is true"),
        (falcon, {"new_decoder_architecture": True, "alibi": False, "num_kv_heads": 2}, "caches every query head"),
    ],
)
def test_opt_and_falcon_that_cannot_be_converted_are_refused(tiny, tmp_path, config, overrides, message):
    path = tiny.save(tiny.tiny_model(config(**overrides)), tmp_path / "in")
    with pytest.raises(RefusedError, match=message):
        convert_checkpoint(path, tmp_path / "out", num_key_value_heads=1)


def test_falcon_of_the_new_decoder_really_caches_every_head(tiny):
    """Why it is refused: two KV heads in the weights, six in the cache."""
    settings = {"new_decoder_architecture": True, "alibi": False, "parallel_attn": True}
    few, all_heads = (tiny.tiny_model(falcon(**settings, num_kv_heads=count)) for count in (2, 6))
    assert tiny.cached_bytes(few) == tiny.cached_bytes(all_heads)


@pytest.mark.parametrize("config", TO_ONE_HEAD)
def test_plan_knows_one_or_all(tiny, tmp_path, config):
    from headfold.recipes.plan import plan

    tiny.save(tiny.tiny_model(config()), tmp_path)
    stored = plan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    empty = plan(tmp_path)
    assert [option.num_key_value_heads for option in stored.options] == [6, 1]
    assert stored.options == empty.options


@pytest.mark.parametrize("config", [*CONFIGS.values(), *TO_ONE_HEAD])
def test_a22_no_value_in_a_config_is_more_than_refused(tiny, tmp_path, config):
    tiny.refuses_hostile_configs(tiny.save(tiny.tiny_model(config()), tmp_path / "in"))


@pytest.mark.parametrize("config", [*CONFIGS.values(), *TO_ONE_HEAD])
def test_a14_names_of_quantised_weights_are_called_so(tiny, tmp_path, config):
    """As old checkpoints of AutoGPTQ have them, whose config.json says nothing of it."""
    path = tiny.save(tiny.tiny_model(config()), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    ends = (".c_attn.weight", "query_key_value.weight", "q_proj.weight")
    name = next(name for name in tensors if name.endswith(ends))
    tensors[name.removesuffix("weight") + "qweight"] = tensors.pop(name).to(torch.int32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"the weights are quantised \(.*qweight\)"):
        convert_checkpoint(path, tmp_path / "out", num_key_value_heads=1)


@pytest.mark.parametrize(("key", "value"), [("head_dim", 24), ("per_layer_config", {"0": {"head_dim": 24}})])
@pytest.mark.parametrize("config", [*CONFIGS.values(), *TO_ONE_HEAD])
def test_what_the_source_does_not_heed_is_not_heeded_in_the_target(tiny, tmp_path, config, key, value):
    path = tiny.save(tiny.tiny_model(config()), tmp_path / "in")
    written = json.loads((path / "config.json").read_text())
    convert_checkpoint(path, tmp_path / "plain", num_key_value_heads=1)
    (path / "config.json").write_text(json.dumps({**written, key: value}))
    convert_checkpoint(path, tmp_path / "out", num_key_value_heads=1)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "out")]
    assert configs[0] == configs[1]


def test_a22_opt_without_positions(tiny, tmp_path):
    path = tiny.save(tiny.tiny_model(opt()), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    tensors["model.decoder.embed_positions.weight"] = torch.ones(1, 72)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="has no rows but those that no token has"):
        convert_checkpoint(path, tmp_path / "out", num_key_value_heads=1)


@pytest.mark.parametrize("config", [gpt2, opt, bigcode, falcon], ids=["gpt2", "opt", "bigcode", "falcon"])
@pytest.mark.parametrize("method", ["fold", "aligned"])
def test_models_that_become_multi_query_are_not_calibrated(tiny, tmp_path, monkeypatch, config, method):
    calibration_windows(monkeypatch)
    tiny.save(tiny.tiny_model(config()), tmp_path / "in")
    with pytest.raises(RefusedError, match=r"are not called layers\.N"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=1, calibration="x", method=method)
    assert not (tmp_path / "out").exists()


def test_a_re_mapped_checkpoint_that_is_not_its_class_s_is_not_calibrated(tiny, tmp_path, monkeypatch):
    """Where transformers would have to load it by itself it would load the model that it was re-mapped from."""
    calibration_windows(monkeypatch)
    tiny.save(tiny.tiny_model(neox()), tmp_path / "in")
    monkeypatch.setattr("headfold.convert.walk._stored_names", lambda *_: None)
    with pytest.raises(RefusedError, match="its tensors are not those of PhiForCausalLM"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", num_key_value_heads=2, calibration=str(tmp_path))
    assert not (tmp_path / "out").exists()
