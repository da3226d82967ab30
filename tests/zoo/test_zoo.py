"""Every program of the zoo is planned for 8 devices, runs on them and gives the same numbers."""

import re

import pytest

from tests.zoo.fast import FAST
from tests.zoo.primitives import PAGE, TITLE, met, page
from tests.zoo.program import Program
from tests.zoo.running import SEARCHES, difference, load, outcome, planned

pytestmark = pytest.mark.devices
ZOO = load()
QUICK, THOROUGH = "recursive_programming", "dynamic_programming"


def test_the_zoo_is_large_and_little_of_it_stays_whole() -> None:
    assert len(ZOO) >= 150 and {QUICK, THOROUGH} == set(SEARCHES)
    assert [p.name for p in ZOO.values() if p.whole] == ["scalars_only", "odd_sizes"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in ZOO]
)
def test_program(name: str) -> None:
    found = outcome(ZOO[name], QUICK)
    assert not found.fault, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_program_by_the_other_search(name: str) -> None:
    found = outcome(ZOO[name], THOROUGH)
    assert not found.fault, found


def test_faults_are_found() -> None:
    import jax.numpy as jnp

    def program(step, args, **changes):  # type: ignore[no-untyped-def]
        return Program(
            "p", "m", lambda: (step, args), **{"tolerance": 1e-5, "whole": "", **changes}
        )

    x = jnp.ones((16, 16))
    assert outcome(program(lambda x: x @ x, (x,)), QUICK).fault == ""
    assert outcome(program(lambda x: x + 1, (jnp.ones(3),)), QUICK).fault == "nothing is split"
    assert "ZeroDivisionError" in outcome(program(lambda x: 1 / 0, (x,)), QUICK).fault
    assert outcome(program(lambda x: x @ x, (x,), tolerance=-1.0), QUICK).fault.startswith(
        "differs"
    )


def test_difference() -> None:
    import jax
    import jax.numpy as jnp

    a = {"x": jnp.ones(4), "n": jnp.arange(3), "k": jax.random.key(0)}
    assert difference(a, a) == 0
    assert difference({**a, "x": a["x"] + 0.5}, a) == 0.5
    assert difference({**a, "x": a["x"] * jnp.nan}, a) == float("inf")
    assert difference({**a, "n": a["n"] + 1}, a) == float("inf")
    assert difference({**a, "k": jax.random.key(1)}, a) == float("inf")
    assert difference({**a, "x": jnp.ones(5)}, a) == float("inf")
    assert difference([a["x"]], a) == float("inf")
    nan = jnp.array([jnp.nan, 1e3, jnp.inf])
    assert difference(nan, nan) == 0 and difference(nan + 1, nan) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("shard_map_own_mesh", []),
        ("pallas_kernel_opaque", ["pallas_call"]),
        ("pallas_kernel_with_rule", []),
        ("custom_partitioning_rule", []),
        ("pure_callback", ["pure_callback"]),
        ("debug_print_in_scan", ["debug_print"]),
        ("linear_solve_batched", []),
        ("composite_function", []),
        ("moe_ragged_groups", []),
        ("mutable_references", ["get", "new_ref", "scan", "swap"]),
    ],
)
def test_fallbacks_are_recorded(name: str, kinds: list[str]) -> None:
    plan = planned(ZOO[name], QUICK)[0]
    assert sorted({text.split()[0] for text in plan.fallbacks}) == kinds


@pytest.fixture
def committed() -> str:
    """The page of primitives, of this jax."""
    import jax

    text = PAGE.read_text(encoding="utf-8")
    version = text.splitlines()[0].removeprefix(TITLE)
    if version != jax.__version__:
        pytest.skip(f"the page is of jax {version}, this is {jax.__version__}")
    return text


def test_the_fast_programs_have_every_primitive_of_the_page(committed: str) -> None:
    """With every origin of its rule; a row that ends in a dash stands in no program."""
    assert set(ZOO) >= FAST
    listed = re.findall(r"^\| `([^`]+)` \| (.+) \| \d+ \|$", committed, re.M)
    found = met(ZOO[name] for name in FAST)
    expected = {(name, origin) for name, origins in listed for origin in origins.split(", ")}
    assert {(name, origin) for name, origins in found.items() for origin in origins} == expected


@pytest.mark.slow
def test_the_page_of_primitives_is_up_to_date(committed: str) -> None:
    assert page() == committed, "run python -m tests.zoo.primitives"
