"""Results that depend on all examples at once, such as a maximum or a median of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.graph.jaxpr.walk import loop_of
from planner.microbatch.errors import CoupledError
from planner.microbatch.rewrite import microbatched

ROWS, WIDTH, CLASSES = 16, 8, 5
Figure = Callable[[jax.Array, jax.Array], Any]

FIGURES: dict[str, Figure] = {
    "maximum": lambda z, each: jnp.max(z),
    "minimum of sizes": lambda z, each: jnp.abs(z).min(),
    "any": lambda z, each: jnp.any(each > 2.0),
    "all finite": lambda z, each: jnp.all(jnp.isfinite(z)),
    "index of the worst": lambda z, each: jnp.argmax(each),
    "median": lambda z, each: jnp.median(each),
    "worst three": lambda z, each: jax.lax.top_k(each, 3),
    "above the mean": lambda z, each: (each > each.mean()).sum(),
    "first rows": lambda z, each: z[:3],
    "between examples": lambda z, each: (each[:, None] - each[None]).std(),
    "histogram": lambda z, each: jnp.histogram(each, bins=4)[0],
}


def arguments() -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=s).astype(np.float32) for s in ((WIDTH, CLASSES), (ROWS, WIDTH)))
    return jnp.asarray(w), jnp.asarray(x), jnp.asarray(draw.integers(0, CLASSES, ROWS), jnp.int32)


def step_with(figure: Figure) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            z = x @ w
            each = -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1)[:, 0]
            return each.mean(), figure(z, each)

        (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * gradient, {"loss": value, "figure": seen}

    return step


@pytest.mark.long
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_the_whole_batch(name: str, parts: int) -> None:
    step = step_with(FIGURES[name])
    expected = jax.jit(step)(*arguments())
    got = jax.jit(microbatched(step, arguments(), parts))(*arguments())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.long
def test_a_loss_of_one_example() -> None:
    """Its cotangent is zeros and a one, whatever the other examples are."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum(1)[3])(w)
        return w - 0.1 * gradient, value

    w, x, _ = arguments()
    got, expected = jax.jit(microbatched(step, (w, x), 2))(w, x), jax.jit(step)(w, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.long
def test_in_groups_of_devices() -> None:
    step = step_with(FIGURES["worst three"])
    expected = jax.jit(step)(*arguments())
    got = jax.jit(microbatched(step, arguments(), 2, replicas=2))(*arguments())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_maximum_reads_one_number_per_example() -> None:
    """The loop leaves a row's maximum behind, not the row."""
    cut = microbatched(step_with(FIGURES["maximum"]), arguments(), 4)
    jaxpr = jax.make_jaxpr(cut)(*arguments()).jaxpr
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    stacks = [v.aval.shape for v in loop.outvars[loop_of(loop).carries :]]
    assert stacks == [(4, ROWS // 4)]


def test_what_the_gradient_needs_is_refused() -> None:
    """The loss of the worse half."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            each = ((x @ w) ** 2).sum(1) * y
            return jnp.where(each > jnp.median(each), each, 0.0).mean()

        return w - 0.1 * jax.grad(loss)(w)

    with pytest.raises(CoupledError, match=r"test_microbatch_figures\.py:\d+"):
        microbatched(step, arguments(), 2)


def test_state_that_depends_on_all_examples_at_once_is_refused() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        w, most = state
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - 0.1 * gradient, jnp.maximum(most, jnp.max(x @ w))), value

    w, x, _ = arguments()
    with pytest.raises(CoupledError, match="reduce_max"):
        microbatched(step, ((w, jnp.float32(0.0)), x), 2)
