"""Operations that hand their operand through: free, and where they stop fusion."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import shard
from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.step.analysis import analyse

MATRIX = 4.0 * 64 * 64


def _elementwise_bytes(border: Any) -> float:
    """Bytes that everything but the products moves, with ``border`` at three places."""

    def step(x: jax.Array, w: jax.Array) -> Any:
        y = border(jnp.tanh(border(x @ w)))
        return border(jnp.sin(y)) @ w

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = trace(step, (shape, shape))
    rules = traced.rules
    analysis = analyse(traced.graph, rules, build_groups(traced.graph, rules), (False, False))
    return sum(w.nbytes for facts in analysis.facts for w in facts.work if w.kind != "matmul")


@pytest.mark.parametrize(
    ("border", "matrices"),
    [
        (lambda x: x, 2),  # one fused chain: read, written
        (lambda x: shard(x, "data"), 2),  # marks change nothing
        (jax.lax.optimization_barrier, 4),  # two chains
    ],
)
def test_marks_move_no_bytes_and_barriers_end_a_fusion(border: Any, matrices: int) -> None:
    assert _elementwise_bytes(border) == matrices * MATRIX
