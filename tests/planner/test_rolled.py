"""Unrolled steps with their equal blocks in loops compute what the steps do, and recipes that are
compared on them suit the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from planner import make_plan
from planner.arguments.calls import bind
from planner.graph.trace import trace
from planner.planning.open_recipes import Door
from planner.planning.outer import unrolled
from planner.rolled import rewrite, rolled
from planner.rolled.form import Form
from planner.rolled.layout import layout_of
from planner.rolled.runs import Const

WIDTH, ROWS = 16, 8
ADAM = optax.adamw(1e-2, eps=1e-2)  # a small eps makes much of the rounding of gradients that are 0
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 4, jnp.float32)


def update(optimizer: Any, loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def layers_in_a_list(
    layers: int, optimizer: Any, tail: int = 0, cached: bool = False, masked: bool = False
) -> Case:
    """``tail``: operations behind the layers, each of which reads what the one before made twice;
    ``cached``: every layer writes to zeros of its own, made before the first; ``masked``: every
    layer makes a mask of its own, as causal attention does."""

    def layer(p: Any, x: jax.Array, cache: jax.Array | None) -> jax.Array:
        h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3)
        if cache is not None:
            h = jax.lax.dynamic_update_slice(cache, h, (0, 0))
        h = jax.nn.gelu(h @ p["up"] + p["bias"])
        h = jnp.sin(h @ p["down"]) * p["scale"]
        return x + (jnp.where(jnp.tri(*h.shape, dtype=bool), h, 0.1) if masked else h)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params["first"]
        caches = [jnp.zeros((ROWS, WIDTH)) if cached else None for _ in range(layers)]
        for p, cache in zip(params["layers"], caches, strict=True):
            h = layer(p, h, cache)
        for k in np.random.default_rng(0).integers(0, 4, tail):  # no two parts are alike
            h = (jnp.sin, jnp.cos, jnp.tanh, jnp.exp)[k](h) * h
        return jnp.mean((h @ params["first"].T - x) ** 2)

    params = {
        "first": normal(12, WIDTH),
        "layers": [
            {
                "up": normal(WIDTH, 4 * WIDTH) + k / 100,
                "bias": normal(4 * WIDTH),
                "down": normal(4 * WIDTH, WIDTH),
                "scale": normal(WIDTH),
            }
            for k in range(layers)
        ],
    }
    return update(optimizer, loss), (params, optimizer.init(params), normal(ROWS, 12))


class Named(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, WIDTH)(tokens)
        for _ in range(self.layers):
            x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(32)(nn.LayerNorm()(x))


def linen(layers: int) -> Case:
    """Layers whose names sort in another order than that in which they run, from eleven on."""
    model, optimizer = Named(layers), ADAM
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 8)))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    params = model.init(jax.random.key(0), tokens)
    return update(optimizer, loss), (params, optimizer.init(params), tokens)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def with_objects(layers: int) -> Case:
    """Updated in place."""
    model = Stack(layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    def step(model: Stack, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    bound = bind(step, (model, optimizer, normal(ROWS, WIDTH)))
    return bound.function, tuple(bound.args)


CASES: dict[str, Callable[[int], Case]] = {
    "adam": lambda n: layers_in_a_list(n, ADAM),
    "momentum": lambda n: layers_in_a_list(n, optax.sgd(1e-2, momentum=0.9)),
    "clipped": lambda n: layers_in_a_list(n, optax.chain(optax.clip_by_global_norm(0.1), ADAM)),
    "cached": lambda n: layers_in_a_list(n, ADAM, cached=True),
    "masked": lambda n: layers_in_a_list(n, ADAM, masked=True),
    "linen": linen,
    "objects": with_objects,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("adam", 6),
        ("momentum", 12),
        ("clipped", 12),
        ("cached", 6),
        ("masked", 6),
        ("linen", 12),
        ("objects", 6),
    ],
)
def test_loops_compute_what_the_step_computes(name: str, layers: int) -> None:
    step, args = CASES[name](layers)
    traced = trace(step, args)
    layout = layout_of(traced.flat, traced.in_paths)
    assert layout.covered > 0.8 and layout.moved_bytes < 1000
    form = Form(layout, traced)
    leaves = jax.tree_util.tree_leaves(args)
    function = form.program(traced.flat)
    given = form.args(leaves, lambda rows: jnp.stack(rows))
    got = jax.tree_util.tree_leaves(jax.jit(function)(*given))
    want = jax.tree_util.tree_leaves(jax.jit(step)(*args))
    number = {v: k for k, v in enumerate(traced.flat.outputs) if isinstance(v, int)}
    results = jax.tree_util.tree_leaves(
        form.results(
            want.__getitem__,
            lambda stack: jnp.stack([want[number[v]] for v in layout.rows[stack]]),
        )
    )
    assert len(got) == len(results) < len(want)
    for a, b in zip(got, results, strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    seen = trace(function, given)
    assert len(seen.flat.calls) < len(traced.flat.calls) / 3
    roles = [{str(g.values[v].role) for v in g.inputs} for g in (seen.graph, traced.graph)]
    assert roles[0] == roles[1]
    kept = [sum(g.values[v].nbytes for v in g.state) for g in (seen.graph, traced.graph)]
    assert kept[0] == kept[1]


@pytest.mark.timeout(60)
def test_a_tail_that_reads_its_values_twice_takes_no_longer() -> None:
    step, args = layers_in_a_list(6, ADAM, tail=60)  # a key of all paths to a value has 2^60 parts
    traced = trace(step, args)
    layout = layout_of(traced.flat, traced.in_paths)
    assert 0.1 < layout.covered < 1


def test_masks_that_layers_make_for_themselves_are_rows() -> None:
    """The backward pass of a layer reads the mask of that layer, which can be made again, not that
    of the first, which would keep those of all."""
    step, args = layers_in_a_list(6, ADAM, masked=True)
    traced = trace(step, args)
    layout = layout_of(traced.flat, traced.in_paths)
    runs = [x.run for x in layout.loops]
    made = {v for run in runs for call in traced.flat.calls[run.start : run.end] for v in call.outs}
    operands = [o for run in runs for row in run.operands for o in row]
    assert len(runs) > 1 and made.isdisjoint(o.value for o in operands if isinstance(o, Const))


def test_a_step_of_few_operations_or_of_none_that_repeat_stays_as_it_is() -> None:
    step, args = layers_in_a_list(6, ADAM)
    assert rolled(step, trace(step, args), args) is None


def wide(layers: int) -> Case:
    """A step that takes more than a device has."""
    step, (params, state, _) = layers_in_a_list(layers, ADAM)
    grown = jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct([64 * n for n in x.shape], x.dtype), (params, state)
    )
    return step, (*grown, jax.ShapeDtypeStruct((1 << 16, 64 * 12), jnp.float32))


@pytest.mark.long
def test_recipes_are_compared_on_loops_where_a_large_step_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, args = wide(12)
    options: dict[str, Any] = {"cluster": "h100:8", "memory": "2GB"}
    options |= {"microbatches": 1, "chunks": 1, "replicas": 1}
    plain = make_plan(step, *args, **options)
    looks: list[Any] = []
    monkeypatch.setattr(rewrite, "LEAST_CALLS", 500)
    first = Door.look

    def look(self: Door, *given: Any) -> Any:
        looks.append(len(self.rewriter.cut(1)[1].flat.calls))
        return first(self, *given)

    monkeypatch.setattr(Door, "look", look)
    plan = make_plan(step, *args, **options)
    assert "recipes compared on the step with its 12 equal blocks in loops" in plan.notes
    assert looks and max(looks) < 500  # of the step as it is, none
    assert plan.recipe != type(plan.recipe)()
    assert plan.prediction.peak_bytes <= 2e9
    assert plan.prediction.step_s < 1.03 * plain.prediction.step_s
    assert any("recipes planned" in note for note in plan.notes)


@pytest.mark.long
def test_marks_and_pins_keep_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "LEAST_CALLS", 500)
    step, args = wide(12)
    options: dict[str, Any] = {"cluster": "h100:8", "memory": "2GB", "microbatches": 1, "chunks": 1}
    for asked in ({"shardings": {r"\['first'\]": P()}}, {"whole_below": "1KB"}):
        plan = make_plan(step, *args, **options, **asked)
        assert any("recipes planned" in note for note in plan.notes)  # it does not fit as written
        assert not any("in loops" in note for note in plan.notes)


@pytest.mark.long
def test_a_fault_of_the_loops_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr(unrolled, "rolled", broken)
    step, args = wide(12)
    with pytest.warns(UserWarning, match=r"loops \(TypeError: a fault\)"):
        plan = make_plan(step, *args, cluster="h100:8", memory="2GB", microbatches=1, chunks=1)
    assert plan.remat != "none" and not any("in loops" in note for note in plan.notes)
