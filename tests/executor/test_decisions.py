"""The seam for another kind of decision: a toy that stores activations in bfloat16, in one file.

The toy is planted into the two registries, as a file in ``planner/space/decisions`` and a function
in ``executor/run/decisions.py`` would be: search, memory, plan file and execution follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan
from executor.run import decisions as carried_out
from planner import (
    PlanFormatError,
    PlanMismatchError,
    RequestError,
    load_plan,
    make_plan,
    plan_step,
)
from planner.graph.ir import Graph, Role
from planner.search import evaluate
from planner.space import decisions
from planner.space.buffer import Buffer, When
from planner.space.decisions.base import Array, IntArray, NothingMore, Prices
from planner.space.groups import Groups

# ---- planner/space/decisions/narrow.py: the whole decision -------------------------------------


class Narrow(NothingMore):
    """Whether an activation is kept in bfloat16."""

    name = "narrow"
    options: tuple[str, ...] = ("as it is", "bfloat16")

    def parse(self, asked: Any) -> str:
        """``"auto"``, ``"all"`` or nothing."""
        if asked not in (None, "auto", "all"):
            raise RequestError(f"narrow={asked!r}: expected 'auto' or 'all'")
        return asked or ""

    def demands(self, parsed: str) -> int | None:
        """All of them, or as the search likes."""
        return 1 if parsed == "all" else None

    def values(self, graph: Graph, parsed: str) -> frozenset[int]:
        """Float32 results of tanh in the forward pass."""
        return frozenset(
            v.index
            for v in graph.values
            if parsed
            and v.role is Role.ACTIVATION
            and v.dtype == "float32"
            and graph.ops[v.op].kind == "tanh"
        )

    def facts(
        self, graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
    ) -> Mapping[int, Hashable]:
        """Bytes and factors of each."""
        out: dict[int, tuple[tuple[float, frozenset[int]], ...]] = {}
        for v in sorted(values):
            group, layout = groups.home[v]  # type: ignore[misc]
            factors = frozenset(f for f in layout if f >= 0)
            out[group] = (*out.get(group, ()), (float(graph.values[v].nbytes), factors))
        return out

    def seconds(self, facts: Any, option: IntArray, prices: Prices) -> Array:
        """A made-up price: a nanosecond per megabyte that is rounded."""
        total: Array = np.zeros((1, len(option)))
        for nbytes, factors in facts:
            total = total + 1e-15 * prices.local_bytes(nbytes, factors, stored=False)
        return np.where(option == 1, total, 0.0)

    def buffers(
        self, buffers: Sequence[Buffer], graph: Graph, values: frozenset[int]
    ) -> Sequence[Buffer]:
        """Half the bytes."""
        out: list[Buffer] = []
        for b in buffers:
            if b.value not in values:
                out.append(b)
                continue
            out.append(dataclasses.replace(b, when=When(self.name, 0)))
            half = dataclasses.replace(b, nbytes=b.nbytes / 2, when=When(self.name, 1))
            out.append(half)
        return out

    def entry(self, graph: Graph, value: int, option: int) -> str | None:
        """Said where it is taken."""
        return self.options[option] if option else None


# ---- executor/run/decisions.py: one function ---------------------------------------------------


def rounded(option: str, value: Any) -> Any:
    """The value as it comes back from memory."""
    assert option == "bfloat16"
    return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(decisions.DECISIONS, "narrow", Narrow())
    monkeypatch.setitem(carried_out.APPLIED, "narrow", rounded)
    return


# ---- a user ------------------------------------------------------------------------------------


def step(params: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        h = x
        for w in p:
            h = jnp.tanh(h @ w)
        return jnp.mean(jnp.sin(h))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shapes() -> tuple[Any, jax.ShapeDtypeStruct]:
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return [square] * 4, jax.ShapeDtypeStruct((4096, 64), jnp.float32)


def test_without_the_decision_nothing_is_known_of_it() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'narrow'"):
        make_plan(step, *shapes(), cluster="h100:1", narrow="all")  # type: ignore[call-arg]


def test_a_search_takes_the_decision_where_memory_is_short(planted: None) -> None:
    more: Any = {"cluster": "h100:1", "mesh": "data=1"}
    free = plan_step(step, *shapes(), **more, narrow="auto")
    assert free.plan.decisions == ()  # it costs time, if little
    _, most, _ = evaluate(free.extraction.priced.problem, free.extraction.choice)
    all_of_it = plan_step(step, *shapes(), **more, narrow="all")
    _, least, _ = evaluate(all_of_it.extraction.priced.problem, all_of_it.extraction.choice)
    assert least < most
    middle = (least + most) / 2
    tight = plan_step(step, *shapes(), **more, narrow="auto", memory=middle)
    assert {(d.decision, d.option) for d in tight.plan.decisions} == {("narrow", "bfloat16")}
    _, less, _ = evaluate(tight.extraction.priced.problem, tight.extraction.choice)
    assert less <= middle


def test_all_is_all_and_equal_layers_stay_equal(planted: None) -> None:
    plan: Any = make_plan(step, *shapes(), cluster="h100:4", mesh="data=4", narrow="all")
    assert len(plan.decisions) == 4
    plain = make_plan(step, *shapes(), cluster="h100:4", mesh="data=4")
    assert plan.prediction.peak_bytes < plain.prediction.peak_bytes
    assert plan.prediction.compute_s > plain.prediction.compute_s
    with pytest.raises(RequestError, match="narrow='some'"):
        make_plan(step, *shapes(), cluster="h100:4", narrow="some")  # type: ignore[call-arg]


def test_the_plan_runs_as_it_says(planted: None, tmp_path: Path) -> None:
    plan: Any = make_plan(step, *shapes(), cluster="cpu:8", mesh="data=8", narrow="all")
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(k, (64, 64)) / 8 for k in keys[:4]]
    x = jax.random.normal(keys[4], (4096, 64))

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        h = x
        for w in params:
            h = rounded("bfloat16", jnp.tanh(h @ w))
        return jnp.mean(jnp.sin(h))

    expected = by_hand(params, x)
    _, value = compile_plan(step, again)(params, x)
    assert value == pytest.approx(float(expected), rel=1e-5)
    assert abs(float(value) - float(step(params, x)[1])) > 1e-7  # it does make a difference


def test_a_plan_with_an_unknown_decision_is_refused(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = make_plan(step, *shapes(), cluster="cpu:8", mesh="data=8", narrow="all")
    monkeypatch.delitem(carried_out.APPLIED, "narrow")
    with pytest.raises(PlanMismatchError, match=r"decides 'narrow' .* can't carry out"):
        compile_plan(step, plan)(*(jax.tree.map(lambda s: jnp.ones(s.shape), shapes())))
    row = dataclasses.replace(plan.decisions[0], op=10**6)
    path = tmp_path / "plan.json"
    dataclasses.replace(plan, decisions=(row,)).save(path)
    with pytest.raises(PlanFormatError, match=r"decisions\[0\]: operation 1000000 of"):
        load_plan(path)


def test_plans_without_decisions_do_not_speak_of_them() -> None:
    plan = make_plan(step, *shapes(), cluster="cpu:8")
    assert '"decisions"' not in plan.to_json()
