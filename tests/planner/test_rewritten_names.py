"""What is rewritten keeps the user's lines, and the names that say which pass it belongs to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner.graph.ir import Phase
from planner.graph.trace import Traced
from planner.recipes import Recipe, Rewriter

LAYERS = 4


def step(w: Any, x: Any, key: Any) -> Any:
    """Layers with jitted functions of jax.numpy in them, unrolled; by plain gradient descent."""

    def loss(w: Any) -> Any:
        h = x
        for k in range(LAYERS):
            h = jax.nn.gelu(h @ w[k])
            h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0.0)
            h = jax.nn.softmax(h, -1)
        return jnp.mean(h**2)

    return w - jax.grad(loss)(w)


def rewritten(recipe: Recipe) -> Traced:
    args = (
        jax.ShapeDtypeStruct((LAYERS, 64, 64), jnp.float32),
        jax.ShapeDtypeStruct((16, 64), jnp.float32),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    return Rewriter(step, args)(recipe)[1]


def phases(traced: Traced) -> Counter[Phase]:
    made = {"optimization_barrier", "loop_const", "loop_xs", "loop_carry", "loop_back", "loop_out"}
    return Counter(op.phase for op in traced.graph.ops if op.kind not in made)


@pytest.mark.parametrize("recipe", [Recipe(4), Recipe(1, "full"), Recipe(4, "full")], ids=str)
def test_operations_have_lines(recipe: Recipe) -> None:
    bare = {op.kind for op in rewritten(recipe).graph.ops if not op.source}
    borders = {"optimization_barrier", "loop_const", "loop_xs", "loop_carry", "loop_back"}
    cuts = {"reshape", "transpose", "broadcast_in_dim", "add", "loop_out"}  # of the batch, of sums
    assert bare <= borders | cuts


def test_a_microbatch_has_the_backward_pass_of_the_step() -> None:
    assert (
        phases(rewritten(Recipe(4)))[Phase.BACKWARD] == phases(rewritten(Recipe()))[Phase.BACKWARD]
    )


def test_what_is_computed_again_belongs_to_the_backward_pass() -> None:
    plain, again = phases(rewritten(Recipe())), phases(rewritten(Recipe(1, "full")))
    assert again[Phase.FORWARD] <= plain[Phase.FORWARD]
    assert again[Phase.BACKWARD] > 1.5 * plain[Phase.BACKWARD]
