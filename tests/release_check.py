"""Builds the wheel and the source distribution and uses each as somebody would who installs it.

python tests/release_check.py [PYTHON ...]: the interpreters to install the wheel on (default: this
one). Everything happens in a temporary directory, from the files that git tracks; packages come
from the index that pip uses.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "meshwright/py.typed",
    "planner/py.typed",
    "executor/py.typed",
    "costmodels/py.typed",
    "costmodels/prices.toml",
    "costmodels/residuals.toml",
    "costmodels/catalog/h100.toml",
)
"""Files without code that a wheel must have."""

MODEL = """
import jax, jax.numpy as jnp

def step(w, x):
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, value

def example_args():
    return (jax.ShapeDtypeStruct((256, 256), jnp.float32),
            jax.ShapeDtypeStruct((1024, 256), jnp.float32))
"""
USE = """
import sys
import numpy as np
import jax, jax.numpy as jnp
import meshwright as mw
from model import example_args, step

assert len(jax.devices()) == 8, jax.devices()
assert "site-packages" in mw.__file__ or "installed" in mw.__file__, mw.__file__
plan = mw.make_plan(step, *example_args(), cluster="v5p:2x2x2")
plan.save("plan.json")
assert mw.load_plan("plan.json") == plan
args = [jnp.asarray(np.random.default_rng(0).normal(size=a.shape), a.dtype) for a in example_args()]
run = mw.parallelize(step)
got, expected = run(*args), step(*args)
assert float(jnp.max(jnp.abs(got[0] - expected[0]))) < 1e-5
print("used", mw.__version__, "on Python", sys.version.split()[0], "jax", jax.__version__)
"""
COMMANDS = (
    ("--version",),
    (
        "inspect",
        "model.py:step",
        "--cluster",
        "h100:8",
        "--html",
        "report.html",
        "--save",
        "p.json",
    ),
    ("check", "p.json", "model.py:step"),
    ("compare", "model.py:step", "--cluster", "h100:8", "--cluster", "v5e:2x4"),
)


def missing(wheel: Path) -> list[str]:
    """What of ``NEEDED``, and of the report's assets, a wheel lacks."""
    names = zipfile.ZipFile(wheel).namelist()
    lacking = [name for name in NEEDED if name not in names]
    for suffix in (".html", ".css", ".js"):
        if not any(n.startswith("planner/html/assets/") and n.endswith(suffix) for n in names):
            lacking.append(f"planner/html/assets/*{suffix}")
    strange = {n.split("/")[0] for n in names} - {
        "meshwright",
        "planner",
        "executor",
        "costmodels",
        "planner_command",
        "planner_command.py",
    }
    lacking += [f"(not expected) {n}" for n in strange if not n.endswith(".dist-info")]
    return lacking


def use(folder: Path, python: Sequence[str], environment: dict[str, str]) -> str:
    """Use an installed meshwright from a folder of its own; returns what it says."""
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**environment, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    said = _run([*python, "-c", USE], folder, environment)
    for words in COMMANDS:
        _run([*python, "-m", "planner_command", *words], folder, environment)
    return said.strip()


def _run(words: Sequence[str | Path], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [str(w) for w in words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, words))[:200]} ended with {done.returncode}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MESHWRIGHT"))}


def main(pythons: Sequence[str]) -> None:
    """Build, install, use; one line each."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source, dist = place / "source", place / "dist"
        source.mkdir()
        tracked = _run(["git", "ls-files", "-z"], ROOT, _environment()).split("\0")
        for path in filter(None, tracked):
            target = source / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / path).read_bytes())
        _run([sys.executable, "-m", "venv", place / "tools"], place, _environment())
        tools = place / "tools" / "bin" / "python"
        _run([tools, "-m", "pip", "install", "--quiet", "build"], place, _environment())
        _run([tools, "-m", "build", "--outdir", dist, source], place, _environment())
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        if lacking := missing(wheel):
            raise SystemExit(f"{wheel.name} lacks {', '.join(lacking)}")
        print(f"built {wheel.name} {wheel.stat().st_size / 1e3:.0f} kB, {sdist.name}", flush=True)
        with tarfile.open(sdist) as archive:
            assert any(n.endswith("/LICENSE") for n in archive.getnames())
        for k, (python, package) in enumerate(
            [*((p, wheel) for p in pythons), (pythons[0], sdist)]
        ):
            begun = time.perf_counter()
            own = place / f"installed-{k}"
            _run([python, "-m", "venv", own], place, _environment())
            inside = own / "bin" / "python"
            _run([inside, "-m", "pip", "install", "--quiet", package], place, _environment())
            said = use(place / f"use-{k}", [str(inside)], _environment())
            print(f"{package.suffix[1:]}: {said} ({time.perf_counter() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
