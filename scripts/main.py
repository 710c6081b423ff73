"""The `headfold` command.

stdout carries results (with --json exactly one object), stderr progress and messages. Exit codes: 0 done; 1 it ran and
failed, or its result is bad; 2 refused before anything was done; 128 + n ended by signal n.

Heavy packages are imported by the command that needs them: `headfold convert` starts copying before torch is loaded.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.scripts.progress import ProgressBar

if TYPE_CHECKING:
    from headfold.recipes.pipeline import RunDirectory

app = typer.Typer(
    help="Turn a multi-head-attention checkpoint into a grouped-query-attention one, win its quality back, and report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""The base of typer's complaints about a command line; newer versions of typer carry it inside a private module."""

Model = Annotated[str, typer.Argument(help="A local checkpoint directory or a hub name.", show_default=False)]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE ...", help="Change a key of the recipe.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command()
def plan(
    model: Model,
    kv_heads: Annotated[
        list[int] | None,
        typer.Option("--kv-heads", metavar="N ...", help="Only these counts. Default: all that divide the heads."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Name of a GPU, e.g. H100-80GB.", show_default=False)] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="TEXT_OR_DATASET", help="Measure on this text what each count would keep."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each count of KV heads costs and saves, from the config alone or with calibration text."""
    from headfold.recipes.plan import plan as make_plan
    from headfold.recipes.plan import render_plan

    with ProgressBar("steps") as progress:
        result = make_plan(
            model,
            kv_heads=kv_heads or None,
            gpu=gpu,
            calibration=calibration,
            progress=partial(progress, "measuring layers"),
        )
    print(result.model_dump_json(indent=2) if json else render_plan(result))


@app.command()
def convert(
    model: Model,
    output: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="KV heads of the result.", show_default=False)],
    method: Annotated[
        str | None,
        typer.Option(
            metavar="fold|aligned|mean|first|random",
            help="How heads are merged. Default: fold with --calibration, else the best that needs no text.",
            show_default=False,
        ),
    ] = None,
    grouping: Annotated[
        str, typer.Option(metavar="adjacent|similar", help="Which heads share a KV head.")
    ] = "adjacent",
    calibration: Annotated[
        str | None, typer.Option(metavar="TEXT_OR_DATASET", help="Text that stands for the model's use.")
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Tokens of it to read. Default: what `fold` recommends.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's code.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUTPUT, once the new one is complete.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert an MHA (or GQA) checkpoint to fewer KV heads."""
    from headfold.convert import convert_checkpoint
    from headfold.convert.settings import ConvertSettings
    from headfold.recipes.schema import validated

    given: dict[str, Any] = {
        "num_key_value_heads": kv_heads,
        "method": method,
        "grouping": grouping,
        "calibration": calibration,
        "calibration_tokens": calibration_tokens,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
    }
    settings = validated(ConvertSettings, {key: value for key, value in given.items() if value is not None})
    with ProgressBar("bytes") as progress:
        report = convert_checkpoint(
            model, output, force=force, progress=partial(progress, "converting"), **settings.model_dump()
        )
    print(report.model_dump_json(indent=2) if json else report.render())


@app.command()
def uptrain(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<recipe name>.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert if that is not done yet, then uptrain; resumes what was interrupted."""
    from headfold.recipes import pipeline
    from headfold.recipes.launch import is_worker
    from headfold.recipes.schema import load_recipe

    parsed = load_recipe(recipe, overrides or ())
    run = pipeline.RunDirectory(output or pipeline.default_directory(parsed), parsed)
    if is_worker():
        pipeline.train_here(run)
        return
    _convert_and_train(run)
    print(run.uptrained)


@app.command("eval")
def evaluate(
    before: Annotated[Path, typer.Option(help="The checkpoint to compare with.", show_default=False)],
    after: Annotated[
        list[Path], typer.Option(metavar="DIR ...", help="One or more converted checkpoints.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="Directory for report.json, .md and .html.", show_default=False)],
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILE ...", help="Text to measure perplexity on.", show_default=False)
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas.", show_default=False)] = None,
    decode: Annotated[bool, typer.Option("--decode/--no-decode", help="Measure decode speed.")] = True,
    engine: Annotated[
        str, typer.Option(metavar="headfold|transformers|vllm", help="What runs the decode measurement.")
    ] = "transformers",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure two or more checkpoints side by side and write the report."""
    from headfold.eval import evaluate as measure
    from headfold.eval import refuse_report_directory, write_report
    from headfold.eval.settings import EvalSettings
    from headfold.recipes.schema import validated

    given: dict[str, Any] = {"text": text or [], "engine": engine}
    given["tasks"] = [task.strip() for task in (tasks or "").split(",") if task.strip()]
    if not decode:
        given["decode"] = None
    settings = validated(EvalSettings, given)
    refuse_report_directory(output)
    with ProgressBar("steps") as progress:
        report = measure(before, after, settings, progress=progress)
        write_report(report, output)
    print(report.model_dump_json(indent=2) if json else report.verdict)


@app.command()
def run(
    recipe: RecipeName,
    output: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<recipe name>.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Convert, uptrain, evaluate, report. A second run skips what is complete and unchanged."""
    from headfold.recipes import pipeline
    from headfold.recipes.schema import load_recipe

    parsed = load_recipe(recipe, overrides or ())
    directory = pipeline.RunDirectory(output or pipeline.default_directory(parsed), parsed)
    _convert_and_train(directory)
    with ProgressBar("steps") as progress:
        pipeline.evaluate(directory, _say, progress)
    pipeline.report(directory)
    print(pipeline.summary(directory))
    pipeline.check_gates(directory)


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.", show_default=False)],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a directory holds a sound checkpoint."""
    import json as json_module

    from headfold.convert.check import check_checkpoint

    if not directory.is_dir():
        raise RefusedError(f"{directory}: no such directory")
    findings = check_checkpoint(directory)
    sound = not any(finding.severity == "error" for finding in findings)
    if json:
        listed = [{"severity": finding.severity, "message": finding.message} for finding in findings]
        print(json_module.dumps({"directory": str(directory), "sound": sound, "findings": listed}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding.message}")
        print(f"{directory}: {'a sound checkpoint' if sound else 'not a sound checkpoint'}")
    if not sound:
        raise typer.Exit(1)


def _convert_and_train(directory: RunDirectory) -> None:
    from headfold.recipes import pipeline

    with ProgressBar("bytes") as progress:
        pipeline.convert(directory, _say, partial(progress, "converting"))
    pipeline.uptrain(directory, _say)


def _say(line: str) -> None:
    print(f"headfold: {line}", file=sys.stderr, flush=True)


_ANY_VALUE = re.compile(r"(?!-).+", re.DOTALL)
_SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
_SPREAD_OPTIONS = {
    "plan": {"--kv-heads": re.compile(r"\d+")},
    "uptrain": {"--set": _SETTING},
    "run": {"--set": _SETTING},
    "eval": {"--text": _ANY_VALUE, "--after": _ANY_VALUE},
}


def spread(arguments: Sequence[str]) -> list[str]:
    """Writes `--set a=1 b=2` as `--set a=1 --set b=2`, so that an option of several values takes them both ways."""
    patterns = _SPREAD_OPTIONS.get(next(iter(arguments), ""), {})
    result: list[str] = []
    option: str | None = None
    has_value = False
    for argument in arguments:
        if argument in patterns:
            option, has_value = argument, False
        elif option and not has_value:
            has_value = True
        elif option and patterns[option].fullmatch(argument):
            result.append(option)
        else:
            option = None
        result.append(argument)
    return result


class _Terminated(BaseException):
    """SIGTERM arrived: unwinds the stack, so that every `with` puts its things in order."""


def _on_sigterm(_signal: int, _frame: object) -> NoReturn:
    raise _Terminated


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with its code; a user's mistake is one or two lines, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    # Progress, errors and results are said in our own words; the libraries' notes would bury them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        # Not app(...), which ends interrupts and broken pipes in a way of its own.
        command = typer.main.get_command(app)
        with command.make_context("headfold", spread(given)) as context:
            command.invoke(context)
        code = 0
    except typer.Exit as done:
        code = done.exit_code
    except HeadfoldError as error:
        code = _report(error, str(error), error.exit_code, debug)
    except _UsageError as error:
        code = _report(error, error.format_message(), RefusedError.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort) as error:
        code = _report(error, "interrupted", 128 + signal.SIGINT, debug)
    except _Terminated as error:
        code = _report(error, "terminated", 128 + signal.SIGTERM, debug)
    except BrokenPipeError:
        code = _without_reader()
    except OSError as error:
        code = _report(error, _os_error_line(error), HeadfoldError.exit_code, debug)
    except Exception as error:
        text = " ".join(str(error).split())
        line = f"unexpected {type(error).__name__}: {text[:300]} (run again with --debug for the traceback)"
        code = _report(error, line, HeadfoldError.exit_code, debug)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _without_reader()
    sys.exit(code)


def _without_reader() -> int:
    """The exit code where the reader of our output left, as in `headfold plan ... | head`; the rest goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13  # SIGPIPE, which Windows does not name


def _os_error_line(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    advice = {
        errno.ENOSPC: " Free some space or choose another output, then run the same command again.",
        errno.EFBIG: " The file-size limit is too low for the output (ulimit -f).",
        errno.EROFS: " Choose an output on a file system that can be written.",
        errno.EACCES: " Check the permissions.",
    }.get(error.errno or 0, "")
    return f"{where}{error.strerror or error}.{advice}"


def _report(error: BaseException, line: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"headfold: {line}", file=sys.stderr)
    elif not isinstance(error, RefusedError) or os.environ.get("LOCAL_RANK") == "0":
        # A refusal is the same in every process: once per host is enough.
        print(f"headfold (process {rank}): {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
