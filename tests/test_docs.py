"""The documentation names what exists, and its links lead somewhere."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

from executor.cli import main as executor_cli
from executor.cli import verify as cli_verify
from planner.cli import main as cli
from planner.cli import search as cli_search
from planner.modes import PROPAGATION
from planner.plan.plan import FORMAT, Plan
from planner.request.options import OPTIONS
from planner.search import SEARCHES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "planner",
    "planner.explain",
    "planner.compare",
    "planner.report.html",
    "planner.search",
    "executor",
    "executor.parameter_server",
    "costmodels",
)
COMMANDS = (
    "inspect",
    "explain",
    "compare",
    "fit",
    "diff",
    "check",
    "search",
    "debug",
    "verify",
    "calibrate",
    "export",
    "profile",
    "launch",
    "checkpoint info",
    "checkpoint convert",
    "checkpoint merge",
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REFERENCE = ROOT / "docs" / "reference"


def prose(text: str) -> str:
    """Markdown without fenced code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """The fragments that the headings of a page give."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


def entries(package: str) -> dict[str, str]:
    """The text of each entry in a package's section of api.md, by name."""
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    return dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", sections[package], re.M | re.S))


def parameters(thing: object) -> list[str]:
    """Names of the parameters of a function or of the fields of a plain class."""
    if not (inspect.isclass(thing) or inspect.isroutine(inspect.unwrap(thing))):  # type: ignore[arg-type]
        return []
    if inspect.isclass(thing) and "__init__" not in vars(thing):
        return []  # an exception without arguments of its own
    if getattr(thing, "_is_protocol", False):
        return []
    return list(inspect.signature(thing).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", PACKAGES)
def test_api_lists_every_public_name_and_no_other(package: str) -> None:
    assert set(entries(package)) == set(importlib.import_module(package).__all__)


@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
def test_api_names_every_parameter(package: str) -> None:
    module, listed = importlib.import_module(package), entries(package)
    missing = [
        f"{package}.{name}({parameter})"
        for name in module.__all__
        for parameter in parameters(getattr(module, name))
        if not ("**options" in listed[name] and parameter in OPTIONS)  # those of make_plan
        if not re.search(rf"\b{parameter}\b", listed[name])
    ]
    assert not missing, f"add to docs/reference/api.md: {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT) and target.exists(), f"{link}: no such file"
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target.read_text(encoding="utf-8")), f"{link}: no heading"


def test_readme_names_both_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.M)


def test_readme_code_compiles() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_cli_page_lists_every_option_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        section = page.split(f"\n## `planner {command}`\n")[1].split("\n## ")[0]
        assert executor_cli.main([*command.split(), "--help"]) == 0
        text = capsys.readouterr().out
        for option in set(re.findall(r"^  (--[a-z][a-z-]*)", text, re.M)):
            assert f"`{option}" in section, f"{command} {option}"
    codes = (cli.DONE, cli.REFUSED, cli.MODEL_FAILED, cli_search.NOTHING_FEASIBLE)
    for code in (*codes, cli_search.INTERRUPTED, cli_verify.MISSED):
        assert f"| {code} |" in page


def test_plan_format_page_lists_every_field() -> None:
    page = (REFERENCE / "plan-format.md").read_text(encoding="utf-8")
    assert f'"{FORMAT}"' in page
    for field in dataclasses.fields(Plan):
        if field.compare:  # else it is not saved
            assert f"`{field.name}`" in page, field.name


def test_readme_names_every_search() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in SEARCHES if f"`{name}`" not in readme] == []


def test_the_guide_to_the_searches_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "how-to" / "choose-a-search.md").read_text(encoding="utf-8")
    assert [name for name in (*SEARCHES, PROPAGATION) if f"\n| `{name}` |" not in page] == []
