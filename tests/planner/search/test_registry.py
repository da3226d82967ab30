"""A search is added by one row of the registry: commands, errors and plans follow it."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from planner import RequestError, make_plan
from planner.cli.main import main
from planner.modes import DEFAULT_SEARCH, PROPAGATION, check_mode
from planner.search import SEARCHES, Problem, Solution, dynamic_programming, write_iopddl
from planner.search.registry import FAST, OPTIONS, QUICK, WHOLE, options_of, solve
from tests.planner.search.search_cases import random_problem

ROOT = Path(__file__).resolve().parents[3]


def toy(problem: Problem, *, time_limit_s: float = 1.0, seed: int = 0) -> Solution:
    """The exact search under another name."""
    found = dynamic_programming(problem, time_limit_s=time_limit_s)
    return dataclasses.replace(found, search="toy", reason=f"seed {seed}")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEARCHES, "toy", toy)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).sum())(w)


def planned_by(search: str) -> str:
    arguments = (jnp.ones((64, 64)), jnp.ones((32, 64)))
    return make_plan(step, *arguments, cluster="cpu:8", mesh="data=8", search=search).search.name


@pytest.mark.usefixtures("planted")
def test_a_planted_search_makes_a_plan() -> None:
    assert planned_by("toy") == "toy"


def test_without_its_row_it_is_unknown() -> None:
    with pytest.raises(RequestError, match="unknown search 'toy'; expected one of auto, brute"):
        planned_by("toy")


@pytest.mark.usefixtures("planted")
def test_errors_and_commands_follow_the_registry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=r"unknown search 'top'.*, toy"):
        check_mode("AUTO_PARALLEL", "top")
    file = tmp_path / "problem.json"
    write_iopddl(random_problem(3), file)
    assert main(["search", str(file), "--search", "toy", "--seed", "7"]) == 0
    assert "seed 7" in capsys.readouterr().out
    assert main(["search", str(file), "--search", "toy", "--threads", "2"]) == 2
    assert "search toy takes none" in capsys.readouterr().err
    assert main(["search", str(file), "--search", "top"]) == 2
    assert "toy" in capsys.readouterr().err


@pytest.mark.usefixtures("planted")
def test_options_go_to_the_searches_that_take_them() -> None:
    assert options_of("toy") == ("seed",)
    assert set(OPTIONS) == set(options_of(DEFAULT_SEARCH))
    problem = random_problem(3)
    assert solve("toy", problem, 1.0, {"seed": 3, "threads": 2}).reason == "seed 3"


def test_roles_are_those_of_searches() -> None:
    assert {FAST, DEFAULT_SEARCH, *QUICK, *WHOLE} <= set(SEARCHES)
    assert PROPAGATION not in SEARCHES
    assert check_mode("AUTO_PARALLEL", PROPAGATION).search == PROPAGATION


@pytest.mark.long
def test_nothing_else_names_a_search() -> None:
    """Besides the registry, only the file of a search has its name. "auto" means more than one
    thing, so it is left out."""
    names = set(SEARCHES) - {DEFAULT_SEARCH}
    found = set()
    for package in ("planner", "executor", "costmodels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and node.value in names:
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == {
        "planner/search/registry.py",
        "planner/search/__init__.py",  # the public names
        *(f"planner/search/searches/{name}.py" for name in names),
    }
