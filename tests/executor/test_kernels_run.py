"""Steps with Pallas kernels run on shards, with the numbers of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from executor import compile_plan
from executor.run.compile import CompiledStep
from executor.run.export import python_text
from planner import make_plan
from planner.graph.trace import trace

pytestmark = pytest.mark.devices

BATCH, HEADS, GROUPS, TOKENS, DEPTH = 8, 4, 2, 128, 32
WIDTH = HEADS * DEPTH
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on CPU."""
    whole = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: whole(*a, **{**k, "interpret": True}))


def attend(attention: Attention, groups: int) -> Callable[..., Any]:
    """A train step of one attention."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def heads(name: str, n: int) -> jax.Array:
            return (x @ p[name]).reshape(BATCH, TOKENS, n, DEPTH).transpose(0, 2, 1, 3)

        q, k, v = heads("q", HEADS), heads("k", groups), heads("v", groups)
        made = attention(q, k, v).transpose(0, 2, 1, 3).reshape(BATCH, TOKENS, WIDTH)
        return jnp.mean((made @ p["o"]) ** 2)

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 10.0 * g, p, grads), value

    return step


def arguments(groups: int) -> tuple[Any, jax.Array]:
    draw = np.random.default_rng(0)
    sizes = {"q": HEADS, "k": groups, "v": groups, "o": HEADS}
    params = {
        name: jnp.asarray(draw.normal(size=(WIDTH, n * DEPTH)) / WIDTH**0.5, jnp.float32)
        for name, n in sizes.items()
    }
    return params, jnp.asarray(draw.normal(size=(BATCH, TOKENS, WIDTH)), jnp.float32)


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    made = flash_attention.flash_attention(q, k, v, causal=True, sm_scale=DEPTH**-0.5)
    return made  # type: ignore[no-any-return]


def splashed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, interpret=True)
    return jax.vmap(kernel)(q * DEPTH**-0.5, k, v)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
@pytest.mark.parametrize(("attention", "groups"), [(flash, HEADS), (splashed, GROUPS)])
def test_attention_kernels_run_on_shards(
    attention: Attention, groups: int, mesh: str, interpreted: None
) -> None:
    step, args = attend(attention, groups), arguments(groups)
    plan = make_plan(step, *args, cluster="cpu:8", mesh=mesh)
    assert not plan.fallbacks
    want, got = jax.jit(step)(*args), compile_plan(step, plan)(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_device_computes_its_share_only(interpreted: None) -> None:
    step, args = attend(flash, HEADS), arguments(HEADS)
    plan = make_plan(step, *args, cluster="cpu:8", mesh="data=4,model=2")
    traced = trace(step, args)
    compiled = CompiledStep(traced, plan)
    grids = [e.params["grid_mapping"].grid[:2] for e in kernels_of(compiled, args)]
    assert len(grids) == 3  # forward, and backward for the keys and for the queries
    assert all(BATCH * HEADS // (b * h) in (4, 8) for b, h in grids), grids


def kernels_of(compiled: CompiledStep, args: Any) -> list[Any]:
    """As each device runs them."""
    found: list[Any] = []

    def walk(jaxpr: Any) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name == "pallas_call":
                found.append(eqn)
                continue
            for value in eqn.params.values():
                if hasattr(getattr(value, "jaxpr", value), "eqns"):
                    walk(value)

    walk(jax.make_jaxpr(lambda *a: compiled.jitted(*a))(*args))
    return found


def test_microbatches_of_a_kernel() -> None:
    """One that has an example per place of its grid is exact, one that mixes some is refused."""

    def norm(rows: int) -> Callable[[jax.Array], jax.Array]:
        def body(x: Any, out: Any) -> None:
            out[...] = x[...] - jnp.mean(x[...])

        def run(x: jax.Array) -> jax.Array:
            made = pl.pallas_call(
                body,
                grid=(x.shape[0] // rows,),
                in_specs=[pl.BlockSpec((rows, WIDTH), lambda i: (i, 0))],
                out_specs=pl.BlockSpec((rows, WIDTH), lambda i: (i, 0)),
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                interpret=True,
            )(x)
            return made  # type: ignore[no-any-return]

        return run

    def step_of(rows: int) -> Callable[..., Any]:
        def step(w: jax.Array, x: jax.Array) -> Any:
            value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(norm(rows)(x) @ w)))(w)
            return w - grad, value

        return step

    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(WIDTH, 16)), jnp.float32)
    x = jnp.asarray(draw.normal(size=(16, WIDTH)), jnp.float32)
    step = step_of(1)
    plan = make_plan(step, w, x, cluster="cpu:8", mesh="data=4,model=2", microbatches=4)
    for a, b in zip(jax.jit(step)(w, x), compile_plan(step, plan)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(Exception, match="mix examples"):
        make_plan(step_of(2), w, x, cluster="cpu:8", mesh="data=8", microbatches=4)


def test_kernels_that_differ_in_index_maps_or_bodies_run_as_they_are() -> None:
    def kernel(body: Any, index: Any) -> Callable[[jax.Array], jax.Array]:
        spec = pl.BlockSpec((8, 8), index)
        shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        options: dict[str, Any] = {"grid": (2, 2), "in_specs": [spec], "interpret": True}
        return pl.pallas_call(body, out_specs=spec, out_shape=shape, **options)  # type: ignore[no-any-return]

    def plain(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def placed(x: Any, out: Any) -> None:
        out[...] = x[...] * (pl.program_id(0) + 1)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
    rows = {r"\[0\]": PartitionSpec("data", "model")}
    for bodies in ((plain, plain), (plain, placed), (placed, plain)):
        first = kernel(bodies[0], lambda i, j: (i, j))
        second = kernel(bodies[1], lambda i, j: (j, i))

        def step(x: jax.Array, a: Any = first, b: Any = second) -> Any:
            return b(jnp.tanh(a(jnp.sin(x)))), a(jnp.cos(x))

        plan = make_plan(step, x, cluster="cpu:8", mesh="data=2,model=2,z=2", shardings=rows)
        for got, want in zip(compile_plan(step, plan)(x), jax.jit(step)(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_exported_module_says_that_kernels_run_whole(interpreted: None) -> None:
    step, args = attend(flash, HEADS), arguments(HEADS)
    plan = make_plan(step, *args, cluster="cpu:8", mesh="data=4,model=2")
    assert "3 kernels that the plan splits" in python_text(plan)
