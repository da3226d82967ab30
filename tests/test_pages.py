"""The tutorial and the how-to pages do what they say: their code runs, block by block."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
BLOCK = re.compile(r"(?:^<!-- (?:file: )?(.+?) -->\n)?^```(python|sh|toml)\n(.*?)^```", re.M | re.S)
QUOTED = re.compile(r"^```text\n(.*?)^```", re.M | re.S)
SKIPPED = "not run"
SLOW = (
    "a-cluster",
    "checkpoints",
    "choosing-hardware",
    "feed-data",
    "guard-a-pull-request",
    "plan-without-the-cluster",
    "train-on-many-hosts",
    "use-host-memory",
    "use-nnx-and-equinox",
    "use-parameter-servers",
    "use-pipeline-stages",
)
"""Pages that start processes or train for long: ``make test`` only compiles their Python."""
FIRST = ROOT / "docs" / "tutorial" / "first-plan.md"


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(file to write or "", language, text) of every block that is meant to run."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [b for b in found if b[0] != SKIPPED]


def files(page: Path) -> dict[str, str]:
    return {name: text for name, _, text in blocks(page) if name}


def runnable(page: Path) -> list[str]:
    """The commands of a page, and its unnamed Python blocks as one program at their first place."""
    out: list[str] = []
    python = [text for name, kind, text in blocks(page) if kind == "python" and not name]
    for name, kind, text in blocks(page):
        if kind == "sh":
            lines = re.sub(r"\\\n", " ", text).splitlines()
            out += [line.split("  #")[0].strip() for line in lines if line.strip()]
        elif kind == "python" and not name and python:
            Path("page.py").write_text("\n".join(python), encoding="utf-8")
            out.append("python page.py")
            python = []
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_code_of_a_page_is_python(page: Path) -> None:
    for name, kind, text in blocks(page):
        if kind == "python":
            compile(text, name or page.name, "exec")


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in SLOW else ()) for p in PAGES],
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {**files(FIRST), **files(page)}.items():
        Path(name).write_text(text, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    commands = runnable(page)
    if not commands:
        pytest.skip("nothing on this page runs without compilers or devices")
    printed: set[str] = set()
    for command in commands:
        words = shlex.split(command)
        if words[0] == "planner":
            words[:1] = [sys.executable, "-m", "executor.cli"]
        elif words[0] == "python":
            words[0] = sys.executable
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        printed.update(map(str.strip, done.stdout.splitlines()))
    if page.parent.name == "tutorial":  # what it quotes was printed
        quoted = "".join(QUOTED.findall(page.read_text(encoding="utf-8")))
        assert [x for x in map(str.strip, quoted.splitlines()) if x and x not in printed] == []


def test_most_pages_have_code_that_runs() -> None:
    assert {page.stem for page in PAGES} >= set(SLOW)
    assert sum(any(kind != "toml" for _, kind, _ in blocks(page)) for page in PAGES) >= 6
