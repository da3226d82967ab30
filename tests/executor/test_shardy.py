"""Shardy's own collectives against the plan's: changes of sharding, and whole steps."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from costmodels import AnalyticCostModel, parse_cluster
from executor.verify.shardy import lower_abstractly, shardy_collectives
from planner import make_plan
from planner.cost.reshard import reshard_steps
from planner.graph.trace import abstract, trace

pytestmark = pytest.mark.usefixtures("optimized")

SIDE = 64


def _found(mesh: AbstractMesh, src: tuple[int, ...], dst: tuple[int, ...]) -> Counter[str]:
    def spec(digits: tuple[int, ...]) -> NamedSharding:
        names = [
            tuple(n for n, at in zip(mesh.axis_names, digits, strict=True) if at == dim + 1)
            for dim in range(2)
        ]
        return NamedSharding(mesh, PartitionSpec(*[name or None for name in names]))

    step = jax.jit(lambda x: x, in_shardings=spec(src), out_shardings=spec(dst))
    shape = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    out: Counter[str] = Counter()
    for item in shardy_collectives(step.trace(shape).lower(lowering_platforms=("cpu",))):
        out[item.kind] += round(item.payload_bytes * item.count)
    return out


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2)])
def test_every_change_on_two_axes_is_priced_as_shardy_makes_it(sizes: tuple[int, int]) -> None:
    mesh = AbstractMesh(sizes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    model = AnalyticCostModel(parse_cluster("cpu:8"))
    for src, dst in itertools.product(itertools.product(range(3), repeat=2), repeat=2):
        planned: Counter[str] = Counter()
        for step in reshard_steps(src, dst, 2, 4.0 * SIDE * SIDE, sizes, model):
            planned[step.kind] += round(step.payload_bytes)
        assert planned == _found(mesh, src, dst), (src, dst)


def test_a_permutation_that_three_axes_need() -> None:
    mesh = AbstractMesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    found = _found(mesh, (1, 1, 2), (0, 1, 1))
    model = AnalyticCostModel(parse_cluster("cpu:8"))
    steps = reshard_steps((1, 1, 2), (0, 1, 1), 2, 4.0 * SIDE * SIDE, (2, 2, 2), model)
    assert {s.kind: round(s.payload_bytes) for s in steps} == dict(found)
    assert "permute" in found


def test_loops_are_multiplied_out() -> None:
    mesh = AbstractMesh((4,), ("a",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("a"))

    def step(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return carry + jnp.sum(carry), None

        return jax.lax.scan(body, x, None, length=7)[0]

    shape = jax.ShapeDtypeStruct((SIDE,), jnp.float32)
    jitted = jax.jit(step, in_shardings=split, out_shardings=split)
    found = shardy_collectives(jitted.trace(shape).lower(lowering_platforms=("cpu",)))
    assert [(c.kind, c.axes, c.count, c.payload_bytes) for c in found] == [
        ("all_reduce", ("a",), 7.0, 4.0)
    ]


def _mlp(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"])

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.mark.parametrize(
    ("mesh", "shardings"),
    [
        ("data=8", {"up": PartitionSpec("data"), "down": PartitionSpec("data")}),
        ("data=2,model=4", {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")}),
        ("data=4,model=2", {"up": PartitionSpec("data", "model"), "down": PartitionSpec("model")}),
    ],
)
def test_bytes_by_kind_of_a_train_step(mesh: str, shardings: dict[str, Any]) -> None:
    params = {
        "up": jax.ShapeDtypeStruct((256, 1024), jnp.float32),
        "down": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
    }
    args = (params, jax.ShapeDtypeStruct((512, 256), jnp.float32))
    pins = {f"'{name}'": spec for name, spec in shardings.items()}
    pins[r"^\[1\]"] = PartitionSpec("data")
    plan = make_plan(_mlp, *args, cluster="h100:8", mesh=mesh, shardings=pins)
    found: Counter[str] = Counter()
    for item in shardy_collectives(lower_abstractly(trace(_mlp, abstract(args)), plan)):
        found[item.kind] += round(item.count * item.payload_bytes)
    planned: Counter[str] = Counter()
    for row in plan.collectives:
        planned[row.kind] += round(row.count * row.payload_bytes)
    assert planned and planned.keys() == found.keys()
    for kind, nbytes in planned.items():
        assert nbytes == pytest.approx(found[kind], rel=0.02), kind
