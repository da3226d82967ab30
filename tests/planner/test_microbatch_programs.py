"""Microbatches of programs as people write them: marks, kernels, Adam, one example at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner import make_plan, shard
from planner.graph.jaxpr.walk import loop_of
from planner.microbatch.bodies.single import _Scaled
from planner.microbatch.errors import NotExactError
from planner.microbatch.rewrite import microbatched
from planner.recipes import Recipe, Rewriter, rewritten

LAYERS, ROWS, SEQ, WIDTH = 3, 8, 4, 16


def state() -> Any:
    draw = np.random.default_rng(0)
    return {
        "w": jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, jnp.float32),
        "embed": jnp.asarray(draw.normal(size=(32, WIDTH)), jnp.float32),
    }


def tokens(rows: int = ROWS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 32, (rows, SEQ)), jnp.int32)


def apart(got: Any, want: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


def check(step: Any, *args: Any, parts: int) -> None:
    assert apart(microbatched(step, args, parts)(*args), jax.jit(step)(*args)) < 1e-6


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    """A product whose weight's gradient is marked, as one who shards it writes it."""
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, shard(jnp.einsum("bsi,bso->io", kept[0], g), "data", None)),
)


@pytest.mark.long
@pytest.mark.parametrize("remat", [False, True])
def test_marks_on_gradients_inside_a_scan(remat: bool) -> None:
    def body(x: Any, w: Any) -> Any:
        return jnp.tanh(product(x, w))

    def loss(p: Any, t: Any) -> Any:
        once = jax.checkpoint(body) if remat else body
        x, _ = jax.lax.scan(lambda x, w: (once(x, w), None), p["embed"][t], p["w"])
        return jnp.mean(x**2)

    def step(p: Any, t: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, t))

    check(step, state(), tokens(), parts=4)


@pytest.mark.long
def test_a_barrier_hands_each_operand_on() -> None:
    def loss(p: Any, t: Any) -> Any:
        x = p["embed"][t]
        x, kept = jax.lax.optimization_barrier((x * 2, x > 0))
        return jnp.mean(jnp.where(kept, x, 0.5 * x) ** 2)

    def step(p: Any, t: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, t))

    check(step, state(), tokens(), parts=4)


def test_a_barrier_of_examples_and_sums_is_refused() -> None:
    """One equation can't run both in every microbatch and behind the last."""

    def step(p: Any, t: Any) -> Any:
        x = p["embed"][t]
        x, mean = jax.lax.optimization_barrier((x, jnp.mean(x)))
        return {"embed": p["embed"] + jnp.mean(x) + mean, "w": p["w"]}

    with pytest.raises(NotExactError, match=r"test_microbatch_programs.py:\d+: optimization_barr"):
        microbatched(step, (state(), tokens()), 4)


@jax.jit
def flash_attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bsd,btd->bst", q, k)
    return jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), v)


@pytest.mark.long
def test_one_kernel_stays_one_in_a_microbatch() -> None:
    """Outside a scan too; its scores are in no memory (Dao et al. 2022)."""

    def step(p: Any, t: Any) -> Any:
        def loss(p: Any) -> Any:
            x = p["embed"][t]
            return jnp.mean((flash_attention(x, x, x) @ p["w"][0]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    args = (state(), tokens())

    def kernels(recipe: Recipe) -> set[str]:
        return {op.fused for op in Rewriter(step, args)(recipe)[1].graph.ops if op.fused}

    assert len(kernels(Recipe(4))) == len(kernels(Recipe())) == 2
    check(step, *args, parts=4)


@pytest.mark.long
def test_adam_adds_up_one_gradient_for_each_parameter() -> None:
    """Its first moment takes a tenth of the gradient, its second the square: one sum is enough."""

    def adam(p: Any, m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-2 * m / (jnp.sqrt(v) + 1e-3), m, v

    def step(state: Any, t: Any) -> Any:
        p, m, v = state

        def loss(p: Any) -> Any:
            x = p["embed"][t]
            for k in range(LAYERS):
                x = jnp.tanh(x @ p["w"][k])
            return jnp.mean(x**2)

        parts = jax.tree.map(adam, p, m, v, jax.grad(loss)(p))
        return jax.tree.transpose(jax.tree.structure(p), jax.tree.structure((0, 0, 0)), parts)

    zeros = jax.tree.map(jnp.zeros_like, state())
    args = ((state(), zeros, zeros), tokens())
    jaxpr = Rewriter(step, args)(Recipe(4))[1].jaxpr
    loops = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert [loop_of(e).carries for e in loops] == [len(state())]
    check(step, *args, parts=4)


def next_token_loss(p: Any, t: Any) -> Any:
    x = p["embed"][t]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])
    logits = x @ p["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, t))


@pytest.mark.long
@pytest.mark.parametrize("rows", [2, ROWS])
def test_microbatches_of_one_example(rows: int) -> None:
    """JAX traces ``take_along_axis`` and sums over broadcast dimensions of one in another way."""

    def step(p: Any, t: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(next_token_loss)(p, t))

    check(step, state(), tokens(rows), parts=rows)


@pytest.mark.long
@pytest.mark.parametrize("rows", [2, ROWS])
def test_rules_of_users_are_no_sizes(rows: int) -> None:
    """A ``jax.custom_vjp`` that is not differentiated stays in the step, with its functions."""

    def step(p: Any, t: Any) -> Any:
        new = jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(next_token_loss)(p, t))
        return new, jnp.mean(product(p["embed"][t], p["w"][0]))

    check(step, state(), tokens(rows), parts=rows)


def test_a_size_that_does_not_follow_from_the_batch() -> None:
    def step(p: Any, t: Any) -> Any:
        def loss(p: Any) -> Any:
            x = jnp.concatenate([p["embed"][t], jnp.zeros((1, SEQ, WIDTH))])
            logits = jnp.take_along_axis(x, jnp.zeros((len(x), SEQ, 1), jnp.int32), -1)
            return jnp.mean(logits)

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    with pytest.raises(NotExactError, match="can't be cut into microbatches"):
        microbatched(step, (state(), tokens()), ROWS)


def test_an_operation_made_for_the_batch_is_not_taken_for_one_example() -> None:
    """A parameter that is no size, such as the grid of a kernel, must not depend on the batch."""
    assert _Scaled(8).param((8, 3, ("x", 16)), (16, 3, ("x", 32))) == (1, 3, ("x", 2))
    with pytest.raises(NotExactError, match="a size is 9 for 8 examples and 17 for 16"):
        _Scaled(8).param(9, 17)
    with pytest.raises(NotExactError, match=r"made for the batch's size \(str\)"):
        _Scaled(8).param("grid of 8", "grid of 16")


@pytest.mark.long
def test_a_recomputed_loss_with_a_scan_is_walked_through() -> None:
    """Newer JAX puts the forward pass of such a loss into a call of its own (``eval_jaxpr``)."""

    def step(p: Any, t: Any) -> Any:
        grads = jax.grad(jax.checkpoint(next_token_loss))(p, t)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    assert make_plan(step, state(), tokens(), cluster="h100:2").fallbacks == ()
    check(step, state(), tokens(), parts=2)


def every_other(auxiliary: Any) -> Any:
    """A step whose loss has another term in every other step."""

    def step(state: Any, x: jax.Array) -> Any:
        w, count = state

        def loss(w: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ w)
            more = jax.lax.cond(count % 2 == 0, auxiliary, lambda h: 0.0 * h, h)
            return jnp.mean(h**2) + jnp.mean(more)

        value, grads = jax.value_and_grad(loss)(w)
        seen = jax.lax.cond(count % 2 == 0, lambda x: jnp.sum(x), lambda x: 0.0, x)
        return (w - 0.1 * grads, count + 1), (value, seen)

    return step


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("recipe", [Recipe(microbatches=4), Recipe(microbatches=2, replicas=2)])
def test_a_conditional_that_goes_one_way_for_all_examples(recipe: Recipe, count: int) -> None:
    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.normal(size=(n, 8)), jnp.float32) for n in (8, 16))
    step, args = every_other(lambda h: jnp.sin(3.0 * h)), ((w, jnp.int32(count)), x)
    got, want = (jax.jit(f)(*args) for f in (rewritten(step, args, recipe), step))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_conditionals_that_cannot_be_cut() -> None:
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))

    def refused(step: Any, text: str, *args: Any, padding: int = 0) -> None:
        recipe = Recipe(pad_batch=padding) if padding else Recipe(microbatches=4)
        with pytest.raises(NotExactError, match=text):
            rewritten(step, args, recipe)

    state = (w, jnp.int32(0))
    noise = every_other(lambda h: h * jax.random.normal(jax.random.key(0), h.shape))
    refused(noise, r"cond of .* draws random numbers", state, x)
    refused(every_other(jnp.sin), "cond .*adds? examples up", state, x, padding=20)

    def trained(loss: Any) -> Any:
        return lambda w, x: w - 0.1 * jax.grad(loss)(w, x)

    @trained
    def one_branch(w: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.mean(h) + jax.lax.cond(w[0, 0] > 0, lambda h: (h**2).sum(), lambda h: 1.0, h)

    refused(one_branch, "adds examples up in some of its branches", w, x)

    @trained
    def by_example(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.cond(jnp.sum(x @ w) > 0, lambda h: (h**2).sum(), lambda h: 0.0, x @ w)

    refused(by_example, "whose course depends on examples", w, x)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(microbatches=4), Recipe(microbatches=2, replicas=2)])
def test_a_random_key_for_each_example(recipe: Recipe, typed: bool) -> None:
    def step(w: jax.Array, x: jax.Array, keys: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.6, (8,)))(keys)
            return jnp.mean(jnp.tanh((x * kept) @ w) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - grads, value

    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.normal(size=(n, 8)), jnp.float32) for n in (8, 16))
    keys = jax.random.split(jax.random.key(0) if typed else jax.random.PRNGKey(0), 16)
    got, want = (jax.jit(f)(w, x, keys) for f in (rewritten(step, (w, x, keys), recipe), step))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
