"""On TPU, constraints of a kernel's gradient stand behind the transpose that reads it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import make_plan
from planner.plan.plan import Plan

WIDTH, ROWS = 4096, 65536


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        heads = jnp.einsum("bd,dhe->bhe", x, params["in"])
        return jnp.mean(jnp.einsum("bhe,hed->bd", jnp.tanh(heads), params["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(cluster: str) -> Plan:
    heads = {"in": (WIDTH, 32, WIDTH // 32), "out": (32, WIDTH // 32, WIDTH)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in heads.items()}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return make_plan(step, params, x, cluster=cluster, mesh="data=16", zero=3)


def results(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """By kind of operation, slots and shardings of its constrained results."""
    out: dict[str, list[tuple[str, str]]] = {"dot_general": [], "transpose": []}
    for c in plan.constraints:
        kind = plan.op_table[plan.op_index[c.op]].split("(")[0]
        if c.slot in ("made", "after", "out") and kind in out:
            out[kind].append((c.slot, str(c.spec)))
    return out


@pytest.mark.parametrize("cluster", ["v5e:4x4", "h100:8x2"])
def test_where_gradients_are_held(cluster: str) -> None:
    plan = planned(cluster)
    found = results(plan)
    stored = {str(leaf.spec) for leaf in plan.inputs if leaf.path.startswith("[0]")}
    if cluster.startswith("h100"):
        assert found["transpose"] == []
        made = [i for i, row in enumerate(found["dot_general"]) if row == ("made", "P()")]
        assert len(made) == 2  # between product and transpose, as the gradients are made
        assert all(found["dot_general"][i + 1][0] == "out" for i in made)
        return
    held = [spec for slot, spec in found["transpose"] if slot == "out"]
    assert len(held) == 2 and set(held) == stored  # as the parameters are stored
    assert [spec for slot, spec in found["transpose"] if slot == "made"] == ["P()", "P()"]
