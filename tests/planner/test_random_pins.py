"""Random marks on a small train step: every one is honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from planner import PinError, shard
from planner.annotate import FREE, MARK
from planner.graph.trace import trace
from planner.planning import plan_step
from planner.spec import MeshSpec, Sharding, parse_mesh

MESHES = ("data=8", "data=4,model=2", "data=2,fsdp=2,model=2")
SHAPES = {"a": (16, 24), "b": (24, 2, 8), "c": (8, 12), "d": (12,)}
X = jax.ShapeDtypeStruct((8, 6, 16), jnp.float32)
PLACES = ("hidden", "heads", "loss")

Entries = tuple[Any, ...]


def built(marks: dict[str, Entries]) -> Any:
    """A step with marks at the places."""

    def mark(x: jax.Array, place: str) -> jax.Array:
        return shard(x, *marks[place]) if place in marks else x

    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = mark(jnp.tanh(x @ w["a"]), "hidden")
        heads = mark(jnp.einsum("bsh,hnd->bnsd", hidden, w["b"]), "heads")
        scores = jax.nn.softmax(jnp.einsum("bnsd,bntd->bnst", heads, heads))
        mixed = jnp.einsum("bnst,bntd->bsd", scores, heads)
        return jnp.mean(mark(mixed @ w["c"] + w["d"], "loss") ** 2)

    def step(w: dict[str, jax.Array], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


RANKS = {"hidden": 3, "heads": 4, "loss": 3}


@st.composite
def entries(draw: st.DrawFn, rank: int, names: tuple[str, ...]) -> Entries:
    left = list(draw(st.permutations(names)))
    out: list[Any] = []
    for _ in range(draw(st.integers(0, rank))):
        kind = draw(st.sampled_from(["none", "none", "free", "axis", "axis", "two"]))
        if kind == "axis" and left:
            out.append(left.pop())
        elif kind == "two" and len(left) > 1:
            out.append(tuple(sorted((left.pop(), left.pop()), key=names.index)))
        else:
            out.append(FREE if kind == "free" else None)
    return tuple(out)


@st.composite
def cases(draw: st.DrawFn) -> tuple[MeshSpec, dict[str, Entries], dict[str, Entries]]:
    mesh = parse_mesh(draw(st.sampled_from(MESHES)))
    marked = draw(st.sets(st.sampled_from(PLACES), max_size=2))
    ruled = draw(st.sets(st.sampled_from([*SHAPES, "x"]), max_size=3))
    ranks = {**{n: len(s) for n, s in SHAPES.items()}, "x": 3}
    return (
        mesh,
        {p: draw(entries(RANKS[p], mesh.names)) for p in sorted(marked)},
        {n: draw(entries(ranks[n], mesh.names)) for n in sorted(ruled)},
    )


def holds(wanted: Entries, got: Sharding) -> bool:
    """Whether a sharding is what the entries ask for."""
    fixed = Sharding.of([None if e is FREE else e for e in wanted], len(got.dims))
    named = set(fixed.axes)
    for d, (want, have) in enumerate(zip(fixed.dims, got.dims, strict=True)):
        free = d < len(wanted) and wanted[d] is FREE
        if (set(have) & named if free else have) != (set() if free else want):
            return False
    return True


AUTO_MODES = st.sampled_from(["AUTO_PARALLEL", "HYBRID_PARALLEL", "SEMI_AUTO_PARALLEL"])


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(cases(), AUTO_MODES)
def test_every_mark_is_honoured_or_refused_by_name(case: Any, mode: str) -> None:
    honoured_or_refused(*case, mode)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases(), AUTO_MODES)
def test_many_marks_are_honoured_or_refused_by_name(case: Any, mode: str) -> None:
    honoured_or_refused(*case, mode)


def honoured_or_refused(
    mesh: MeshSpec, marks: dict[str, Entries], rules: dict[str, Entries], mode: str
) -> None:
    step = built(marks)
    w = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    paths = {n: r"^\[1\]" if n == "x" else rf"\['{n}'\]" for n in rules}
    pins = {paths[n]: P(*spec) for n, spec in rules.items()}
    try:
        planned = plan_step(step, w, X, cluster="cpu:8", mesh=mesh, mode=mode, shardings=pins)
    except PinError as error:
        assert "shardings[" in str(error) or "mark P(" in str(error)
        return
    for leaf in planned.plan.inputs:
        name = "x" if leaf.path == "[1]" else leaf.path.split("'")[1]
        if name in rules:
            assert holds(rules[name], leaf.spec), (leaf.path, str(leaf.spec), rules[name])
    traced = trace(step, (w, X))
    made = 0
    for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True):
        if op.kind == MARK and eqn is not None:  # in the forward pass, and alike in the backward
            made += 1
            got = planned.extraction.value_sharding(op.outputs[0])
            entry = tuple(eqn.params["entries"])
            assert holds(entry, got), (op.source, str(got), entry)
    assert made >= len(marks)
