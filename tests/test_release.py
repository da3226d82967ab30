"""The wheel: what is in it, and that it works outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.release_check import missing, use

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_the_wheel_works_outside_of_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    packages = ("meshwright", "planner", "executor", "costmodels", "planner_command")
    source = tmp_path / "source"
    for name in packages:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert not missing(wheel)
    installed = tmp_path / "installed"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", installed, wheel], check=True
    )
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MESHWRIGHT"))}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(paths)}
    said = use(tmp_path / "use", [sys.executable, "-S"], environment)
    assert said.startswith("used ")


def test_every_version_of_python_that_is_named_is_meant() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {c.rpartition(" ")[2] for c in project["classifiers"] if ":: 3." in c}
    assert named == {"3.11", "3.12", "3.13"} and project["requires-python"] == ">=3.11"
    extras = project["optional-dependencies"]
    jax = next(d for d in project["dependencies"] if d.startswith("jax>"))
    for name in ("cuda12", "cuda13", "tpu"):
        assert extras[name] == [jax.replace("jax", f"jax[{name}]")]
    used = (ROOT / "Dockerfile").read_text("utf-8").split("--build-arg EXTRAS=")[1].split()[0]
    assert used in extras
