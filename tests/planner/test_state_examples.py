"""State with a row per example: hidden states, caches and environments go with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from executor import parallelize
from planner import RequestError, make_plan
from planner.advice.batch import batch_leaves
from planner.graph.ir import Role
from planner.graph.trace import trace
from planner.plan.plan import plan_from_json
from tests.zoo.running import difference

B, T, H, LAYERS = 64, 5, 32, 3


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def recurrent(state: Any, x: jax.Array) -> Any:
    """Truncated backpropagation: hidden states of stacked layers go on in the next step."""

    def loss(p: Any) -> Any:
        def turn(h: jax.Array, x_t: jax.Array) -> Any:
            new = []
            for k in range(LAYERS):
                x_t = jnp.tanh(x_t @ p["in"][k] + h[k] @ p["up"][k])
                new.append(x_t)
            return jnp.stack(new), x_t

        h, out = jax.lax.scan(turn, jax.lax.stop_gradient(state["h"]), x)
        return jnp.mean(out**2), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(state["p"])
    p = jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)
    return {"h": h, "p": p}, value


def recurrent_args() -> Any:
    weights = struct(LAYERS, H, H)
    return {"h": struct(LAYERS, B, H), "p": {"in": weights, "up": weights}}, struct(T, B, H)


def decode(cache: jax.Array, weights: Any, token: jax.Array, at: jax.Array) -> Any:
    """One token of a decoder, with a cache of the keys before."""
    x = weights["table"][token]
    cache = jax.lax.dynamic_update_slice(cache, x[:, None] @ weights["k"], (0, at, 0))
    scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", x @ weights["q"], cache))
    return cache, jnp.einsum("bt,btd->bd", scores, cache) @ weights["table"].T


def decode_args() -> Any:
    square = struct(H, H)
    weights = {"table": struct(1000, H), "k": square, "q": square}
    return struct(B, 128, H), weights, struct(B, dtype=jnp.int32), struct(dtype=jnp.int32)


def statistics(state: Any, x: jax.Array) -> Any:
    """A running mean over the features, in a step whose batch has the same size."""

    def loss(w: jax.Array) -> Any:
        h = x @ w
        return jnp.mean((h - state["mean"]) ** 2), h.mean(0)

    (value, mean), grad = jax.value_and_grad(loss, has_aux=True)(state["w"])
    return {"mean": 0.9 * state["mean"] + 0.1 * mean, "w": state["w"] - grad}, value


def roles(step: Callable[..., Any], args: Any) -> dict[str, Role]:
    graph = trace(step, args).graph
    return {p: graph.values[v].role for p, v in zip(graph.input_paths, graph.inputs, strict=True)}


def test_hidden_states_and_caches_are_examples() -> None:
    assert roles(recurrent, recurrent_args())["[0]['h']"] is Role.EXAMPLES
    assert roles(decode, decode_args())["[0]"] is Role.EXAMPLES
    mean = {"mean": struct(B), "w": struct(B, B)}
    assert roles(statistics, (mean, struct(B, B)))["[0]['mean']"] is Role.STATISTIC


@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_modes_split_hidden_states_as_the_batch(mode: str) -> None:
    plan = make_plan(recurrent, *recurrent_args(), cluster="h100:8", mode=mode)
    leaves = {leaf.path: leaf.spec for leaf in plan.inputs}
    assert str(leaves["[0]['h']"]) == str(leaves["[1]"]) == f"P(None, '{plan.mesh.names[0]}')"
    assert bool(leaves["[0]['p']['in']"].axes) is (mode == "fsdp")
    assert "batch split 8 ways" in plan.strategy


def test_modes_split_caches_as_the_batch() -> None:
    plan = make_plan(decode, *decode_args(), cluster="h100:8", mode="dp")
    leaves = {leaf.path: str(leaf.spec) for leaf in plan.inputs}
    assert leaves["[0]"] == leaves["[2]"] == "P('data')"
    assert leaves["[1]['table']"] == "P()"


def deep(state: Any, x: jax.Array) -> Any:
    """Layers of equal shape beside a memory of what each example was."""

    def loss(w: Any) -> Any:
        h = jnp.tanh(x @ w["in"] + 0.1 * state["memory"])
        for layer in w["layers"]:
            h = h + jnp.tanh(h @ layer)
        return jnp.mean((h @ w["out"]) ** 2), jax.lax.stop_gradient(h)

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(state["w"])
    w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
    return {"w": w, "memory": 0.9 * state["memory"] + 0.1 * h}, value


def deep_args() -> Any:
    square = struct(H, H)
    w = {"in": square, "layers": [square] * 4, "out": square}
    return {"w": w, "memory": struct(B, H)}, struct(B, H)


@pytest.mark.devices
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "dp"},
        {"microbatches": 4},
        {"microbatches": B},
        {"replicas": 4},
        {"microbatches": 4, "statistics": "per-microbatch"},
        {"microbatches": 2, "remat": "full"},
        {"pad_batch": 72},
        {"stages": 2, "microbatches": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [recurrent, deep])
def test_numbers_are_those_of_the_step(step: Callable[..., Any], options: dict[str, Any]) -> None:
    """Also where the examples are the second dimension of the batch, and of the state."""
    if step is recurrent and "stages" in options:
        pytest.skip("layers inside a loop over time are not cut into stages")
    structs = recurrent_args() if step is recurrent else deep_args()
    leaves, tree = jax.tree.flatten(structs)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    made = [0.1 * jax.random.normal(k, s.shape) for k, s in zip(keys, leaves, strict=True)]
    args = jax.tree.unflatten(tree, made)
    run = parallelize(step, **options)
    (state, x), (want, _) = args, args
    for _ in range(3):
        state, value = run(state, x)
        want, expected = jax.jit(step)(want, x)
    assert difference(jax.device_get((state, value)), jax.device_get((want, expected))) <= 2e-6
    for name in ("microbatches", "replicas", "pad_batch", "stages"):
        assert getattr(run.plan, name) == options.get(name, getattr(run.plan, name))


def test_a_time_major_batch_is_reduced_once_per_step() -> None:
    big = jax.tree.map(
        lambda s: struct(
            *(dict(zip((B, T, H), (4096, 16, 1024), strict=True)).get(n, n) for n in s.shape)
        ),
        recurrent_args(),
    )
    plan = make_plan(recurrent, *big, cluster="h100:8")
    assert plan.replicas == 8
    sums = [row for row in plan.collectives if row.kind == "all_reduce"]
    assert sums and all(row.count == 1 for row in sums)


def test_padding_counts_the_examples_and_not_time() -> None:
    state = {"h": struct(LAYERS, 60, H), "p": recurrent_args()[0]["p"]}
    plan = make_plan(recurrent, state, struct(T, 60, H), cluster="h100:8", pad_batch=63)
    assert plan.examples == 60 and plan_from_json(plan.to_json()) == plan
    assert "padded to 63 examples, 5.0 % more" in str(plan)


def test_the_batch_of_advice_is_what_is_fed() -> None:
    """The state is larger than the batch and has another dimension in front."""

    def step(cache: jax.Array, x: jax.Array) -> Any:
        return cache + x, x.sum()

    for shape, rows in (((LAYERS, B, 16, H), (1,)), ((B, 16, H), (0, 1))):
        graph = trace(step, (struct(*shape), struct(B, 16, H))).graph
        assert graph.values[graph.inputs[0]].role is Role.EXAMPLES
        assert batch_leaves(graph) == rows


def test_a_number_that_does_not_divide_the_examples_is_refused() -> None:
    with pytest.raises(RequestError, match=r"does not divide the batch: .* holds 64 examples"):
        make_plan(recurrent, *recurrent_args(), cluster="h100:8", microbatches=5)


def test_targets_outside_of_the_loop_are_time_major_too() -> None:
    """What a loop stacks has the turns of what it goes along."""

    def step(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            def turn(h: jax.Array, x_t: jax.Array) -> Any:
                h = jnp.tanh(x_t @ p["in"] + h @ p["up"])
                return h, h

            out = jax.lax.scan(turn, jnp.zeros((x.shape[1], 1024)), x)[1]
            return jnp.mean((out.sum(-1) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    p = {"in": struct(512, 1024), "up": struct(1024, 1024)}
    plan = make_plan(step, p, struct(64, 256, 512), struct(64, 256), cluster="h100:8", mode="dp")
    assert {str(leaf.spec) for leaf in plan.inputs if not leaf.tied} == {"P(None, 'data')"}
    assert plan.strategy == "data parallel over 8; batch split 8 ways"


@pytest.mark.devices
def test_rows_that_are_only_written() -> None:
    """An average of each example's loss: no pass reads it."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            each = jnp.mean(jnp.tanh(x @ w) ** 2, -1)
            return each.mean(), each

        (value, each), grad = jax.value_and_grad(loss, has_aux=True)(state["w"])
        average = 0.9 * state["average"] + 0.1 * each
        m = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.1 * m, "m": m, "average": average}, value

    w = jax.random.normal(jax.random.key(0), (H, H)) / 6
    state = {"w": w, "m": jnp.zeros_like(w), "average": jnp.arange(float(B))}
    x = jax.random.normal(jax.random.key(1), (B, H))
    found = roles(step, (state, x))
    assert found["[0]['average']"] is Role.EXAMPLES and found["[0]['m']"] is Role.MOMENT
    want = jax.device_get(jax.jit(step)(state, x))
    for options in ({"mode": "dp"}, {"microbatches": 4}, {"pad_batch": 72}):
        run = parallelize(step, **options)  # type: ignore[arg-type]
        assert difference(jax.device_get(run(state, x)), want) <= 2e-6
    plan = make_plan(step, state, x, cluster="h100:8", mode="dp")
    assert {leaf.path for leaf in plan.inputs if leaf.spec.axes} == {"[0]['average']", "[1]"}


def test_queues_are_no_examples() -> None:
    """Rows of a ring buffer meet the batch by slices; it has others besides."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_slice(state["queue"], (state["at"], 0), x.shape)
            return jnp.mean((x @ w - old) ** 2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        queue = jax.lax.dynamic_update_slice(state["queue"], x, (state["at"], 0))
        return {"w": state["w"] - grad, "queue": queue, "at": state["at"] + 1}, value

    state = {"w": struct(H, H), "queue": struct(16 * B, H), "at": struct(dtype=jnp.int32)}
    assert roles(step, (state, struct(B, H)))["[0]['queue']"] is Role.STATISTIC


@pytest.mark.parametrize("write", [False, True])
def test_rows_by_number_are_refused(write: bool) -> None:
    """A microbatch has other examples under the numbers that are fed."""

    def step(state: Any, x: jax.Array, rows: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            h = jnp.tanh(x @ w + 0.1 * state["memory"])
            old = state["memory"] if write else state["memory"][rows]
            return jnp.mean((h - old) ** 2), h

        (value, h), grad = jax.value_and_grad(loss, has_aux=True)(state["w"])
        memory = state["memory"].at[rows].set(h) if write else h
        return {"w": state["w"] - grad, "memory": memory}, value

    state = {"w": struct(H, H), "memory": struct(B, H)}
    args = state, struct(B, H), struct(B, dtype=jnp.int32)
    with pytest.raises(RequestError):
        make_plan(step, *args, cluster="h100:8", microbatches=2)
    with pytest.raises(RequestError):
        make_plan(step, *args, cluster="h100:8", microbatches=2, statistics="per-microbatch")


def test_replicas_that_the_step_refuses_say_why() -> None:
    """The number of examples is written into the step."""

    def step(p: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            def turn(h: jax.Array, x_t: jax.Array) -> Any:
                return jnp.tanh(x_t @ p["in"] + h @ p["up"]), None

            return jnp.mean(jax.lax.scan(turn, jnp.zeros((256, 1024)), x)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    p = {"in": struct(512, 1024), "up": struct(1024, 1024)}
    plan = make_plan(step, p, struct(64, 256, 512), cluster="h100:8", mode="dp")
    (note,) = (n for n in plan.notes if n.startswith("gradients reduced once per step"))
    assert "not possible, this step can't be cut" in note and "test_state_examples.py" in note
