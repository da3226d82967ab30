"""Steps with ``shard_map`` regions: their specs are met, their numbers are those of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from costmodels import parse_cluster
from executor import compile_plan, parallelize
from executor.verify.compiled import climb
from executor.verify.shardy import lower_abstractly, shardy_collectives
from planner import ModelError, PinError, RequestError, make_plan
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.rules.kernels.inside import inside
from planner.rules.kernels.regions import REGION

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]

ROWS, WIDTH, EXPERTS = 64, 32, 4


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    grid = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def mixture(mesh: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Rows go to the experts' devices and come back."""

    def region(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x.reshape(EXPERTS, -1, WIDTH)
        x = jax.lax.all_to_all(x, "expert", 0, 1, tiled=True)
        x = jnp.einsum("ebd,edf->ebf", x, w)
        x = jax.lax.all_to_all(x, "expert", 1, 0, tiled=True)
        return jnp.tanh(x.reshape(-1, WIDTH))

    both = P(("data", "expert"))
    return jax.shard_map(region, mesh=mesh, in_specs=(both, P("expert")), out_specs=both)


def step_of(layer: Callable[[jax.Array, jax.Array], jax.Array], layers: int = 2) -> Any:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, q: Any) -> tuple[jax.Array, None]:
            return x + layer(x @ q["in"], q["experts"]) @ q["out"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(block), x, p)[0] ** 2)

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - g, p, grads), value

    return step


def arguments(layers: int = 2) -> Any:
    draw = np.random.default_rng(0)
    shapes = {"in": (WIDTH, WIDTH), "experts": (EXPERTS, WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    params = {
        n: jnp.asarray(draw.normal(size=(layers, *s)) * 0.1, jnp.float32) for n, s in shapes.items()
    }
    return params, jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32)


def equal(step: Any, plan: Plan, args: Any) -> None:
    want, got = jax.jit(step)(*args), compile_plan(step, plan)(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "axes", [{"data": 2, "expert": 4}, {"expert": 4, "data": 2}, {"x": 1, "data": 4, "expert": 2}]
)
def test_what_is_around_a_region_meets_its_specs(axes: dict[str, int]) -> None:
    step, args = step_of(mixture(mesh_of(**axes))), arguments()
    if next(iter(axes)) == "expert":  # a dimension over both, in another order than the mesh
        with pytest.raises(RequestError, match="must stand in mesh order"):
            make_plan(step, *args, cluster="cpu:8")
        return
    plan = make_plan(step, *args, cluster="cpu:8")
    assert not plan.fallbacks
    assert dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)) == {
        n: k for n, k in axes.items() if k > 1
    }
    assert any("mesh: that of shard_map (test_regions_run.py:" in note for note in plan.notes)
    experts = plan.as_partition_specs()["[0]['experts']"]
    assert "expert" in str(experts)
    equal(step, plan, args)


def test_collectives_in_a_region_are_counted_as_written() -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    plan = make_plan(step, *args, cluster="cpu:8")
    mine = [c for c in plan.collectives if c.cause == REGION]
    sent = ROWS // 8 * WIDTH * 4
    moved = [c for c in mine if c.kind == "all_to_all"]
    # forward, the same again for the backward pass, and their transposes
    assert {(c.axes, c.payload_bytes) for c in moved} == {(("expert",), sent)}
    assert sum(c.count for c in moved) == 2 * 6
    weights = [c for c in mine if c.kind == "all_reduce"]
    assert {(c.axes, c.payload_bytes) for c in weights} == {(("data",), WIDTH * WIDTH * 4)}


def test_work_in_a_region_is_one_devices() -> None:
    mesh = mesh_of(data=2, expert=4)
    traced = jax.make_jaxpr(mixture(mesh))(
        jnp.ones((ROWS, WIDTH)), jnp.ones((EXPERTS, WIDTH, WIDTH))
    )
    (eqn,) = traced.eqns
    work, sends = inside(eqn.params["jaxpr"], {"data": 2, "expert": 4})
    assert {kind: flops for kind, flops, _ in work}["matmul"] == 2.0 * ROWS * WIDTH**2 / 8
    assert [(kind, axes, times) for kind, axes, _, times in sends] == [("all_to_all", (1,), 2.0)]


def test_regions_on_an_abstract_mesh() -> None:
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    step, args = step_of(mixture(mesh)), arguments()
    plan = make_plan(step, *args, cluster="cpu:8")
    concrete = step_of(mixture(mesh_of(data=2, expert=4)))
    want, got = jax.jit(concrete)(*args), compile_plan(step, plan)(*args)
    np.testing.assert_allclose(want[1], got[1], rtol=1e-5)


def test_axes_that_stay_automatic_are_the_planners() -> None:
    mesh = mesh_of(data=2, model=4)

    def region(x: jax.Array) -> jax.Array:
        return x - jax.lax.pmean(x.mean(0, keepdims=True), "data")

    centered = jax.shard_map(
        region, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )

    def step(w: Any, x: jax.Array) -> Any:
        loss = lambda w: jnp.mean((centered(jnp.tanh(x @ w[0])) @ w[1]) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - g, w, grads), value

    draw = np.random.default_rng(0)
    w = [jnp.asarray(draw.normal(size=s) * 0.1, jnp.float32) for s in ((WIDTH, 64), (64, WIDTH))]
    x = jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32)
    plan = make_plan(step, w, x, cluster="cpu:8")
    assert not plan.fallbacks and plan.mesh.names == ("data", "model")
    equal(step, plan, (w, x))


def test_a_step_is_parallelized_as_it_is() -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    run = parallelize(step)
    for a, b in zip(
        jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(run(*args)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_data_parallelism_computes_regions_whole() -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    plan = make_plan(step, *args, cluster="cpu:8", mode="DATA_PARALLEL")
    assert "shard_map (test_regions_run.py:" in plan.fallbacks[0]
    equal(step, plan, args)


def test_regions_of_one_device_and_on_one_device_are_named() -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    with pytest.raises(RequestError, match="STAND_ALONE runs on one device, shard_map"):
        make_plan(step, *args, cluster="cpu:1", mode="STAND_ALONE")
    alone = step_of(mixture(mesh_of(data=1, expert=1)))
    with pytest.raises(RequestError, match="on a mesh of 1 device; the cluster cpu:8 has 8"):
        make_plan(alone, *args, cluster="cpu:8")


def test_literals_reach_a_region_through_calls() -> None:
    mesh = mesh_of(data=8)
    scaled = jax.shard_map(
        lambda x, s: x * s, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        made = jax.jit(lambda x, s: scaled(x, s))(x @ w, 2.0)
        return jax.checkpoint(lambda x, s: scaled(x, s))(made, 3.0)  # type: ignore[no-any-return]

    draw = np.random.default_rng(0)
    args = [jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((WIDTH, WIDTH), (ROWS, WIDTH))]
    plan = make_plan(step, *args, cluster="cpu:8")
    np.testing.assert_allclose(compile_plan(step, plan)(*args), step(*args), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("cluster", "mesh", "said"),
    [
        ("cpu:4", None, "8 devices; the cluster cpu:4 has 4: build a mesh with the same number"),
        ("cpu:8", "data=8", "runs on a mesh of data=2,expert=4, mesh= says data=8"),
    ],
)
def test_meshes_that_do_not_match_are_named(cluster: str, mesh: str | None, said: str) -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    with pytest.raises(RequestError, match=r"shard_map \(test_regions_run.py:\d+\)") as error:
        make_plan(step, *args, cluster=cluster, mesh=mesh)
    assert said in str(error.value)


def test_regions_on_two_meshes_are_refused() -> None:
    first, second = mixture(mesh_of(data=2, expert=4)), mixture(mesh_of(data=4, expert=2))
    args = arguments()
    with pytest.raises(RequestError, match="a step has one mesh"):
        make_plan(step_of(lambda x, w: first(x, w) + second(x, w)), *args, cluster="cpu:8")


def on_two_meshes(model: Mesh, experts: Mesh) -> Any:
    """A mark on the model's mesh, a region on that of the experts."""

    def region(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.einsum("eij,bi->bj", w, x), "ep")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(model, P("fsdp")))
        f = jax.shard_map(region, mesh=experts, in_specs=(P("ep"), P()), out_specs=P())
        return jnp.mean(f(w, x) ** 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    return step


@pytest.mark.parametrize("axes", [{"ep": 8}, {"dp": 2, "ep": 4}])
@pytest.mark.parametrize("placed", [False, True])
def test_marks_on_another_mesh_over_the_same_devices(axes: dict[str, int], placed: bool) -> None:
    model = mesh_of(fsdp=8)
    step = on_two_meshes(model, mesh_of(**axes))
    w, x = jnp.ones((8, 16, 16)), jnp.arange(512.0).reshape(32, 16) / 512
    if placed:
        x = jax.device_put(x, NamedSharding(model, P("fsdp")))
    made = parallelize(step)
    got, expected = made(w, x), jax.jit(step)(w, x)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    assert dict(zip(made.plan.mesh.names, made.plan.mesh.sizes, strict=True)) == axes
    names = tuple(axes) if len(axes) > 1 else next(iter(axes))
    assert any(f"P({names!r})" == row.asked for row in made.plan.pins)


def test_marks_on_a_mesh_that_cuts_the_devices_otherwise_are_named() -> None:
    reordered = Mesh(np.array(jax.devices()[::-1]), ("fsdp",))
    with pytest.raises(PinError, match="no axis 'fsdp'"):
        parallelize(on_two_meshes(reordered, mesh_of(ep=8)))(
            jnp.ones((8, 16, 16)), jnp.ones((32, 16))
        )


def test_an_axis_of_another_size_than_the_regions_is_named() -> None:
    """It was taken for the regions' axis of that name."""
    model = mesh_of(fsdp=4, rest=2)
    with pytest.raises(PinError, match=r"its mesh has fsdp=4, .* regions run on fsdp=2"):
        parallelize(on_two_meshes(model, mesh_of(fsdp=2, ep=4)))(
            jnp.ones((8, 16, 16)), jnp.ones((32, 16))
        )


def test_microbatches_of_a_region_are_refused_by_name() -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    with pytest.raises(RequestError, match="shard_map"):
        make_plan(step, *args, cluster="cpu:8", microbatches=2)


def test_explicit_axes_are_named() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ModelError, match=r"build the mesh with axis_types=.*Auto"):
        make_plan(step_of(mixture(mesh)), *arguments(), cluster="cpu:8")


def test_a_step_under_pmap_runs_as_it_is() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * jax.lax.pmean(grad, "batch"), jax.lax.pmean(value, "batch")

    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) * 0.1, jnp.float32)
    x = jnp.asarray(draw.normal(size=(8, ROWS, WIDTH)), jnp.float32)
    many, args = jax.pmap(step, axis_name="batch"), (jnp.stack([w] * 8), x)
    plan = make_plan(many, *args, cluster="cpu:8")
    assert str(plan.mesh) == "batch=8" and not plan.fallbacks
    for a, b in zip(many(*args), compile_plan(many, plan)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with pytest.raises(ModelError, match="leave collectives over that axis out"):
        make_plan(step, w, x[0], cluster="cpu:8")


def test_axes_of_one_device_leave_marks_free() -> None:
    mesh = mesh_of(data=8, tensor=1)
    where = NamedSharding(mesh, P(None, "tensor"))
    center = jax.shard_map(
        lambda x: x - jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return center(jax.lax.with_sharding_constraint(jnp.tanh(x @ w), where)) @ w

    args = (jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    plan = make_plan(step, *args, cluster="cpu:8", shardings={r"\[0\]": P("tensor")})
    assert str(plan.mesh) == "data=8"


def test_gradients_that_a_region_leaves_whole_are_stacked_sharded() -> None:
    """The stack of a scan is not as whole as the slices that a region makes."""
    mesh = mesh_of(data=8)
    layers, wide = 4, 8 * WIDTH

    def region(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ v

    both = jax.shard_map(region, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))

    def step(p: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda x, q: (x + both(x, *q), None), x, p)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, g: a - g, p, grads), value

    draw = np.random.default_rng(0)
    shapes = ((layers, WIDTH, wide), (layers, wide, WIDTH))
    p = tuple(jnp.asarray(draw.normal(size=s) * 0.1, jnp.float32) for s in shapes)
    x = jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32)
    plan = make_plan(step, p, x, cluster="h100:8", zero=3, memory="300kB")
    stacks = [a for a in plan.activations if a.name == "loop_ys" and a.shape in shapes]
    assert stacks and all("data" in str(a.spec) for a in stacks)
    equal(step, plan, (p, x))


def test_shardy_puts_the_planned_collectives_around_a_region() -> None:
    step, args = step_of(mixture(mesh_of(data=2, expert=4))), arguments()
    plan = make_plan(step, *args, cluster="cpu:8")
    traced = trace(step, args)
    found = shardy_collectives(lower_abstractly(traced, plan))
    want = [(c.kind, c.count, c.payload_bytes) for c in plan.collectives if c.cause != REGION]
    assert sorted((c.kind, c.count, c.payload_bytes) for c in found) == sorted(want)
    rung = climb(traced, plan, parse_cluster("cpu:8")).rungs[0]
    assert all(row.passed for row in rung.rows)
    assert any("inside of shard_map" in note for note in rung.notes)
