"""Meshes with many axes of one device, and names in Flax metadata that are no mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from executor import parallelize
from planner import PinError, make_plan
from planner.annotate import Pin
from planner.request.pins import in_pinned_order
from planner.spec import MeshSpec

P = PartitionSpec
ONES = ("stage", "context", "tensor", "sequence", "expert", "autoregressive", "dcn")


def struct(*shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def user_mesh() -> Mesh:
    """Eight axes, of which one has devices."""
    return Mesh(np.array(jax.devices()[:8]).reshape(1, 8, *[1] * 6), ("data", "fsdp", *ONES[:6]))


def marked(w: jax.Array, x: jax.Array) -> jax.Array:
    """A step with a mark that names axes of one device, too."""
    spec = P(("data", "fsdp"), ("context", "tensor"))
    h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(user_mesh(), spec))
    return w - 0.1 * x.T @ jnp.tanh(h)


@pytest.mark.devices
def test_axes_of_one_device_split_nothing() -> None:
    placed = NamedSharding(user_mesh(), P("fsdp", "stage"))
    args = (struct(64, 64, sharding=placed), struct(128, 64, sharding=placed))
    plan = make_plan(marked, *args, cluster="cpu:8")
    assert plan.mesh == MeshSpec(("fsdp",), (8,))
    assert "mesh axes of one device are left out: data, stage, context" in plan.notes[-1]
    w, x = (np.random.default_rng(0).normal(size=a.shape).astype(np.float32) for a in args)
    arrays = [jax.device_put(a, placed) for a in (w, x)]
    found = parallelize(marked, cluster="cpu:8")(*arrays)
    np.testing.assert_allclose(found, w - 0.1 * x.T @ np.tanh(x @ w), rtol=1e-4, atol=1e-5)


def test_a_given_mesh_of_many_axes() -> None:
    text = ",".join(["data=8", *(f"{name}=1" for name in ONES)])
    plan = make_plan(
        lambda w, x: x @ w, struct(64, 64), struct(128, 64), cluster="h100:8", mesh=text
    )
    assert plan.mesh == MeshSpec(("data",), (8,))
    three = "data=8,stage=1,model=1"  # as it is: few axes cost nothing
    plan = make_plan(
        lambda w, x: x @ w, struct(64, 64), struct(128, 64), cluster="h100:8", mesh=three
    )
    assert str(plan.mesh) == three


def test_an_order_in_which_every_dimension_names_its_axes() -> None:
    pins = [Pin(0, (("a", "b"), None), ""), Pin(1, (None, ("c", "a")), "")]
    assert in_pinned_order(("a", "b", "c", "d"), pins).index("c") < 1
    against = [*pins, Pin(2, (("b", "c"),), "")]
    assert in_pinned_order(("a", "b", "c", "d"), against) == ("a", "b", "c", "d")


class Net(nnx.Module):
    """Two matrices with logical names."""

    def __init__(self, up: Any, down: Any, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        named = {"rngs": rngs, "use_bias": False, "kernel_init": init}
        self.up = nnx.Linear(64, 256, kernel_metadata={"out_sharding": up}, **named)
        self.down = nnx.Linear(256, 64, kernel_metadata={"out_sharding": down}, **named)


def planned(rules: Any, mesh: str | None, up: Any, down: Any, **options: Any) -> Any:
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Net(up, down, nnx.Rngs(0))))

    def step(state: Any, x: jax.Array) -> Any:
        def loss(s: Any) -> jax.Array:
            net = nnx.merge(graph, s)
            return jnp.mean((net.down(jnp.tanh(net.up(x))) - x) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    with nn.logical_axis_rules(rules):
        return make_plan(step, state, struct(128, 64), cluster="h100:8", mesh=mesh, **options)


EMBED = (("embed", "mlp"), ("mlp", "embed"))
IGNORED = "Flax metadata: embed: no rule and no mesh axis of that name, ignored"


@pytest.mark.parametrize("mesh", [None, "data=4,model=2"])
def test_a_name_without_a_rule_beside_others_with_one(mesh: str | None) -> None:
    plan = planned((("mlp", "model"),), mesh, *EMBED)
    assert "embed" not in plan.mesh.names and plan.notes[0] == IGNORED
    specs = plan.as_partition_specs()
    assert tuple(specs["[0]['up']['kernel'].value"])[1] == "model"


@pytest.mark.devices
@pytest.mark.parametrize("spec", [P(), P("data")], ids=["whole", "split"])
def test_metadata_of_an_array_on_a_mesh_holds_unless_the_array_is_split(spec: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    value = struct(64, 256, sharding=NamedSharding(mesh, spec))
    boxed = nn.Partitioned(value, names=(None, "model"))

    def step(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w.value)

    plan = make_plan(step, boxed, struct(128, 64), cluster="cpu:8", mesh="data=4,model=2")
    stored = next(leaf.spec.dims for leaf in plan.inputs if leaf.path.startswith("[0]"))
    assert stored == (((), ("model",)) if spec == P() else (("data",), ()))


def test_names_that_are_mesh_axes_are_kept_beside_rules() -> None:
    plan = planned((("mlp", "model"),), "data=4,model=2", ("data", "mlp"), ("mlp", None))
    assert tuple(plan.as_partition_specs()["[0]['up']['kernel'].value"]) == ("data", "model")
    assert not any("Flax metadata" in note for note in plan.notes)


def test_more_names_than_a_mesh_has_axes() -> None:
    plan = planned((), None, ("embed", "mlp"), ("heads", "norm"))
    said, _, rest = plan.notes[0].removeprefix("Flax metadata: ").partition(": ")
    assert set(said.split(", ")) == {"embed", "mlp", "heads", "norm"}
    assert rest.endswith("ignored; if they are logical names, pass logical_axis_rules")


def test_a_given_mesh_without_the_axis_and_no_rules() -> None:
    with pytest.raises(PinError, match=r"no axis.*a logical name needs logical_axis_rules"):
        planned((), "data=4,model=2", *EMBED)


@pytest.mark.devices
def test_logical_rules_around_a_region_on_the_users_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))

    def region(w: jax.Array, x: jax.Array) -> jax.Array:
        f = jax.shard_map(
            lambda a, b: a @ b, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp")
        )
        return w - 0.1 * x.T @ nn.with_logical_constraint(f(x, w), ("batch", None))

    with nn.logical_axis_rules((("batch", "fsdp"),)):
        plan = make_plan(region, struct(64, 64), struct(128, 64), cluster="cpu:8")
    assert plan.mesh == MeshSpec(("fsdp",), (8,))
    assert any("P('fsdp', None)" in str(row) for row in plan.pins)
