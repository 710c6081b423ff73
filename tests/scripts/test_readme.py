"""The README: its tables are the kept results, and its commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from headfold.scripts.main import app, spread

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Every `headfold ...` line inside a code block."""
    blocks = re.findall(r"^```\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("headfold ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_tables_are_what_the_results_say() -> None:
    script = ROOT / "scripts" / "readme_tables.py"
    checked = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_every_command_is_one_that_headfold_takes(arguments: list[str]) -> None:
    """Parsed by the command line itself, without being run."""
    group = typer.main.get_command(app)
    name, *rest = spread(arguments)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, rest)


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 6


def test_every_file_that_it_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []
