"""The borders between packages hold: violations that are planted here must be found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="needs import-linter: pip install 'meshwright[lint]'")

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("costmodels", "planner", "executor")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in PACKAGES:
        skip = shutil.ignore_patterns("__pycache__", "assets", "catalog")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_borders_hold(tree: Path) -> None:
    result = linted(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "line", "named"),
    [
        ("planner/cost/pricing.py", "import jax", "planner.cost.pricing -> jax"),
        (
            "planner/search/searches/brute.py",
            "import planner.space.groups",
            "planner.search.searches.brute",
        ),
        ("planner/graph/ir.py", "import planner.cost.rates", "planner.graph.ir"),
        ("planner/rules/key.py", "import costmodels", "planner.rules.key -> costmodels"),
        ("planner/report/units.py", "import executor.run.mesh", "planner.report.units"),
        ("executor/processes/meet.py", "import executor.data.common", "executor.processes.meet"),
        ("planner/attic/__init__.py", '"""A room that no contract knows."""', "planner.attic"),
    ],
)
def test_a_planted_violation_is_found(tree: Path, file: str, line: str, named: str) -> None:
    path = tree / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as out:
        out.write(f"\n{line}\n")
    result = linted(tree)
    assert result.returncode == 1
    assert "BROKEN" in result.stdout and named in result.stdout


def test_at_most_eight_modules_lie_in_a_package() -> None:
    for name in ("planner", "executor"):
        for package in {x.parent for x in (ROOT / name).rglob("*.py")}:
            modules = [x.stem for x in package.glob("*.py") if not x.stem.startswith("__")]
            assert len(modules) <= 8, (package, modules)
