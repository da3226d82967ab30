"""What a step that can't be cut into microbatches says: the line, and only advice that helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner.microbatch.errors import CoupledError, NotExactError
from planner.microbatch.rewrite import microbatched

HERE = f"{__name__.rpartition('.')[2]}.py:"
W, X = jnp.ones((4, 2)), jnp.ones((16, 4))
Loss = Callable[[Any, Any], Any]


def train(loss: Loss) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    return step


def contrastive(w: Any, x: Any) -> Any:
    scores = (x @ w) @ (x @ w).T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def balanced(w: Any, x: Any) -> Any:
    y = x @ w
    return jnp.mean(y**2) + jnp.mean(jnp.var(y, 0))


def product(w: Any, x: Any) -> Any:
    return jnp.prod(1.0 + jnp.sum(x @ w, 1) / 100)


@pytest.mark.parametrize(("loss", "own"), [(contrastive, False), (balanced, True)])
def test_statistics_of_their_own_are_offered_where_they_would_do(loss: Loss, own: bool) -> None:
    with pytest.raises(CoupledError) as caught:
        microbatched(train(loss), (W, X), 2)
    assert ("statistics='per-microbatch'" in str(caught.value)) is own
    assert caught.value.place.startswith(HERE)
    if own:
        microbatched(train(loss), (W, X), 2, statistics="per-microbatch")
    else:
        with pytest.raises(NotExactError):
            microbatched(train(loss), (W, X), 2, statistics="per-microbatch")


def test_a_size_that_is_written_in_the_step_is_named_with_its_line() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) * jnp.ones((16, 1)))

    with pytest.raises(NotExactError) as caught:
        microbatched(train(loss), (W, X), 2)
    line = loss.__code__.co_firstlineno + 1
    assert f"8 examples in place of 16, as if that number were written in it: {HERE}{line}: " in (
        str(caught.value)
    )


@pytest.mark.parametrize("parts", [2, 16])
def test_fewer_microbatches_are_offered_where_one_holds_one_example(parts: int) -> None:
    with pytest.raises(NotExactError, match="follows from the number of examples") as caught:
        microbatched(train(product), (W, X), parts)
    assert ("fewer microbatches may do" in str(caught.value)) is (parts == 16)


def test_a_frozen_matrix_with_as_many_rows_as_the_batch_is_named() -> None:
    def step(w: jax.Array, frozen: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(((x @ w) @ frozen.T) ** 2))(w)

    args = jnp.ones((16, 16)), jnp.ones((8, 16)), jnp.ones((8, 16))
    with pytest.raises(CoupledError, match=r"return \[1\] with the state if it holds no examples"):
        microbatched(step, args, 2)


def test_a_metric_that_is_no_sum_is_not_called_the_loss() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, {"loss": value, "largest": jnp.argmax(x @ w)}

    with pytest.raises(CoupledError, match="return one number per example"):
        microbatched(step, (jnp.ones((8, 4096)), jnp.ones((64, 8))), 2)  # 1 MB of products
