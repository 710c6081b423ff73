"""The house itself: floors, packages, an installed wheel, and words that do not belong in the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"kernels": 0, "convert": 1, "uptrain": 2, "eval": 2, "recipes": 3, "scripts": 4}
OPEN_TO_STAGES = {"checkpoint", "check", "errors", "texts"}
"""What uptrain and eval may use of convert."""


def imported_modules(file: Path) -> list[str]:
    """Every `headfold.` module that a file imports, at its top or inside functions, relative imports resolved."""
    package = ["headfold", *file.relative_to(ROOT).parent.parts]
    modules = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            modules += [f"{stem}.{alias.name}" for alias in node.names]
    return [module for module in modules if module.startswith("headfold.")]


def floor_violations(floor: str, file: Path) -> list[str]:
    violations = []
    for module in imported_modules(file):
        target, _, rest = module.removeprefix("headfold.").partition(".")
        if target == floor:
            continue
        if FLOORS[target] >= FLOORS[floor]:
            violations.append(f"{file.relative_to(ROOT)} imports {module}, which is not below it")
        if floor in ("uptrain", "eval") and target == "convert" and rest.split(".")[0] not in OPEN_TO_STAGES:
            violations.append(f"{file.relative_to(ROOT)} imports {module}; of convert it may use {OPEN_TO_STAGES}")
    return violations


def test_floors_import_only_what_is_below() -> None:
    files = [(floor, file) for floor in FLOORS for file in (ROOT / floor).rglob("*.py")]
    assert len(files) > 30
    assert [line for floor, file in files for line in floor_violations(floor, file)] == []


def test_floor_check_sees_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "uptrain").mkdir()
    file = tmp_path / "uptrain" / "bad.py"
    file.write_text("def f():\n    from headfold.eval.stats import mean\n    from ..convert import merge\n")
    assert len(floor_violations("uptrain", file)) == 2


def test_pyproject_lists_every_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT) for floor in FLOORS for file in (ROOT / floor).rglob("__init__.py")}
    expected = {"headfold." + ".".join(folder.parts): folder.as_posix() for folder in folders}
    assert table["package-dir"] == expected
    assert set(table["packages"]) == set(expected)


def test_wheel_installs_into_a_clean_venv_and_works_from_any_folder(tmp_path: Path) -> None:
    """Builds the wheel from the tracked files and runs the command that it installs, recipes included."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout: the tracked files are not known")
    for name in filter(None, tracked.stdout.split("\0")):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    run = subprocess.run
    options = ["--no-deps", "--no-build-isolation", "--quiet"]
    run(
        [sys.executable, "-m", "pip", "wheel", *options, "-w", tmp_path / "wheel", tmp_path / "source"],
        check=True,
        cwd=tmp_path,
    )
    wheel = next((tmp_path / "wheel").glob("headfold-*.whl"))
    environment = tmp_path / "venv"
    venv.create(environment, system_site_packages=False, with_pip=False)
    binaries = environment / ("Scripts" if os.name == "nt" else "bin")
    # The dependencies come from the running environment; the venv itself holds Headfold alone.
    site = next(environment.glob("lib/python*/site-packages"), environment / "Lib" / "site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")]
    run([sys.executable, "-m", "pip", "install", *options, "--target", site, wheel], check=True, cwd=tmp_path)
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    where = "import headfold.convert.families, headfold.recipes.schema as s; print(s.__file__, *s.shipped_recipes())"
    located = run([binaries / "python", "-c", where], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert str(site) in located.stdout and "quickstart" in located.stdout
    scripts = next(path for path in (site / "bin" / "headfold", binaries / "headfold") if path.exists())
    plan = run(
        [binaries / "python", scripts, "plan", site / "headfold" / "recipes" / "quickstart", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert plan.returncode == 0, plan.stderr
    assert '"num_key_value_heads"' in plan.stdout


def test_our_kernels_folder_does_not_break_transformers(tmp_path: Path) -> None:
    """transformers imports the Hugging Face package `kernels` where it is installed; our folder has the same name."""
    fake = tmp_path / "site"
    (fake / "kernels").mkdir(parents=True)
    (fake / "kernels" / "__init__.py").write_text("")
    metadata = fake / "kernels-99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 99.0\n")
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import transformers; transformers.LlamaForCausalLM; print('through')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(fake)], capture_output=True, text=True, cwd=tmp_path
    )
    assert "through" in result.stdout or "headfold" in result.stderr.lower(), result.stderr


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys, headfold.scripts.main, headfold.kernels; "
        "print([name for name in ('torch', 'transformers', 'triton', 'lm_eval') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_e9_everything_but_kernels_works_without_triton_and_lm_eval(tmp_path: Path) -> None:
    """E9: macOS, Windows and CPU-only machines convert, train and measure perplexity."""
    blocked = (
        "import sys\n"
        "for name in ('triton', 'lm_eval'):\n"
        "    sys.modules[name] = None\n"
        "import headfold.convert, headfold.uptrain.train, headfold.eval, headfold.eval.perplexity\n"
        "import headfold.recipes.pipeline, headfold.kernels.attention, headfold.kernels.cache\n"
    )
    result = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_repository_speaks_of_the_project_alone() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout: the tracked files are not known")
    words = re.compile(r"/(?:work|root|home/\w+)/|\bissue #?\d+\b")
    found = []
    for name in filter(None, tracked.stdout.split("\0")):
        if name == "tests/test_house.py" or name.startswith(("LICENSE", "recipes/quickstart_text/")):
            continue
        if Path(name).suffix in (".py", ".md", ".yaml", ".toml", ".txt", ".json", ".html") or name == "Makefile":
            text = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else ""
            found += [f"{name}: {match.group()}" for match in words.finditer(text)]
    assert found == []
