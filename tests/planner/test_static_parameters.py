"""What an operation holds besides operands may follow from the batch's size: a start, an axis, a
number of turns. In a microbatch, and in a padded batch, it stays that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.microbatch.bodies.merged import merged
from planner.microbatch.errors import NotExactError
from planner.recipes import rewritten
from planner.spec import Recipe

EXAMPLES = 12
Body = Callable[[jax.Array, int], jax.Array]


def turns(h: jax.Array, n: int) -> jax.Array:
    return jax.lax.fori_loop(0, n // 3, lambda i, x: jnp.tanh(x * 0.9 + i), h)


def powers(h: jax.Array, n: int) -> jax.Array:
    """Turns over a value of all examples alike."""
    start = jnp.full((8,), 0.5)
    return h * jax.lax.scan(lambda c, _: (c * 0.7 + 0.1, None), start, None, length=n)[0]


BODIES: dict[str, Body] = {
    "index": lambda h, n: h[:, n % 7],
    "start": lambda h, n: h[:, n % 7 : n % 7 + 2],
    "start that equals the batch": lambda h, n: jnp.tile(h, 4)[:, n : n + 3],
    "stride": lambda h, n: h[:, 0:6:2] if n == EXAMPLES else h[:, 0:7:3],
    "padding": lambda h, n: jnp.pad(h, ((0, 0), (n % 7, 7 - n % 7))) * jnp.arange(15.0),
    "reverse": lambda h, n: jax.lax.cumsum(h, axis=1, reverse=n == EXAMPLES) ** 2,
    "axis": lambda h, n: (
        jax.lax.rev(h.reshape(-1, 2, 4), (1 if n == EXAMPLES else 2,)).reshape(-1, 8)
        * jnp.arange(8.0)
    ),
    "permutation": lambda h, n: (
        jnp.transpose(h.reshape(-1, 2, 2, 2), (0, 2, 3, 1) if n == EXAMPLES else (0, 3, 1, 2))
        .reshape(-1, 8)
        .dot(jnp.arange(8.0))
    ),
    "dilation": lambda h, n: (
        jax.lax.conv_general_dilated(
            h[:, None], jnp.ones((1, 1, 3)), (1,), "SAME", rhs_dilation=(1 + n // EXAMPLES,)
        )
        ** 2
    ),
    "bits": lambda h, n: jax.lax.reduce_precision(h, 8, n) ** 2,
    "scan's direction": lambda h, n: jax.lax.scan(
        lambda c, i: (0.5 * c + i * h, None), h, jnp.arange(4.0), reverse=n == EXAMPLES
    )[0],
    "axis of what is no example": lambda h, n: (
        h * jnp.sum(jnp.arange(64.0).reshape(8, 8), axis=0 if n == EXAMPLES else 1)
    ),
    "bodies with names": lambda h, n: jnp.linalg.solve(
        n / 4.0 * jnp.eye(8) + h[:, :, None] * h[:, None, :], h[..., None]
    )[..., 0],
    "turns": turns,
    "turns of what is alike": powers,
}


def step_of(body: Body, again: bool) -> Any:
    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(body(jnp.tanh(x @ p), x.shape[0]))

    def step(p: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(jax.checkpoint(loss) if again else loss)(p, x)
        return p - grads, value

    return step


def arguments() -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    p, x = (draw.normal(size=(n, 8)) for n in (8, EXAMPLES))
    return jnp.asarray(p, jnp.float32), jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize(
    "recipe", [Recipe(microbatches=4), Recipe(microbatches=2, replicas=2), Recipe(pad_batch=16)]
)
@pytest.mark.parametrize("name", BODIES)
def test_they_are_those_of_the_whole_batch(name: str, recipe: Recipe, again: bool) -> None:
    """Equal, or refused: the turns of a loop over examples may not be known."""
    step, args = step_of(BODIES[name], again), arguments()
    try:
        made = rewritten(step, args, recipe)
    except NotExactError as error:
        assert name == "turns" and "test_static_parameters.py:" in str(error)
        return
    got, want = (jax.jit(f)(*args) for f in (made, step))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("recipe", [Recipe(microbatches=4), Recipe(pad_batch=16)])
def test_a_callback_that_holds_the_size_is_refused(recipe: Recipe) -> None:
    def scaled(h: jax.Array, n: int) -> jax.Array:
        def outside(v: Any) -> Any:
            return np.float32(v * n)

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return h * jax.lax.stop_gradient(jax.pure_callback(outside, shape, jnp.float32(0.1)))

    with pytest.raises(NotExactError, match=r"test_static_parameters.py:.* holds the batch's size"):
        rewritten(step_of(scaled, True), arguments(), recipe)


def test_the_sizes_of_pieces_are_no_dimensions() -> None:
    """Two pieces of a matrix: one size for each piece."""

    def split(x: jax.Array) -> list[jax.Array]:
        return jnp.split(x, 2)

    whole, small = (jax.make_jaxpr(split)(jnp.ones((n, 8))).jaxpr.eqns[-1] for n in (12, 6))
    assert whole.params["sizes"] == (6, 6)
    assert merged(whole, small).params["sizes"] == (3, 3)
