"""The command: exit codes, one-line errors, what goes to stdout and what to stderr."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headfold.convert.errors import HeadfoldError, RefusedError, StoppedError
from headfold.scripts import main as command
from headfold.scripts.main import spread


def headfold(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headfold.scripts", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["plan", "--kv-heads", "2", "4", "M"], ["plan", "--kv-heads", "2", "--kv-heads", "4", "M"]),
        (["plan", "M", "--kv-heads", "2", "--kv-heads", "4"], ["plan", "M", "--kv-heads", "2", "--kv-heads", "4"]),
        (
            ["run", "R", "--set", "a.b=1", "c=2", "--output", "o"],
            ["run", "R", "--set", "a.b=1", "--set", "c=2", "--output", "o"],
        ),
        (["run", "--set", "a=1", "R"], ["run", "--set", "a=1", "R"]),
        (
            ["eval", "--after", "x", "y", "--text", "t", "u", "--json"],
            ["eval", "--after", "x", "--after", "y", "--text", "t", "--text", "u", "--json"],
        ),
        (["convert", "M", "--kv-heads", "2", "4"], ["convert", "M", "--kv-heads", "2", "4"]),
        ([], []),
    ],
)
def test_options_of_several_values_take_them_both_ways(given: Sequence[str], expected: Sequence[str]) -> None:
    assert spread(given) == expected


@pytest.fixture
def failing_check(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `headfold check` of an existing directory end with an error."""

    def fail(error: BaseException) -> None:
        def raising(*_arguments: object) -> None:
            raise error

        monkeypatch.setattr("headfold.convert.check.check_checkpoint", raising)

    return fail


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RefusedError("no such thing"), 2, "headfold: no such thing"),
        (HeadfoldError("it broke"), 1, "headfold: it broke"),
        (StoppedError("stopped", 15), 143, "headfold: stopped"),
        (KeyboardInterrupt(), 130, "headfold: interrupted"),
        (command._Terminated(), 143, "headfold: terminated"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y"), 1, "headfold: /x/y: No space left on device."),
        (ZeroDivisionError("bad\nluck"), 1, "headfold: unexpected ZeroDivisionError: bad luck"),
    ],
)
def test_each_end_has_its_code_and_its_line(
    error: BaseException,
    code: int,
    line: str,
    failing_check: Callable[[BaseException], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing_check(error)
    with pytest.raises(SystemExit) as caught:
        command.main(["check", str(tmp_path)])
    output = capsys.readouterr()
    assert caught.value.code == code
    assert output.err.startswith(line) and output.err.count("\n") == 1
    assert output.out == ""


def test_debug_shows_the_traceback(
    failing_check: Callable[[BaseException], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_check(RefusedError("no such thing"))
    with pytest.raises(SystemExit):
        command.main(["check", str(tmp_path), "--debug"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "model"],
        ["convert", "model", "out", "--kv-heads", "many"],
        ["convert", "model", "out", "--kv-heads", "2", "--method", "best"],
        ["frobnicate"],
        ["run", "no-such-recipe"],
        ["run", "quickstart", "--set", "uptrain.lerning_rate=1"],
        ["check", "no-such-directory"],
        ["plan", "no-such-directory"],
        ["convert", "", "out", "--kv-heads", "2"],
        ["eval", "--before", "a", "--after", "b", "--output", "c"],
    ],
)
def test_a_wrong_request_is_refused_in_a_line_or_two(arguments: list[str], tmp_path: Path) -> None:
    result = headfold(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert 1 <= len(result.stderr.strip().splitlines()) <= 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error_of_ours(tmp_path: Path, unbuffered: str) -> None:
    """As in `headfold check DIR | true`."""
    running = subprocess.Popen(
        [sys.executable, "-m", "headfold.scripts", "check", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": unbuffered},
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait() == 128 + 13


def test_an_interrupt_in_the_middle_is_said(tmp_path: Path) -> None:
    script = "import os, signal, headfold.convert.check as c; c.check_checkpoint = lambda _: os.kill(os.getpid(), 2); "
    script += f"from headfold.scripts.main import main; main(['check', {str(tmp_path)!r}])"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}
    )
    assert (result.returncode, result.stderr) == (130, "headfold: interrupted\n")


def test_help_names_every_command() -> None:
    result = headfold("--help")
    assert result.returncode == 0
    for name in ("plan", "convert", "uptrain", "eval", "run", "check"):
        assert name in result.stdout
