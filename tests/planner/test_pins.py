"""Pins and modes: every mark is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from planner import MODES, PinError, Plan, RequestError, make_plan, shard
from planner.annotate import FREE, MARK, mark_entries
from planner.graph.trace import trace
from planner.modes import check_mode, get_parallel_mode, set_parallel_mode
from planner.planning import plan_step
from planner.spec import Sharding

MESH = "data=4,model=2"


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: dict[str, jax.Array], x: jax.Array) -> Any:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


W = {"a": struct(256, 1024), "b": struct(1024, 256)}
X = struct(512, 256)


def specs(plan: Plan) -> dict[str, Any]:
    return {path: tuple(spec) for path, spec in plan.as_partition_specs().items()}


# ---- ways to pin -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [P(None, "model"), P("data"), P("model", "data"), P(("data", "model")), P(), P("data", None)],
)
def test_rules_over_paths_are_honoured(spec: P) -> None:
    plan = make_plan(step, W, X, cluster="cpu:8", mesh=MESH, shardings={r"'a'": spec})
    while spec and spec[-1] is None:
        spec = P(*spec[:-1])
    assert specs(plan)["[0]['a']"] == tuple(spec)
    outputs = {leaf.path: leaf.spec.entries for leaf in plan.outputs}
    assert outputs["[0]['a']"] == tuple(spec)  # the new parameters come back alike


def test_the_first_matching_rule_wins() -> None:
    rules = {r"'a'": P("data"), r"^\[0\]": P(None, "model")}
    plan = make_plan(step, W, X, cluster="cpu:8", mesh=MESH, shardings=rules)
    assert specs(plan)["[0]['a']"] == ("data",)
    assert specs(plan)["[0]['b']"] == (None, "model")


def test_marks_inside_the_model_are_honoured() -> None:
    def marked(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = shard(jnp.tanh(x @ w["a"]), "data", "model")
        return shard(hidden @ w["b"], ("data", "model")) * 2

    plan = make_plan(marked, W, X, cluster="cpu:8", mesh=MESH)
    assert plan.outputs[0].spec.entries == (("data", "model"),)
    graph = trace(marked, (W, X)).graph
    (dot, _) = [op.index for op in graph.ops if op.kind == "dot_general"]
    (made,) = [c for c in plan.constraints if (c.op, c.slot) == (dot, "out")]
    marks = [c for c in plan.constraints if graph.ops[c.op].kind == MARK]
    # told where the value is made, or at the mark when it is made otherwise
    assert (marks or [made])[0].spec.entries == ("data", "model")


def test_with_sharding_constraint_is_honoured() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrained(x: jax.Array) -> Any:
        y = jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P(None, "data")))
        return {"y": y * 2}

    plan = make_plan(constrained, struct(64, 64), cluster="cpu:8", mesh=MESH)
    assert plan.outputs[0].spec.entries == (None, "data")


def test_linen_metadata_is_honoured() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(64, kernel_init=init)(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), struct(32, 16))

    def train(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: Model().apply(p, x).sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x.sum()

    plan = make_plan(train, params, struct(32, 16), cluster="cpu:8", mesh=MESH)
    (kernel,) = [leaf for leaf in plan.inputs if "kernel" in leaf.path]
    assert kernel.spec.entries == (None, "model")
    with pytest.raises(PinError, match=r"Flax metadata at .*kernel.*no axis 'model'"):
        make_plan(train, params, struct(32, 16), cluster="cpu:8", mesh="data=8")


@pytest.mark.filterwarnings("ignore:.*sharding_names.*:DeprecationWarning")
@pytest.mark.parametrize("key", ["sharding_names", "out_sharding"])
def test_nnx_metadata_is_honoured(key: str) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            names: dict[str, Any] = {key: (None, "model"), "eager_sharding": False}
            self.w = nnx.Param(jnp.ones((16, 64)), **names)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    graphdef, state = nnx.split(nnx.eval_shape(Model))

    def train(state: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p: p * 0.9, state), nnx.merge(graphdef, state)(x).sum()

    plan = make_plan(train, state, struct(32, 16), cluster="cpu:8", mesh=MESH)
    assert plan.inputs[0].spec.entries == (None, "model")
    with pytest.raises(PinError, match=r"Flax metadata at .*'w'.*no axis 'model'"):
        make_plan(train, state, struct(32, 16), cluster="cpu:8", mesh="data=8")


def test_axis_names_of_pins_name_the_mesh() -> None:
    plan = make_plan(step, W, X, cluster="cpu:8", shardings={r"'a'": P(None, "expert")})
    assert plan.mesh.names[1] == "expert"  # the other has one device, or splits the batch
    assert plan.mesh.num_devices == 8
    expected = (None, "expert") if plan.mesh.size("expert") > 1 else ()
    assert specs(plan)["[0]['a']"] == expected


# ---- refusals ----------------------------------------------------------------------------


def refused(text: str, *args: Any, function: Any = step, **options: Any) -> None:
    with pytest.raises(PinError, match=text):
        make_plan(function, *args, cluster="cpu:8", **{"mesh": MESH, **options})


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    narrow = {"a": struct(256, 6), "b": struct(6, 256)}
    text = r"\[0\]\['a'\]: float32\[256,6\].*dimension 1 has size 6, which 4 devices of data"
    refused(text, narrow, X, shardings={r"'a'": P(None, "data")})


def test_an_unknown_axis_is_refused() -> None:
    text = r"\[0\]\['a'\].*mesh \(data=4,model=2\) has no axis 'expert'"
    refused(text, W, X, shardings={r"'a'": P(None, "expert")})


def test_too_many_entries_and_one_axis_twice_are_refused() -> None:
    refused(r"names 3 dimensions", W, X, shardings={r"'a'": P(None, None, "model")})
    refused(r"a mesh axis for two", W, X, shardings={r"'a'": P("model", "model")})
    refused(r"must stand in mesh order", W, X, shardings={r"'a'": P(("model", "data"))})


def test_two_arguments_of_one_operation_may_be_pinned_differently() -> None:
    rules = {r"^\[0\]": P(None, "model"), r"^\[1\]": P("data")}
    shape = struct(32, 16)
    plan = make_plan(lambda a, b: a + b, shape, shape, cluster="cpu:8", mesh=MESH, shardings=rules)
    assert list(specs(plan).values()) == [(None, "model"), ("data",)]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def sequence_parallel(mesh: Any, entries: tuple[Any, Any, Any]) -> Any:
    """Megatron's marks around a norm and a product, forward and, by ``jax.grad``, backward."""

    def mark(x: jax.Array, spec: Any) -> jax.Array:
        if mesh is None:
            return shard(x, *spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    around, inside, hidden = entries

    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for _ in range(2):
            h = mark(norm(mark(x, around), w["scale"]), inside)
            h = mark(jnp.tanh(h @ w["a"]), hidden)
            x = x + mark(h @ w["b"], around)
        return jnp.mean(x**2)

    def step(w: dict[str, jax.Array], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


SEQUENCE = (("data", "model", None), ("data", None, None), ("data", None, "model"))
NORMED = {**W, "scale": struct(256)}


@pytest.mark.parametrize("how", ["shard", "constraint"])
def test_marks_on_both_sides_of_a_norm_split_its_group(how: str) -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    function = sequence_parallel(None if how == "shard" else mesh, SEQUENCE)
    x = struct(8, 64, 256)
    planned = plan_step(function, NORMED, x, cluster="cpu:8", mesh=MESH)
    traced = trace(function, (NORMED, x))
    seen = set()
    for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True):
        asked = None if eqn is None else mark_entries(op.kind, eqn.params)
        if asked is not None:
            seen.add(asked)
            assert planned.extraction.value_sharding(op.outputs[0]) == Sharding.of(asked, 3)
    assert seen == set(SEQUENCE)


# ---- axes of one device ------------------------------------------------------------------


def one_device(names: tuple[str, ...]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(names)), names)


@pytest.mark.long
@pytest.mark.parametrize(
    "entries", [SEQUENCE, ((),) * 3, (("rows",), (None, "rows"), ("columns",))]
)
def test_a_constraint_on_a_mesh_of_one_device_is_no_mark(entries: Any) -> None:
    x, options = struct(64, 64, 256), {"cluster": "h100:8"}
    names = ("data", "model") if entries is SEQUENCE else ("rows", "columns")
    marked = make_plan(sequence_parallel(one_device(names), entries), NORMED, x, **options)
    free = (P.UNCONSTRAINED,) * 3
    bare = make_plan(sequence_parallel(None, (free,) * 3), NORMED, x, **options)
    assert marked.mesh == bare.mesh and not marked.pins
    found, expected = marked.prediction, bare.prediction  # groups are not cut at the same places
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-6)
    assert found.communication_s == pytest.approx(expected.communication_s, rel=1e-6)
    assert found.peak_bytes == expected.peak_bytes


def test_an_axis_of_size_one_leaves_its_dimension_free() -> None:
    mesh = AbstractMesh((8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def entries(*spec: Any) -> Any:
        return mark_entries("sharding_constraint", {"sharding": NamedSharding(mesh, P(*spec))})

    assert entries("data", "model") == ("data", P.UNCONSTRAINED)
    assert entries(("data", "model"), None) == ("data", None)
    assert entries(None, "model") is None and entries(("model",)) is None
    assert entries() == () and entries(None, "data") == (None, "data")
    placed = jax.ShapeDtypeStruct((256, 1024), "float32", sharding=NamedSharding(mesh, P("model")))
    plan = make_plan(step, {"a": placed, "b": W["b"]}, X, cluster="cpu:8")
    assert not plan.pins


def test_a_rule_and_metadata_that_disagree_are_refused() -> None:
    box = nn.Partitioned(struct(32, 16), names=("data", None))  # type: ignore[arg-type]
    text = r"Flax metadata at \[0\].* contradicts shardings"
    refused(text, box, function=lambda b: b.value * 2, shardings={"0": P("model")})


def test_a_rule_that_matches_nothing_is_refused() -> None:
    refused(r"no argument path matches 'dense'.*\[0\]\['a'\]", W, X, shardings={"dense": P("data")})


def test_a_path_as_it_is_printed_is_a_rule() -> None:
    plan = make_plan(
        step, W, X, cluster="cpu:8", mesh=MESH, shardings={"[0]['a']": P("data", "model")}
    )
    assert plan.as_partition_specs()["[0]['a']"] == P("data", "model")
    refused(r"no argument path matches '0/b'; the nearest are .*'b'", W, X, shardings={"0/b": P()})


def test_a_dimension_that_an_operation_needs_whole_is_refused() -> None:
    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()

    text = r"\[0\].*can't be sharded as P\('data'\).*needs dimension 0 whole"
    refused(text, struct(8, 16, 16), struct(32, 16), function=layers, shardings={"0": P("data")})


def test_a_mark_in_the_model_is_refused_with_the_users_line() -> None:
    def marked(x: jax.Array) -> jax.Array:
        return shard(jnp.tanh(x), "nope") * 2

    line = marked.__code__.co_firstlineno + 1
    refused(rf"test_pins.py:{line}: mark P\('nope'\).*no axis 'nope'", X, function=marked)


def test_too_many_entries_of_a_mark() -> None:
    with pytest.raises(PinError, match=r"got 3 entries .* shape \(4, 4\); expected at most 2"):
        shard(jnp.ones((4, 4)), "a", None, "b")


def test_a_mesh_that_cannot_hold_a_pin_is_passed_over() -> None:
    narrow = {"a": struct(256, 4), "b": struct(4, 256)}
    plan = make_plan(step, narrow, X, cluster="cpu:8", shardings={r"'a'": P(None, "model")})
    assert plan.mesh.size("model") in (2, 4)


def test_a_broken_regular_expression_is_a_request_error() -> None:
    with pytest.raises(RequestError):
        make_plan(step, W, X, cluster="cpu:8", shardings={"[": P("data")})


def test_an_unconstrained_dimension_is_the_planners() -> None:
    options: dict[str, Any] = {"cluster": "cpu:8", "mesh": MESH, "search": "sharding_propagation"}
    rules = {r"'a'": P("data", P.UNCONSTRAINED), r"'b'": P("model", None)}
    plan = make_plan(step, W, X, shardings=rules, **options)
    # b is split over model where a's second dimension is contracted with it
    assert specs(plan)["[0]['a']"] == ("data", "model")
    whole = {r"'a'": P("data", None), r"'b'": P("model", None)}
    plan = make_plan(step, W, X, shardings=whole, **options)
    assert specs(plan)["[0]['a']"] == ("data",)


@pytest.mark.parametrize("how", ["shard", "constraint"])
def test_a_partial_mark_inside_holds_what_it_says(how: str) -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    entries = ("data", P.UNCONSTRAINED)

    def marked(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w["a"])
        if how == "shard":
            hidden = shard(hidden, *entries)
        else:
            hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P(*entries)))
        return hidden * 2

    rules = {r"'a'": P(None, "model"), r"^\[1\]": P()}
    plan = make_plan(marked, W, X, cluster="cpu:8", mesh=MESH, shardings=rules)
    assert plan.outputs[0].spec.entries[0] == "data"
    other = {r"'a'": P(None, "data"), r"^\[1\]": P()}
    plan = make_plan(marked, W, X, cluster="cpu:8", mesh=MESH, shardings=other)
    assert plan.outputs[0].spec.entries[0] == "data"


def test_shardings_of_the_arguments_are_honoured_and_name_the_mesh() -> None:
    mesh = AbstractMesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P(None, "columns"))
    w = {"a": jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=split), "b": W["b"]}
    plan = make_plan(step, w, X, cluster="cpu:8")
    assert str(plan.mesh) == "rows=2,columns=4"
    assert specs(plan)["[0]['a']"] == (None, "columns")
    ruled = make_plan(step, w, X, cluster="cpu:8", shardings={r"'a'": split})
    assert specs(ruled)["[0]['a']"] == (None, "columns")
    whole = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))
    plan = make_plan(step, {"a": whole, "b": W["b"]}, X, cluster="cpu:8", mesh="data=8")
    assert str(plan.mesh) == "data=8"


# ---- logical axis rules ------------------------------------------------------------------

RULES = (("batch", "data"), ("mlp", ("model",)), ("embed", None))


class Logical(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        h = nn.Dense(64, kernel_init=init, use_bias=False)(x)
        return nn.with_logical_constraint(jnp.tanh(h), ("batch", "mlp")) * 2


def logical(params: Any, x: jax.Array) -> Any:
    return Logical().apply(params, x)


def logical_args() -> tuple[Any, Any]:
    return jax.eval_shape(Logical().init, jax.random.key(0), struct(32, 16)), struct(32, 16)


def test_logical_axis_rules_reach_parameters_and_constraints() -> None:
    args = logical_args()
    plan = make_plan(logical, *args, cluster="cpu:8", mesh=MESH, logical_axis_rules=RULES)
    assert plan.inputs[0].spec.entries == (None, "model")
    assert plan.outputs[0].spec.entries == ("data", "model")
    with nn.logical_axis_rules(RULES):
        assert make_plan(logical, *args, cluster="cpu:8", mesh=MESH) == plan


def test_logical_names_without_rules_say_nothing() -> None:
    plan = make_plan(logical, *logical_args(), cluster="cpu:8")
    assert not {"embed", "mlp"} & set(plan.mesh.names)


def test_nnx_names_go_through_their_own_rules_and_the_given_ones() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            own: dict[str, Any] = {"sharding_rules": (("mlp", "model"),), "eager_sharding": False}
            self.a = nnx.Param(jnp.ones((16, 64)), out_sharding=("embed", "mlp"), **own)
            self.b = nnx.Param(jnp.ones((64, 16)), out_sharding=("model", None), **own)

    graphdef, state = nnx.split(nnx.eval_shape(Model))

    def train(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return (x @ model.a[...] @ model.b[...]).sum()

    rules = (("embed", "data"),)
    plan = make_plan(
        train, state, struct(32, 16), cluster="cpu:8", mesh=MESH, logical_axis_rules=rules
    )
    assert [leaf.spec.entries for leaf in plan.inputs[:2]] == [("data", "model"), ("model",)]


@pytest.mark.parametrize("rule", [("mlp",), "mlp", (3, "model"), ("mlp", 4), ("mlp", ("a", 1))])
def test_a_broken_logical_rule_is_refused(rule: Any) -> None:
    with pytest.raises(RequestError, match=r"logical_axis_rules: got .*expected a pair"):
        make_plan(step, W, X, cluster="cpu:8", logical_axis_rules=(RULES[0], rule))


# ---- sharding_propagation ----------------------------------------------------------------


def test_sharding_propagation_completes_the_marks_without_resharding() -> None:
    rules = {r"'a'": P(None, "model"), r"^\[1\]": P("data")}
    plan = planned("AUTO_PARALLEL", search="sharding_propagation", mesh=MESH, shardings=rules)
    assert plan.search.name == "sharding_propagation"
    assert specs(plan)["[0]['b']"] == ("model",)  # what a's split makes of the hidden dimension
    assert {row.kind for row in plan.collectives} == {"all_reduce"}


# ---- modes -------------------------------------------------------------------------------


def planned(mode: str, **options: Any) -> Plan:
    return make_plan(step, W, X, **{"cluster": "cpu:8", "mode": mode, **options})


def test_data_parallel_replicates_parameters_and_splits_the_batch() -> None:
    plan = planned("DATA_PARALLEL")
    assert str(plan.mesh) == "data=8"
    assert specs(plan) == {"[0]['a']": (), "[0]['b']": (), "[1]": ("data",)}
    assert [leaf.spec.entries for leaf in plan.outputs[:2]] == [(), ()]


def test_data_parallel_of_a_batch_that_does_not_divide_is_replicated() -> None:
    plan = make_plan(step, W, struct(9, 256), cluster="cpu:8", mode="DATA_PARALLEL")
    assert specs(plan)["[1]"] == ()


def test_data_parallel_computes_on_the_split_batch() -> None:
    plan = planned("DATA_PARALLEL")
    assert {row.kind for row in plan.collectives} == {"all_reduce"}
    assert all(leaf.used_as is None for leaf in plan.inputs)


def test_stand_alone_is_one_device() -> None:
    plan = planned("STAND_ALONE")
    assert plan.mesh.num_devices == 1
    assert not plan.collectives
    for leaf in (*plan.inputs, *plan.outputs):
        assert leaf.spec.entries == ()
    assert all(not c.spec.axes for c in plan.constraints)


def test_hybrid_keeps_the_marks_and_replicates_other_inputs() -> None:
    plan = planned("HYBRID_PARALLEL", mesh=MESH, shardings={r"'a'": P(None, "model")})
    assert specs(plan) == {"[0]['a']": (None, "model"), "[0]['b']": (), "[1]": ()}


def test_hybrid_without_marks_replicates_everything() -> None:
    plan = planned("HYBRID_PARALLEL", mesh=MESH)
    assert not plan.collectives
    assert all(not c.spec.axes for c in plan.constraints)


def test_semi_auto_completes_the_marks_with_data_parallelism() -> None:
    plan = planned("SEMI_AUTO_PARALLEL", mesh=MESH, shardings={r"'a'": P(None, "model")})
    assert specs(plan) == {"[0]['a']": (None, "model"), "[0]['b']": (), "[1]": ("data",)}


def test_auto_keeps_the_marks_and_is_never_slower_than_the_other_modes() -> None:
    rules = {r"'a'": P(None, "model")}
    auto = planned("AUTO_PARALLEL", mesh=MESH, shardings=rules)
    assert specs(auto)["[0]['a']"] == (None, "model")
    for mode in ("HYBRID_PARALLEL", "SEMI_AUTO_PARALLEL"):
        other = planned(mode, mesh=MESH, shardings=rules)
        assert auto.prediction.step_s <= other.prediction.step_s * (1 + 1e-9)


def test_the_process_wide_mode_is_used_and_restored() -> None:
    before = get_parallel_mode()
    try:
        assert set_parallel_mode("STAND_ALONE", search="ilp") == before
        plan = make_plan(step, W, X, cluster="cpu:8")
        assert (plan.mode, plan.mesh.num_devices) == ("STAND_ALONE", 1)
        assert plan.search.name == "ilp"
        assert make_plan(step, W, X, cluster="cpu:8", mode="DATA_PARALLEL").mode == "DATA_PARALLEL"
        with pytest.raises(RequestError, match="unknown parallel mode"):
            set_parallel_mode("FAST")
        assert get_parallel_mode().mode == "STAND_ALONE"
    finally:
        set_parallel_mode(before.mode, search=before.search)


def test_how_updates_are_shared_is_part_of_the_mode() -> None:
    set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=4)
    found = get_parallel_mode()
    assert (found.update, found.staleness) == ("ssp", 4)
    with pytest.raises(RequestError, match=r"no one step of all devices.*parameter_server\.train"):
        make_plan(step, W, X, cluster="cpu:8")
    assert make_plan(step, W, X, cluster="cpu:8", mode="DATA_PARALLEL").mode == "DATA_PARALLEL"
    assert set_parallel_mode("DATA_PARALLEL") == found
    assert make_plan(step, W, X, cluster="cpu:8").mode == "DATA_PARALLEL"


@pytest.mark.parametrize(
    ("mode", "options", "text"),
    [
        ("DATA_PARALLEL", {"update": "often"}, "unknown update 'often'; expected one of sync, ssp"),
        ("AUTO_PARALLEL", {"update": "async"}, "in mode AUTO_PARALLEL: expected DATA_PARALLEL"),
        ("DATA_PARALLEL", {"staleness": 4}, "staleness=4 with update='sync'"),
        ("DATA_PARALLEL", {"update": "ssp", "staleness": -1}, "staleness=-1"),
    ],
)
def test_updates_that_have_no_meaning(mode: str, options: dict[str, Any], text: str) -> None:
    before = get_parallel_mode()
    with pytest.raises(RequestError, match=text):
        set_parallel_mode(mode, **options)
    assert get_parallel_mode() == before


def test_mode_names() -> None:
    for mode in MODES:
        assert check_mode(mode, "auto").mode == mode
    with pytest.raises(RequestError, match=r"unknown parallel mode 'auto'.*AUTO_PARALLEL"):
        check_mode("auto", "auto")
    with pytest.raises(RequestError, match=r"unknown search 'best'.*brute.*ilp"):
        check_mode("AUTO_PARALLEL", "best")


# ---- the numbers of a mark do not change -------------------------------------------------


@pytest.mark.long
def test_marks_pass_through_jit_grad_and_vmap() -> None:
    x = jnp.arange(12.0).reshape(3, 4)

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x) ** 2)

    def marked(x: jax.Array) -> jax.Array:
        return jnp.sum(shard(jnp.sin(shard(x, "data")), None, "model") ** 2)

    np.testing.assert_array_equal(marked(x), plain(x))
    np.testing.assert_array_equal(jax.jit(marked)(x), jax.jit(plain)(x))
    np.testing.assert_allclose(jax.grad(marked)(x), jax.grad(plain)(x), rtol=1e-6)
    hessian = jax.jacfwd(jax.grad(marked))(x), jax.jacfwd(jax.grad(plain))(x)
    np.testing.assert_allclose(*hessian, rtol=1e-6)
    batch = jnp.stack([x, x + 1])
    np.testing.assert_allclose(
        jax.vmap(jax.grad(marked))(batch), jax.vmap(jax.grad(plain))(batch), rtol=1e-6
    )
    np.testing.assert_allclose(jax.checkpoint(marked)(x), plain(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("axis", "entries"), [(0, (FREE, "data", "model")), (1, ("data", FREE, "model"))]
)
def test_vmap_puts_an_open_entry_at_the_mapped_dimension(
    axis: int, entries: tuple[Any, ...]
) -> None:
    graph = trace(jax.vmap(lambda x: shard(x, "data", "model"), in_axes=axis), (struct(2, 3, 4),))
    (mark,) = [e for e in graph.eqns if e is not None and e.name == MARK]
    assert mark.params["entries"] == entries


def test_the_gradient_of_a_mark_is_marked_alike() -> None:
    graph = trace(jax.grad(lambda x: jnp.sum(shard(jnp.sin(x), "data") ** 2)), (struct(8, 4),))
    marks = [e.params["entries"] for e in graph.eqns if e is not None and e.name == MARK]
    assert marks == [("data",), ("data",)]
