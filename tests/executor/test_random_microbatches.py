"""Random train steps in microbatches: equal to the whole batch, or refused; none silently wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from planner.errors import MeshwrightError
from planner.microbatch.rewrite import microbatched
from tests.executor.random_jaxprs import Arrays, instructions, outcomes_of, run
from tests.zoo.running import difference

ROWS = 16


def train_step(body: Any, per_example: bool) -> Any:
    """A step of parameters and a batch; ``per_example``: the body sees one example at a time."""

    def made(params: list[Any], x: Any, i: Any) -> Any:
        arrays = Arrays([x, *params], [i])
        run(arrays, body)
        return arrays.floats[1 + len(params) :][-3:]

    def step(params: list[Any], batch: tuple[Any, Any]) -> Any:
        def loss(params: list[Any]) -> Any:
            if per_example:
                outs = jax.vmap(lambda x, i: made(params, x, i))(*batch)
            else:
                outs = made(params, *batch)
            return sum((jnp.mean(x**2) for x in outs), jnp.float32(0))

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    return step


def outcome(body: Any, width: tuple[int, ...], parts: int, replicas: int, per_example: bool) -> str:
    """Whether a random step is equal in microbatches, or refused."""
    draw = np.random.default_rng(len(body))
    params = [jnp.asarray(draw.uniform(-1, 1, s), jnp.float32) for s in ((4, 6), (6,))]
    x = jnp.asarray(draw.uniform(-1, 1, (ROWS, *width)), jnp.float32)
    args = (params, (x, jnp.asarray(draw.integers(0, 64, (ROWS, 2)), jnp.int32)))
    step = train_step(body, per_example)
    expected = jax.jit(step)(*args)
    try:
        cut = microbatched(step, args, parts, replicas=replicas)
    except MeshwrightError:
        return "refused"
    assert difference(jax.jit(cut)(*args), expected) <= 2e-5
    return "equal"


def outcomes(seed: int, count: int) -> Counter[str]:
    """How many random steps were equal, and how many refused."""
    return outcomes_of(
        outcome,
        seed,
        count,
        body=st.lists(instructions, min_size=1, max_size=5),
        width=st.sampled_from([(4,), (3, 6), ()]),
        parts=st.sampled_from([1, 2, 4, 8]),
        replicas=st.sampled_from([1, 2, 4]),
        per_example=st.booleans(),
    )


def test_random_steps() -> None:
    found = outcomes(0, 25)
    assert found["equal"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_random_steps(seed: int) -> None:
    assert outcomes(seed, 50)["equal"] >= 10
