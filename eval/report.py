"""Renders a report: one HTML page, Markdown, and a model card. Measures nothing.

Everything that is shown is computed from report.json; the templates only arrange it.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

import jinja2
import yaml
from markupsafe import Markup

from headfold.convert.errors import HeadfoldError, RefusedError

from .schema import Report, read_report
from .view import model_index, view

_FILES = ("report.json", "report.html", "report.md", "model_card.md")
_TEMPLATES = Path(__file__).parent / "templates"
_MARKDOWN_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_{}[]<>#|"} | {"\n": " ", "\r": " "}
)


def refuse_report_directory(output: str | Path) -> None:
    """Raises RefusedError, before hours of measuring, where a report cannot be written or would destroy something.

    An earlier report may be replaced; other files of the same names may not, and a checkpoint gets none.
    """
    directory = place = Path(output)
    try:
        if (directory / "config.json").exists():
            raise RefusedError(f"{directory}: holds a checkpoint; choose another directory for the report")
        if there := [name for name in _FILES if (directory / name).exists()]:
            try:
                read_report(directory / "report.json")
            except RefusedError as error:
                raise RefusedError(
                    f"{directory}: its {there[0]} would be replaced; choose another directory ({error})"
                ) from error
        while not _exists(place):
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise RefusedError(
            f"{directory}: the report cannot be written there: {error.strerror}; choose another directory"
        ) from error


def _exists(path: Path) -> bool:
    """Unlike Path.exists, also a link that leads nowhere; raises OSError for names that cannot be."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def write_report(report: Report, output: str | Path) -> list[Path]:
    """Writes report.json, report.html, report.md and model_card.md into a directory, which is made where needed.

    Each is written aside and renamed, so that a report that stands is whole. Returns the paths. Raises HeadfoldError
    where the directory cannot be written to.
    """
    directory = Path(output)
    contents = {
        "report.json": report.model_dump_json(indent=2) + "\n",
        "report.html": render_html(report),
        "report.md": render_markdown(report),
        "model_card.md": render_model_card(report),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            _replace(directory / name, content)
    except OSError as error:
        raise HeadfoldError(f"{directory}: the report cannot be written: {error.strerror}") from error
    return [directory / name for name in contents]


def _replace(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def render_html(report: Report) -> str:
    """One page that loads nothing and runs no script."""
    style = Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return _environment(escape=True).get_template("report.html.j2").render(style=style, **view(report))


def render_markdown(report: Report) -> str:
    return _environment(escape=False).get_template("report.md.j2").render(**view(report))


def render_model_card(report: Report) -> str:
    """A model card: metadata with a model-index of what was measured, and a few lines to put into a README.md."""
    metadata = yaml.safe_dump(model_index(report), sort_keys=False, allow_unicode=True)
    return _environment(escape=False).get_template("model_card.md.j2").render(metadata=metadata, **view(report))


def _environment(escape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["unbroken"] = lambda text: re.sub(r"(?<=\d) (?=%|tokens\b|threads?\b)", "\u00a0", text)
    environment.filters["md"] = lambda text: str(text).translate(_MARKDOWN_SPECIAL)
    return environment
