"""The typed recipe: what to convert, how to train it, what to measure.

A recipe is a YAML file, or the bare name of one that ships with Headfold. Each stage owns its settings; this module
composes them, finds files and turns every mistake into one line that names the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headfold.convert.errors import RefusedError
from headfold.convert.settings import ConvertSettings
from headfold.eval.settings import EvalSettings
from headfold.uptrain.settings import UptrainSettings

SHIPPED = Path(__file__).parent

Settings = TypeVar("Settings", bound=BaseModel)


class Gates(BaseModel):
    """What the result must reach; `headfold run` ends with exit code 1 where it does not."""

    model_config = ConfigDict(extra="forbid")

    min_recovered_share: float | None = Field(
        default=None,
        description="Least share of the loss (nats) lost in converting that uptraining wins back. Default: none.",
    )
    max_perplexity_ratio: float | None = Field(
        default=None, gt=0, description="Highest allowed perplexity after / before. Default: none."
    )


class Recipe(BaseModel):
    """One run: convert, uptrain, evaluate, report."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run's default directory, runs/<name>."
    )
    model: str = Field(description="The MHA checkpoint: a local directory or a hub name.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub name. Default: its main branch.")
    convert: ConvertSettings
    uptrain: UptrainSettings
    eval: EvalSettings
    gates: Gates = Field(Gates(), description="What the result must reach. Default: nothing.")


def shipped_recipes() -> list[str]:
    """The bare names of the recipes that ship with Headfold."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe.

    recipe: a YAML file or the bare name of a shipped one. overrides: `key.path=value`, each value read as YAML.
    Files and directories that the recipe names are looked for beside the recipe, then in the working directory.
    Raises RefusedError with the key and, for an unknown key, the nearest known one.
    """
    path = _find(recipe)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path}: cannot be read as a recipe ({error}).") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RefusedError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise RefusedError(f"{path}: a recipe is a mapping of keys, found {type(tree).__name__}.")
    for override in overrides:
        _apply(tree, override)
    return _resolve_files(validated(Recipe, tree, str(path)), path.parent)


def validated(model: type[Settings], values: Mapping[str, Any], source: str = "") -> Settings:
    """`values` as a model of settings. Raises RefusedError with the first mistake, after the name of its source."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        prefix = f"{source}: " if source else ""
        raise RefusedError(prefix + _first_line(error, model)) from error


def _find(recipe: str | Path) -> Path:
    path = Path(recipe)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{recipe}.yaml"
    if path.name == str(recipe) and shipped.is_file():
        return shipped
    names = shipped_recipes()
    near = difflib.get_close_matches(str(recipe), names, n=1)
    hint = f" Did you mean {near[0]}?" if near else f" Shipped recipes: {', '.join(names)}."
    raise RefusedError(f"{recipe}: no such recipe file, and no shipped recipe of that name.{hint}")


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets one `key.path=value` in the tree."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RefusedError(f"--set {override}: expected key.path=value, for example uptrain.learning_rate=1e-3.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RefusedError(f"--set {override}: the value is not valid YAML.") from error
    node = tree
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise RefusedError(f"--set {override}: {'.'.join(parts[: depth + 1])} is a value, not a section.")
    node[parts[-1]] = value


def _first_line(error: ValidationError, model: type[BaseModel]) -> str:
    """The first mistake in one line, the number of the others, and for an unknown key the nearest known one."""
    details = error.errors(include_url=False)
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.0)
        line = f"unknown key {location}; did you mean {near[0]}? Known here: {', '.join(known)}."
    elif first["type"] == "missing":
        line = f"the key {location} is missing."
    else:
        where = f"{location}: " if location else ""
        line = where + first["msg"].removeprefix("Value error, ")
        if not isinstance(first["input"], dict):
            found = repr(first["input"])
            line += f", found {found if len(found) <= 80 else found[:77] + '...'}"
    more = len(details) - 1
    return line + (f" ({more} more mistake{'s' if more > 1 else ''} behind this one.)" if more else "")


def _known_keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of the section of `model` at `location`."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _section_type(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if found := _section_type(argument):
            return found
    return None


def _resolve_files(recipe: Recipe, folder: Path) -> Recipe:
    """Makes every name that exists beside the recipe an absolute path, so that a recipe works from any folder."""

    def resolved(name: str) -> str:
        beside = folder / name
        return str(beside.resolve()) if name and beside.exists() else name

    def resolved_all(names: list[str]) -> list[str]:
        return [resolved(name) for name in names]

    uptrain = recipe.uptrain.model_copy(
        update={"data": resolved_all(recipe.uptrain.data), "eval_data": resolved_all(recipe.uptrain.eval_data)}
    )
    convert = recipe.convert.model_copy(
        update={"calibration": resolved(recipe.convert.calibration) if recipe.convert.calibration else None}
    )
    evaluation = recipe.eval.model_copy(
        update={
            "text": resolved_all(recipe.eval.text),
            "task_directory": resolved(recipe.eval.task_directory) if recipe.eval.task_directory else None,
        }
    )
    return recipe.model_copy(
        update={"model": resolved(recipe.model), "convert": convert, "uptrain": uptrain, "eval": evaluation}
    )
