"""Recipes: every shipped one parses and says everything; every mistake is one line that names the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from headfold.convert.errors import RefusedError
from headfold.recipes.schema import SHIPPED, Recipe, load_recipe, shipped_recipes

MINIMAL: dict[str, Any] = {
    "name": "small",
    "model": "some/model",
    "convert": {"num_key_value_heads": 2},
    "uptrain": {"data": ["text.txt"], "tokens": 1000, "sequence_length": 10, "batch_rows": 2},
    "eval": {},
}


def write(folder: Path, tree: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def refusal(*arguments: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        load_recipe(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def keys_of(tree: dict[str, Any], prefix: str = "") -> set[str]:
    keys = set()
    for key, value in tree.items():
        keys.add(prefix + key)
        if isinstance(value, dict):
            keys |= keys_of(value, f"{prefix}{key}.")
    return keys


def fields_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    fields = set()
    for name, field in model.model_fields.items():
        fields.add(prefix + name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields |= fields_of(annotation, f"{prefix}{name}.")
    return fields


def test_the_shipped_recipes_are_two_demos_and_three_for_real_work() -> None:
    assert shipped_recipes() == [
        "llama2-7b-gqa8-1gpu",
        "llama2-7b-gqa8-8gpu",
        "llama2-7b-gqa8-multihost",
        "quickstart",
        "quickstart-fold",
    ]


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_parses_and_names_every_field(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    tree = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    assert fields_of(Recipe) <= keys_of(tree)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_key_of_a_shipped_recipe_is_commented(name: str) -> None:
    lines = (SHIPPED / f"{name}.yaml").read_text().splitlines()
    sections = {"convert", "uptrain", "eval"}
    keys = [line for line in lines if re.match(r"\s*[a-z_0-9]+:", line) and line.strip(" :") not in sections]
    assert len(keys) > 50
    assert [line for line in keys if "#" not in line] == []


def test_quickstart_finds_its_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart")
    assert Path(recipe.model).is_absolute() and (Path(recipe.model) / "config.json").is_file()
    assert all(Path(text).is_file() for text in [*recipe.uptrain.data, *recipe.uptrain.eval_data, *recipe.eval.text])


def test_every_path_is_looked_for_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "recipe", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("model", "tasks"):
        (folder / name).mkdir(parents=True)
    for name in ("calibration.txt", "data.txt", "eval.txt"):
        (folder / name).write_text("text")
    tree = {
        **MINIMAL,
        "model": "model",
        "convert": {"num_key_value_heads": 2, "calibration": "calibration.txt"},
        "uptrain": {**MINIMAL["uptrain"], "data": ["data.txt"], "eval_data": ["eval.txt"]},
        "eval": {"text": ["eval.txt"], "task_directory": "tasks", "tasks": ["cats"]},
    }
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(write(folder, tree))
    assert recipe.model == str(folder / "model") and recipe.eval.task_directory == str(folder / "tasks")
    assert recipe.convert.calibration == str(folder / "calibration.txt")
    assert recipe.uptrain.data == [str(folder / "data.txt")]
    assert recipe.uptrain.eval_data == recipe.eval.text == [str(folder / "eval.txt")]


def test_the_two_demos_differ_in_how_they_convert_and_in_the_learning_rate_alone() -> None:
    mean, fold = (load_recipe(name).model_dump() for name in ("quickstart", "quickstart-fold"))
    assert Path(fold["convert"].pop("calibration")).is_file()
    assert mean["convert"].pop("calibration") is None
    for recipe in (mean, fold):
        del recipe["name"], recipe["gates"], recipe["convert"]["method"], recipe["uptrain"]["learning_rate"]
    assert mean == fold


def test_quickstart_uptrains_on_the_papers_share_of_its_own_pretraining() -> None:
    import json

    summary = json.loads((SHIPPED / "quickstart" / "train_summary.json").read_text())
    uptrain = load_recipe("quickstart").uptrain
    assert uptrain.share == 0.05
    assert uptrain.pretraining_tokens == summary["num_training_tokens"]


def test_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    tree = {**MINIMAL, "uptrain": {**MINIMAL["uptrain"], "learning_rat": 1e-3}}
    message = refusal(write(tmp_path, tree))
    assert "unknown key uptrain.learning_rat;" in message and "did you mean learning_rate?" in message


def test_unknown_key_inside_a_nested_section(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, {**MINIMAL, "eval": {"decode": {"batchs": [1]}}}))
    assert "eval.decode.batchs" in message and "did you mean batches?" in message


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("- a\n- b\n", "a recipe is a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("", "a recipe is a mapping"),
        ({**MINIMAL, "convert": {"num_key_value_heads": "many"}}, "convert.num_key_value_heads"),
        ({key: value for key, value in MINIMAL.items() if key != "model"}, "the key model is missing"),
        ({**MINIMAL, "name": "../elsewhere"}, "name"),
        (
            {**MINIMAL, "convert": {"num_key_value_heads": 2, "method": "fold"}},
            "convert: method fold needs calibration",
        ),
        ({**MINIMAL, "uptrain": {"data": ["a"], "share": 0.05}}, "pretraining_tokens"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, tree: object, expected: str) -> None:
    assert expected in refusal(write(tmp_path, tree))


def test_missing_recipe_names_the_nearest_shipped_one() -> None:
    assert "Did you mean quickstart?" in refusal("quickstrat")


def test_set_changes_keys_at_any_depth(tmp_path: Path) -> None:
    overrides = ["uptrain.learning_rate=2e-3", "eval.decode.batches=[4]", "eval.text=[a.txt, b.txt]", "convert.seed=7"]
    recipe = load_recipe(write(tmp_path, MINIMAL), overrides)
    assert recipe.uptrain.learning_rate == 2e-3
    assert recipe.eval.decode is not None and recipe.eval.decode.batches == [4]
    assert recipe.eval.text == ["a.txt", "b.txt"]
    assert recipe.convert.seed == 7


@pytest.mark.parametrize("override", ["uptrain.tokens", "=3", "uptrain..tokens=3", "name.first=x", "uptrain.tokns=3"])
def test_bad_set_is_refused_by_name(tmp_path: Path, override: str) -> None:
    assert override.partition("=")[0] in refusal(write(tmp_path, MINIMAL), [override])
