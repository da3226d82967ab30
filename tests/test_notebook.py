"""The notebook in examples/ runs, and shows what its text says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook.ipynb"

RUN = """
import ast, json, sys
shown = []
def show(value):
    if value is not None:
        shown.append([type(value).__name__, getattr(value, "_repr_html_", lambda: "")()])
namespace = {"__name__": "__main__"}
for text in json.load(open(sys.argv[1])):
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    if last is not None:
        show(eval(compile(ast.Expression(last.value), "cell", "eval"), namespace))
json.dump(shown, open(sys.argv[2], "w"))
"""
"""Cells as a notebook runs them: the value of a last expression is shown."""


def cells() -> list[dict[str, Any]]:
    book = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    return list(book["cells"])


def test_it_is_clean() -> None:
    for cell in cells():
        assert cell["cell_type"] in ("code", "markdown") and cell["id"] and cell["source"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            text = "".join(cell["source"])
            if not text.startswith("%"):
                ast.parse(text)


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    texts = ["".join(c["source"]) for c in cells() if c["cell_type"] == "code"]
    code = [text for text in texts if not text.startswith("%")]
    assert len(code) == len(texts) - 1
    (tmp_path / "cells.json").write_text(json.dumps(code))
    words = [sys.executable, "-c", RUN, "cells.json", "shown.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, _, last = (
        done.stdout.partition("loss ")[2].partition(" on 8 devices")[0].partition(" -> ")
    )
    assert float(last) < float(first)
    assert "under the saved plan" in done.stdout
    assert done.stdout.count(" ms  ") == 4
    cards = [
        html for kind, html in json.loads((tmp_path / "shown.json").read_text()) if kind == "Plan"
    ]
    assert len(cards) == 2 and all(html.startswith("<div") for html in cards)
    assert "h100:8x4" in cards[0] and "cpu:8" in cards[1]
