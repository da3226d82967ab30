"""Phases, roles and segments: equal for every way of writing a step, found in all of the zoo."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from planner.arguments.calls import bind
from planner.graph.ir import SCALAR, Graph, Op, Phase, Role, Value
from planner.graph.trace import trace
from tests.zoo.fast import FAST
from tests.zoo.running import load

LAYERS, WIDTH = 4, 16


def graph_of(step: Callable[..., Any], *args: Any) -> Graph:
    bound = bind(step, args)
    return trace(bound.function, bound.args).graph


def values_of(graph: Graph, role: Role) -> list[int]:
    return [v.index for v in graph.values if v.role is role]


def layer(x: jax.Array, p: Any) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return x + jnp.tanh((x * scale) @ p["w"] + p["b"])


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    for k in range(LAYERS):
        x = layer(x, jax.tree.map(lambda p, k=k: p[k], params))
    return jnp.mean(x**2)


def scanned(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2)


def rematerialised(params: Any, x: jax.Array) -> jax.Array:
    for k in range(LAYERS):
        x = jax.checkpoint(layer)(x, jax.tree.map(lambda p, k=k: p[k], params))
    return jnp.mean(x**2)


def scanned_remat(params: Any, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda x, p: (layer(x, p), None))
    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


def train_step(loss: Callable[..., jax.Array]) -> Graph:
    """One Adam step, with clipping by the global norm."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {"w": jnp.zeros((LAYERS, WIDTH, WIDTH)), "b": jnp.zeros((LAYERS, WIDTH))}
    return graph_of(step, {"params": params, "opt": optimizer.init(params)}, jnp.zeros((8, WIDTH)))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.zeros((WIDTH, WIDTH)))
        self.b = nnx.Param(jnp.zeros((WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer(x, {"w": self.w[...], "b": self.b[...]})


def nnx_step() -> Graph:
    model = nnx.List([Layer(nnx.Rngs(0)) for _ in range(LAYERS)])
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            h = x
            for one in model:
                h = one(h)
            return jnp.mean(h**2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return graph_of(step, model, optimizer, jnp.zeros((8, WIDTH)))


FORMS = {
    "unrolled": lambda: train_step(unrolled),
    "scanned": lambda: train_step(scanned),
    "rematerialised": lambda: train_step(rematerialised),
    "scanned and rematerialised": lambda: train_step(scanned_remat),
    "NNX": nnx_step,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_of_writing_a_step_is_labelled_alike(form: str) -> None:
    graph = FORMS[form]()
    parts = LAYERS if form == "NNX" else 1
    parameters = values_of(graph, Role.PARAMETER)
    assert len(parameters) == 2 * parts
    # two moments each, and Adam's count
    moments = [v for v in values_of(graph, Role.MOMENT) if graph.values[v].shape]
    assert sorted(graph.values[v].of for v in moments) == sorted(2 * parameters)
    for moment in moments:
        assert graph.values[moment].shape == graph.values[graph.values[moment].of].shape
    assert len(values_of(graph, Role.BATCH)) == 1
    assert all(
        graph.values[graph.next_values[p]].role is Role.NEXT for p in (*parameters, *moments)
    )
    gradients = values_of(graph, Role.GRADIENT)
    assert {graph.values[g].of for g in gradients} == set(parameters)
    assert {op.phase for op in graph.ops} == set(Phase)


@pytest.mark.parametrize("form", FORMS)
def test_products_stand_in_the_phase_that_computes_them(form: str) -> None:
    """Two in the forward pass of a layer (one in a scan's body); two backward, one more where the
    pass computes the layer again."""
    graph = FORMS[form]()
    copies = 1 if form.startswith("scanned") else LAYERS
    products = [op.phase for op in graph.ops if op.kind == "dot_general"]
    again = copies if "remat" in form else 0
    assert products.count(Phase.FORWARD) == copies
    # of the first layer's input no gradient is needed, but a scan computes it
    assert products.count(Phase.BACKWARD) in (2 * copies + again, 2 * copies - 1 + again)
    assert products.count(Phase.UPDATE) == 0


def test_layers_are_segments() -> None:
    graph = nnx_step()
    counts: dict[int, set[int]] = {}
    for op in graph.ops:
        block, copy = op.segment
        if block >= 0:
            counts.setdefault(block, set()).add(copy)
            assert graph.blocks[block].start <= op.index < graph.blocks[block].end
    assert counts and all(
        copies == set(range(graph.blocks[block].count)) for block, copies in counts.items()
    )
    # one layer at an end is cut: what stands around it is not what stands between layers
    segments = [op.segment for op in graph.ops if op.kind == "tanh" and op.segment[0] >= 0]
    assert len({block for block, _ in segments}) == 1
    assert len(set(segments)) >= LAYERS - 1


@pytest.mark.long
def test_a_loop_over_steps_is_labelled_as_a_step() -> None:
    """Adam's moments reach the next turn's loss through the parameters, and are moments all the
    same; the state of an environment that is stepped beside is none."""
    adam = optax.adam(1e-3)

    def turn(carry: Any, k: jax.Array) -> Any:
        params, opt_state, env = carry
        cast = jax.tree.map(lambda p: p * 1.0, params)
        seen = jnp.sin(env["at"])
        loss, grads = jax.value_and_grad(unrolled)(cast, seen)
        updates, opt_state = adam.update(grads, opt_state, params)
        env = {"at": env["at"] + 0.1 * seen, "last": env["at"]}
        return (optax.apply_updates(params, updates), opt_state, env), loss

    def step(state: Any, keys: jax.Array) -> Any:
        return jax.lax.scan(turn, state, keys)

    params = {
        "w": jnp.zeros((LAYERS, WIDTH, WIDTH)),
        "b": jnp.zeros((LAYERS, WIDTH)),
    }
    env = {"at": jnp.zeros((8, WIDTH)), "last": jnp.zeros((8, WIDTH))}
    graph = graph_of(step, (params, adam.init(params), env), jnp.zeros(3))
    role = dict(zip(graph.input_paths, [graph.values[v].role for v in graph.inputs], strict=True))
    paths = {kind: [p for p in role if role[p] is kind] for kind in Role}
    assert paths[Role.PARAMETER] == ["[0][0]['b']", "[0][0]['w']"]
    assert [p for p in role if ".mu" in p or ".nu" in p] == [
        p for p in paths[Role.MOMENT] if "u[" in p
    ]
    assert paths[Role.EXAMPLES] == ["[0][2]['at']", "[0][2]['last']"]
    inside = [op for op in graph.ops if op.region > 0]
    assert {op.phase for op in inside if op.kind == "sin"} == {Phase.FORWARD}
    assert {op.phase for op in inside if op.kind == "sqrt"} == {Phase.UPDATE}


@pytest.mark.parametrize("dealt", [False, True], ids=["as stored", "dealt out to stages"])
def test_moments_whose_norm_is_reported_are_no_parameters(dealt: bool) -> None:
    """A decayed moment is nearer to the gradient than the parameter, and the passes read neither
    it nor what is computed from it; the gradient may have another view of the layers."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            layers = w.reshape(2, LAYERS // 2, WIDTH, WIDTH) if dealt else w
            y = x
            for k in range(LAYERS):
                y = jnp.tanh(y @ (layers[k // 2, k % 2] if dealt else layers[k]))
            return jnp.mean(y**2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        m = 0.9 * state["m"] + grad
        return {"m": m, "w": state["w"] - 0.1 * m}, (value, optax.tree.norm(m))

    w = jnp.ones((LAYERS, WIDTH, WIDTH))
    graph = graph_of(step, {"m": w, "w": w}, jnp.ones((8, WIDTH)))
    roles = {p: graph.values[v].role for p, v in zip(graph.input_paths, graph.inputs, strict=True)}
    assert roles == {"[0]['m']": Role.MOMENT, "[0]['w']": Role.PARAMETER, "[1]": Role.BATCH}
    decay = next(op for op in graph.ops if graph.inputs[0] in op.inputs)
    assert decay.phase is Phase.UPDATE


def test_running_statistics_keys_and_frozen_arrays() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
            return nn.Dropout(0.5, deterministic=False)(x)

    net, x, raw = Net(), jnp.zeros((8, WIDTH)), jax.random.PRNGKey(0)
    variables = net.init({"params": raw, "dropout": raw}, x)

    def step(state: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            tree = {"params": params, "batch_stats": state["stats"]}
            out, new = net.apply(tree, x, rngs={"dropout": key}, mutable=["batch_stats"])
            return jnp.mean((out * state["mask"]) ** 2), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - g, state["params"], grads)
        return {"params": params, "stats": stats, "rng": jax.random.split(state["rng"])[0]}, value

    state = {
        "params": variables["params"],
        "stats": variables["batch_stats"],
        "mask": jnp.ones(WIDTH),
        "rng": jax.random.key(0),
    }
    graph = graph_of(step, state, x, raw)
    roles = {graph.values[v].name: graph.values[v].role for v in graph.inputs}
    for name, role in roles.items():
        if "params" in name:
            assert role is Role.PARAMETER, name
        elif "stats" in name:
            assert role is Role.STATISTIC, name
    assert roles["[0]['mask']"] is Role.FROZEN
    assert roles["[0]['rng']"] is Role.KEY
    assert roles["[1]"] is Role.BATCH
    assert roles["[2]"] is Role.KEY  # raw, and new at every step


# they return gradients and no state: nothing in them is known to be a parameter
STATELESS = frozenset(
    """
    bilinear_upsampling cholesky_solve cond_both_branches conv1d conv2d conv2d_channels_first
    conv_grouped conv_transposed custom_jvp_log1pexp custom_vjp_clipped_gradient dropout
    einsum_with_ellipsis fft_filter implicit_custom_root inner_loop_meta_gradient integer_gradients
    linear_solve_batched minimise_bfgs ordinary_differential_equation pallas_kernel_with_gradient
    pooling scipy_conjugate_gradient shard_map_with_gradient special_functions
    straight_through_estimator top_k_values
    """.split()
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in sorted(load())]
)
def test_in_the_zoo_every_parameter_has_its_gradient_and_its_update(name: str) -> None:
    graph = graph_of(*_built(name))
    graph.verify()
    gradients = {graph.values[v].of for v in values_of(graph, Role.GRADIENT)}
    parameters = values_of(graph, Role.PARAMETER)
    assert gradients == set(parameters)
    for p in parameters:
        new = graph.next_values[p]
        assert new not in (SCALAR, p)
        assert graph.values[new].role in (Role.NEXT, Role.GRADIENT)  # some steps return gradients
    trains = any(op.phase is Phase.BACKWARD for op in graph.ops)
    assert bool(parameters) == (trains and name not in STATELESS)
    named = [v for v in graph.state if graph.values[v].name.startswith("[0]['params']")]
    if trains and named and name != "multi_transform":  # which freezes some of them
        assert set(named) == set(parameters)


def _built(name: str) -> tuple[Any, ...]:
    step, args = load()[name].build()
    return (step, *args)


def test_labels_keep_all_else() -> None:
    """Every field that is no label comes through, those that are added later too."""

    def other(field: dataclasses.Field[Any], k: int) -> Any:
        return {"inputs": (k,), "outputs": (k,), "shape": (k,)}.get(field.name, f"{field.name} {k}")

    op = Op(*(other(f, k) for k, f in enumerate(dataclasses.fields(Op))))
    phase, segment = Phase.UPDATE, (3, 1)
    assert op.labelled(phase, segment) == dataclasses.replace(op, phase=phase, segment=segment)
    value = Value(*(other(f, k) for k, f in enumerate(dataclasses.fields(Value))))
    assert value.labelled(Role.KEY, 5, True) == dataclasses.replace(
        value, role=Role.KEY, of=5, carried=True
    )
