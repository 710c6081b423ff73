"""evaluate() from checkpoints to report.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.eval import evaluate, refuse_report_directory, write_report
from headfold.eval.measure import _name
from headfold.eval.schema import Report, read_report
from headfold.eval.settings import EvalSettings

from .conftest import make_model, make_tokenizer

Save = Callable[..., Path]
QUICK_DECODE = {"batches": [1, 2], "contexts": [8, 16], "new_tokens": 2, "repetitions": 1, "ladder_sequences": 4}


@pytest.fixture
def stages(save: Save) -> list[Path]:
    """An MHA model, its conversion and what uptraining made of it: the weights go half of the way back."""
    before = make_model(4, seed=3)
    converted, after = make_model(2, seed=3), make_model(2, seed=3)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    record = {"method": "mean", "grouping": "adjacent"}
    return [
        save("mha", before),
        save("converted", converted, record=record),
        save("uptrained", after, record={**record, "uptrain": {"tokens": 4096}}),
    ]


def test_report_has_every_part(stages: list[Path], text: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "tokens": 0, "eval_loss": 5.0}, {"step": 1, "tokens": 512, "loss": 4.5}]
    lines += [{"step": 8, "tokens": 4096, "eval_loss": 4.2}, {"step": 8, "tokens": 4096, "eval_loss": 4.1}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"tokens": 99')
    seen: list[tuple[str, int, int]] = []
    settings = EvalSettings.model_validate(
        {"text": [str(text)], "window": 32, "max_text_tokens": 3000, "decode": QUICK_DECODE, "bootstrap_samples": 100}
    )
    report = evaluate(
        stages[0], stages[1:], settings, training_metrics=metrics, progress=lambda *what: seen.append(what)
    )

    write_report(report, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["schema_version"] == 1
    perplexity = data["perplexity"]
    assert all(isinstance(perplexity[role], float) for role in ("before", "converted", "after"))
    loss = {role: math.log(perplexity[role]) for role in ("before", "converted", "after")}
    share = (loss["converted"] - loss["after"]) / (loss["converted"] - loss["before"])
    assert data["recovered_share"] == (pytest.approx(share) if loss["converted"] > loss["before"] else None)
    # K and V of 2 layers, 4 or 2 heads of 12, stored in float32.
    assert data["cache_bytes_per_token"]["before"] == 2 * 2 * 4 * 12 * 4
    assert data["cache_bytes_per_token"]["after"] == 2 * 2 * 2 * 12 * 4
    for point in data["decode"]:
        for side in ("before", "after"):
            assert {"time_to_first_token_s", "time_per_output_token_s", "tokens_per_second"} <= point[side].keys()
            assert {"median", "p90", "p99"} <= point[side]["time_per_output_token_s"].keys()
    assert [(point["context"], point["batch"]) for point in data["decode"]] == [(8, 1), (8, 2), (16, 1), (16, 2)]
    assert [rung["sequences"] for rung in data["ladder"]["rungs"]] == [1, 2, 4]
    conditions = data["conditions"]
    assert (conditions["device"], conditions["dtype"]) == ("cpu", "float32")
    assert (conditions["window"], conditions["stride"], conditions["bos"]) == (32, 32, "document")
    assert len(conditions["text_sha256"]) == 64 and {"torch", "transformers"} <= conditions["versions"].keys()
    assert [model["role"] for model in data["models"]] == ["before", "converted", "after"]
    assert [model["num_key_value_heads"] for model in data["models"]] == [4, 2, 2]
    assert (data["models"][2]["method"], data["models"][2]["uptraining_tokens"]) == ("mean", 4096)
    assert [each["role"] for each in data["divergence"]] == ["converted", "after"]
    assert data["training"] == [{"tokens": 0, "eval_loss": 5.0}, {"tokens": 4096, "eval_loss": 4.1}]
    assert {stage for stage, _, _ in seen} == {"perplexity", "decode", "concurrent sequences"}
    assert all(0 <= done <= total for _, done, total in seen)
    assert read_report(tmp_path / "out" / "report.json") == report


def test_models_one_at_a_time_give_the_same_perplexity(stages: list[Path], text: Path) -> None:
    given = {"text": [str(text)], "max_text_tokens": 1500, "decode": None, "bootstrap_samples": 100}
    together = evaluate(stages[0], stages[1:], EvalSettings.model_validate(given))
    apart = evaluate(stages[0], stages[1:], EvalSettings.model_validate({**given, "divergence": False}))
    assert together.perplexity == apart.perplexity
    assert apart.divergence == [] and apart.decode == [] and apart.ladder is None


def test_a_single_conversion_is_converted_and_after(stages: list[Path], text: Path) -> None:
    settings = EvalSettings(text=[str(text)], max_text_tokens=500, decode=None, bootstrap_samples=100)
    report = evaluate(stages[0], stages[1:2], settings)
    assert report.perplexity is not None
    assert report.perplexity.converted == report.perplexity.after != report.perplexity.before
    assert report.recovered_share is None
    trained = evaluate(stages[0], stages[2:], settings)
    assert trained.perplexity is not None and trained.perplexity.converted is None


def test_a_model_compared_with_itself_changed_nothing(stages: list[Path], text: Path) -> None:
    settings = EvalSettings(text=[str(text)], max_text_tokens=1000, decode=None, bootstrap_samples=100)
    report = evaluate(stages[0], [stages[0]], settings)
    assert report.perplexity is not None and report.perplexity.changes[0].ratio.value == 1.0
    assert report.divergence[0].mean_kl == 0 and report.divergence[0].top_token_agreement == 1
    assert "not to be told from the original's" in report.verdict


def test_decode_alone_needs_no_text_and_no_tokenizer(stages: list[Path]) -> None:
    for stage in stages:
        (stage / "tokenizer.json").unlink()
    report = evaluate(stages[0], stages[1:], EvalSettings.model_validate({"decode": QUICK_DECODE}))
    assert report.perplexity is None and report.recovered_share is None
    assert len(report.decode) == 4 and report.conditions.window is None


def test_nothing_to_measure_is_refused(stages: list[Path]) -> None:
    with pytest.raises(RefusedError, match="nothing to measure"):
        evaluate(stages[0], stages[1:], EvalSettings(decode=None))
    with pytest.raises(RefusedError, match="at least one checkpoint"):
        evaluate(stages[0], [], EvalSettings())


def test_c3_unlike_sides_are_refused_before_anything_is_measured(save: Save, text: Path) -> None:
    settings = EvalSettings(text=[str(text)], decode=None)
    before = save("before", make_model(4))
    other_tokenizer = save("tokens", make_model(2), make_tokenizer(num_merges=30))
    with pytest.raises(RefusedError, match="tokenise the text differently"):
        evaluate(before, [other_tokenizer], settings)
    other_vocabulary = save("vocabulary", make_model(2, vocab_size=321))
    with pytest.raises(RefusedError, match=r"vocabulary of 321 tokens, that of .*before has 320"):
        evaluate(before, [other_vocabulary], settings)
    with pytest.raises(RefusedError, match="not stages of one conversion"):
        evaluate(before, [save("two", make_model(2)), save("one", make_model(1))], settings)


def test_c7_a_damaged_model_fails_and_leaves_no_report(stages: list[Path], text: Path) -> None:
    broken = make_model(2)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    broken.save_pretrained(stages[2])
    with pytest.raises(HeadfoldError, match="uptrained: log-likelihood of document") as caught:
        evaluate(stages[0], stages[1:], EvalSettings(text=[str(text)], decode=None))
    assert caught.value.exit_code == 1


def test_weights_that_transformers_would_make_up_are_refused(stages: list[Path], text: Path) -> None:
    """transformers fills missing tensors with random numbers and only warns."""
    config = json.loads((stages[1] / "config.json").read_text())
    (stages[1] / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(HeadfoldError):
        evaluate(stages[0], stages[1:2], EvalSettings(text=[str(text)], decode=None))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attribute_map": {"hidden_size": "x"}}, "transformers cannot (read its config|load this model)"),
        ({"rope_parameters": []}, "transformers cannot (read its config|load this model)"),
        ({"hidden_act": {}}, "transformers cannot (read its config|load this model)"),
    ],
)
def test_a_config_that_transformers_fails_on_is_refused(
    stages: list[Path], text: Path, config: dict[str, object], message: str
) -> None:
    written = json.loads((stages[1] / "config.json").read_text())
    (stages[1] / "config.json").write_text(json.dumps({**written, **config}))
    with pytest.raises(RefusedError, match=message) as caught:
        evaluate(stages[0], stages[1:2], EvalSettings(text=[str(text)], decode=None, device="cpu"))
    assert str(caught.value).isprintable()


def test_a_record_that_leads_outside_is_not_read(stages: list[Path], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"method": "secret"}')
    (stages[1] / "headfold.json").unlink(missing_ok=True)
    (stages[1] / "headfold.json").symlink_to(tmp_path / "secret")
    with pytest.raises(RefusedError, match="outside the checkpoint"):
        evaluate(stages[0], stages[1:2], EvalSettings(device="cpu"))


def test_a_tokenizer_of_another_model_is_refused(save: Save, text: Path) -> None:
    models = [save(name, make_model(heads, vocab_size=300)) for name, heads in (("before", 4), ("after", 2))]
    with pytest.raises(RefusedError, match=r"gives token 3\d\d, its vocabulary has 300"):
        evaluate(models[0], models[1:], EvalSettings(text=[str(text)], decode=None))


def test_settings_that_this_machine_cannot_serve_are_refused(stages: list[Path]) -> None:
    with pytest.raises(RefusedError, match=r"device 'cuda:99' cannot be used here|device 'nonsense'"):
        evaluate(stages[0], stages[1:], EvalSettings(device="cuda:99"))
    with pytest.raises(RefusedError, match="device 'nonsense' cannot be used here"):
        evaluate(stages[0], stages[1:], EvalSettings(device="nonsense"))
    crowded = EvalSettings.model_validate({"decode": {"new_tokens": 64}})
    with pytest.raises(RefusedError, match="leave no room for a context"):
        evaluate(stages[0], stages[1:], crowded)


def test_a_context_that_was_cut_is_noted(stages: list[Path]) -> None:
    decode = {**QUICK_DECODE, "contexts": [8, 4096], "ladder_sequences": 0}
    report = evaluate(stages[0], stages[1:], EvalSettings.model_validate({"decode": decode}))
    assert {point.context for point in report.decode} == {8, 62}
    assert report.notes == ["Decode contexts of 4,096 tokens were cut to 62: the model has 64 positions."]


@pytest.mark.parametrize("engine", ["headfold", "transformers"])
def test_engines(stages: list[Path], engine: str) -> None:
    """Both engines measure, on caches of the same size."""
    settings = EvalSettings.model_validate({"decode": QUICK_DECODE, "engine": engine})
    report = evaluate(stages[0], stages[1:], settings)
    assert report.conditions.attention == {"headfold": "headfold", "transformers": "sdpa"}[engine]
    assert [point.before.cache_bytes for point in report.decode] == [7680, 15360, 13824, 27648]


def test_a_class_without_sdpa_is_measured_as_transformers_loads_it(save: Save, text: Path) -> None:
    config = transformers.Gemma2Config(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=16,
    )  # fmt: skip
    path = save("gemma2", transformers.Gemma2ForCausalLM(config))
    report = evaluate(path, [path], EvalSettings(text=[str(text)], decode=None))
    assert report.conditions.attention == "eager"
    assert report.perplexity is not None and report.perplexity.after == report.perplexity.before


def test_a_report_is_not_measured_for_a_place_that_cannot_take_it(stages: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "model_card.md").write_text("")
    (tmp_path / "foreign" / "report.json").write_text('{"mine": 1}')
    for place, message in (
        ("file", "cannot be written there: Not a directory"),
        ("file/below", "cannot be written there: Not a directory"),
        ("n" * 300, "cannot be written there: File name too long"),
        ("foreign", "its report.json would be replaced"),
        ("cards", "its model_card.md would be replaced"),
        (stages[0], "holds a checkpoint"),
    ):
        with pytest.raises(RefusedError, match=message):
            refuse_report_directory(tmp_path / place)
    refuse_report_directory(tmp_path / "new" / ".." / "directory")
    assert not (tmp_path / "new").exists()
    report = evaluate(stages[0], stages[1:], EvalSettings.model_validate({"decode": QUICK_DECODE}))
    write_report(report, tmp_path / "eval")
    refuse_report_directory(tmp_path / "eval")


def test_names_of_models(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--Some-7B" / "snapshots" / "0123abcd"
    assert _name(snapshot) == "someone/Some-7B"
    assert _name(tmp_path / "my-model") == "my-model"


def test_a_foreign_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(RefusedError, match="cannot be read"):
        read_report(path)
    path.write_text('{"schema_version": 99}')
    with pytest.raises(RefusedError, match="not a report of schema version 1"):
        read_report(path)


def test_a_report_cannot_hold_nan() -> None:
    schema = Report.model_json_schema()
    assert schema["properties"]["schema_version"]["const"] == 1
    with pytest.raises(ValueError, match="finite"):
        Report.model_fields["perplexity"].annotation.__args__[0].model_validate({"before": math.nan})
