"""Texts that people read use the field's words: a list of words and phrases that are avoided."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("how-to/*.md"))]
PAGES += [
    *sorted((ROOT / "docs").glob("reference/*.md")),
    *sorted((ROOT / "docs").glob("tutorial/*")),
]
AVOIDED = {
    r"\btold\b": "says, reports, lists",
    r"dearest": "most expensive",
    r"\bto be had\b": "available",
    r"at every look\b|\ba line a look\b": "every log interval",
    r"\bwhose turn\b|\bwho (is|are) lost\b": "a process is no person",
    r"not ruled out": "a lower bound",
    r"left out by (their|its) bound": "pruned",
    r"\bnot climbed\b": "skipped",
    r"\bways? left\b": "allowed shardings",
    r"No array of them": "nothing is allocated",
    r"tell apart": "distinguish",
    r"\bdearer\b": "more expensive",
    r"as ever\b": "as usual",
    r"plans? by hand": "manual plan",
}
"""Patterns, and what is written instead."""
PRINTED = {
    r"\basked for\b": "requested",
    r"\bfound out\b": "detected",
    r"\b(peak|plan|choice) found\b": "of all plans tried",
}
"""Those of what programs print alone."""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    said = [f"{found[0]!r}: {better}" for found, better in matches(text, AVOIDED)]
    assert not said, f"{page.name}: {said}"


def matches(text: str, avoided: Mapping[str, str]) -> list[tuple[re.Match[str], str]]:
    return [
        (found, better) for bad, better in avoided.items() for found in re.finditer(bad, text, re.I)
    ]


def printed(tree: ast.AST) -> list[str]:
    """The text of string literals and f-strings that are no docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    comments = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # a string that stands alone describes what is above it
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docs | comments
    ]


@pytest.mark.parametrize(
    "package", ["planner", "executor", "costmodels", "meshwright", "planner_command"]
)
def test_what_is_printed(package: str) -> None:
    said = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for text in printed(ast.parse(path.read_text(encoding="utf-8"))):
            said += [
                f"{path.name}: {text!r}: {better}" for _, better in matches(text, AVOIDED | PRINTED)
            ]
    assert not said, "\n".join(said)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_list_finds_something() -> None:
    assert matches("The dearest first, as told at every look", AVOIDED)
    assert not matches("A tolerance", AVOIDED | PRINTED)
    tree = ast.parse('def f():\n    """told"""\n    print(f"told {1}")\nX = 1\n"""told"""\n')
    assert printed(tree) == ["told "]
