"""Plans from elsewhere: whatever their texts say, an exported module and a report run nothing."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from executor.cli import main as cli
from executor.cli.export import FORMS
from executor.run.export import python_text
from planner import PlanFormatError, make_plan
from planner.export.text import in_docstring, quoted
from planner.html.data import report_data
from planner.html.page import html
from planner.plan.plan import Plan, load_plan, plan_from_json
from planner.planning import plan_step

RUN = "__import__('builtins').ran.append(1)"
PAYLOADS = (
    *(f'"""\n{RUN}\n"""', f"'''\n{RUN}\n'''", f'"\n{RUN}\n"', f"'\n{RUN}\n'", f'")\n{RUN}\n("'),
    *(f'" + str({RUN}) + "', f"' + str({RUN}) + '", f'\\"\n{RUN}\n#', f'\\"""\n{RUN}\n"""', "\\"),
    *(f"x\u2028{RUN}\u2029", f"\r{RUN}\r", f"\x0c{RUN}", f"*/ {RUN} /*", f"#\n{RUN}", f"{{{RUN}}}"),
    *(
        f"{{{{{RUN}}}}}",
        f'x"; {RUN}; "',
        f'x", {RUN}, "',
        "\\N{DIGIT ONE}",
        "\\x",
        "\ud800",
        "\x00",
    ),
    *(
        f"</script><script>{RUN}</script>",
        "'; rm -rf ~ #",
        "$(touch ran)",
        "`touch ran`",
        "\x1b[2J",
    ),
    *(f'\\\\"{RUN}', f"\\'\"{RUN}", "\u202e\u2066", "é\U0001f600"),
)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: Any, x: Any) -> Any:
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)  # noqa: E731
    return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))


@pytest.fixture(scope="module")
def plan() -> Plan:
    args = {"a": struct(64, 1024), "b": struct(1024, 64)}, struct(8192, 64)
    made = make_plan(step, *args, cluster="cpu:8", mesh="data=4,model=2", offload=r"\['a'\]")
    assert made.constraints and made.collectives and made.activations
    return made


Put = Callable[[str], Any]


def texts(value: Any, put: Put) -> Iterator[tuple[str, Put]]:
    """Every text inside plain data, and what puts another in its place; so for keys."""
    if isinstance(value, str):
        yield value, put
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from texts(item, lambda new, k=k: put([*value[:k], new, *value[k + 1 :]]))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, lambda new, key=key: put({**value, key: new}))
            yield (
                key,
                lambda new, key=key: put({new if k == key else k: v for k, v in value.items()}),
            )


def replaced(value: Any, old: str, new: str) -> Any:
    """A plan with a text in the place of another, wherever it stands; checked by nobody."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, tuple):
        return tuple(replaced(v, old, new) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = object.__new__(type(value))
        for f in dataclasses.fields(value):
            object.__setattr__(out, f.name, replaced(getattr(value, f.name), old, new))
        return out
    return value


def runs(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a module; fails if it ran a payload."""
    monkeypatch.setattr(builtins, "ran", [], raising=False)
    space: dict[str, Any] = {"__name__": "sharded"}
    exec(compile(text, "sharded.py", "exec"), space)
    assert not builtins.ran  # type: ignore[attr-defined]
    return space


def shape_of(text: str) -> str:
    """The syntax of a module, its literal texts left out."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("form", FORMS)
def test_no_text_of_a_plan_becomes_code(
    form: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what loading allows: the plan is changed in memory, where no schema looks at it."""
    slots = ("cpu:8", "AUTO_PARALLEL", "data", "model", "float32", "pinned_host", "dot_general")
    drawn = random.Random(form)
    slots += ("in", "out", plan.inputs[0].path, plan.collectives[0].kind, plan.search.reason)
    for old in slots:
        usual = None
        # the module with the step inside is long: some of the texts in each of its places
        for payload in drawn.sample(PAYLOADS, 5) if form == "python" else PAYLOADS:
            text = FORMS[form](replaced(plan, old, payload.replace(" ", "_")), "sharded")
            assert text.isascii()
            usual = usual or shape_of(text)
            assert shape_of(text) == usual, (old, payload)
            runs(text, monkeypatch)


def test_every_text_of_a_plan_file_is_refused_or_quoted(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = json.loads(plan.to_json())
    every = list(texts(raw, lambda new: new))
    drawn = random.Random(16)
    tried = refused = 0
    for _, put in every:
        for payload in drawn.sample(PAYLOADS, 3):
            tried += 1
            try:
                loaded = plan_from_json(json.dumps(put(payload)))
            except PlanFormatError as error:
                assert len(str(error).splitlines()) == 1 and str(error).isprintable()
                refused += 1
                continue
            form = drawn.choice([*FORMS.values(), FORMS["partition-specs"]])
            runs(form(loaded, "sharded"), monkeypatch)
            str(loaded).encode("utf-8")
    assert tried > 400 and refused > tried / 2


def test_the_export_of_a_hostile_path_says_the_path(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for payload in PAYLOADS:
        changed = replaced(plan, plan.inputs[0].path, payload)
        specs = runs(FORMS["partition-specs"](changed, "sharded"), monkeypatch)["IN_SPECS"]
        assert payload in specs
        assert ast.literal_eval(quoted(payload)) == payload
        shown = payload.encode("utf-8", "replace").decode()
        assert shown in ast.literal_eval(f'"""x {in_docstring(payload)} y"""')


def test_the_name_of_a_module_is_no_code(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for payload in ('a"""', "a b", "a;b", f'"""\n{RUN}\n"""'):
        assert runs(python_text(plan, payload), monkeypatch)["__doc__"].count("import sharded") == 1


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


def test_no_text_of_a_plan_becomes_markup_or_script(plan: Plan) -> None:
    args = {"a": struct(64, 1024), "b": struct(1024, 64)}, struct(8192, 64)
    data = report_data(
        plan_step(step, *args, cluster="cpu:8", mesh="data=4,model=2"), "title", None
    )
    usual = Elements(html(data)).found
    for old in ("title", "cpu:8", "data", "float32", "dot_general"):
        for payload in (
            *PAYLOADS,
            "<!--",
            "-->",
            "]]>",
            "<img src=x onerror=alert(1)>",
            "{{data}}",
        ):
            page = html(replaced(data, old, payload))
            assert Elements(page).found == usual, (old, payload)
            inside = page.partition('id="data"')[2].partition(">")[2].partition("</script>")[0]
            assert json.dumps(payload)[1:-1] in json.dumps(json.loads(inside)), (old, payload)


def test_an_exported_file_runs_nothing(plan: Plan, tmp_path: Path) -> None:
    """As a user would: the file is written by the command and imported in a folder of its own."""
    raw = json.loads(plan.to_json())
    attack = f'cpu:8"""\nopen({str(tmp_path / "ran")!r}, "w")\n"""'
    path, out = tmp_path / "plan.json", tmp_path / "sharded.py"
    path.write_text(json.dumps({**raw, "cluster": attack}))
    assert cli.main(["export", str(path), "--as", "partition-specs", "--out", str(out)]) == 2
    with pytest.raises(PlanFormatError, match=r"cluster is 'cpu:8"):
        load_plan(path)
    out.write_text(FORMS["partition-specs"](replaced(plan, "cpu:8", attack), "sharded"))
    subprocess.run([sys.executable, "-c", "import sharded"], cwd=tmp_path, check=True)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["plan.json", "sharded.py"]
