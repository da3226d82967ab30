"""Steps with products in chunks on eight devices: rows, heads or columns split, equal numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from executor import parallelize
from executor.run.export import python_text
from planner import RequestError, make_plan
from tests.zoo.running import difference

pytestmark = pytest.mark.devices
SPLITS = {
    "examples": P("x"),
    "tokens": P(None, "x"),
    "heads": P(None, None, "x"),
    "examples and tokens": P("x", "y"),
}


def step(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, its loss and gradients."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones(scores.shape[2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        return jnp.mean(jnp.sin(jnp.einsum("bhts,bshd->bthd", weights, v)))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def arrays() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(8, 64, 8, 4)).astype(np.float32) for _ in range(3))


@pytest.mark.parametrize("split", list(SPLITS))
def test_attention_that_is_split(split: str) -> None:
    mesh = "x=4,y=2" if "and" in split else "x=8"
    run = parallelize(
        step, cluster="cpu:8", mesh=mesh, chunks=4, shardings={r"\[[012]\]": SPLITS[split]}
    )
    assert difference(run(*arrays()), jax.jit(step)(*arrays())) <= 1e-6
    assert run.plan.chunks == 4 and "64 rows of 64 in 4 chunks" in run.plan.chunked[0]
    assert set(run.plan.as_partition_specs().values()) >= {SPLITS[split]}


def test_columns_that_are_split() -> None:
    """Logits whose vocabulary is split: the parameter is pinned so."""

    def losses(w: Any, h: Any, labels: Any) -> Any:
        def loss(w: Any) -> Any:
            logp = jax.nn.log_softmax(h @ w)
            return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], axis=-1))

        return jax.value_and_grad(loss)(w)

    rng = np.random.default_rng(0)
    w, h = (rng.normal(size=s).astype(np.float32) for s in ((16, 512), (128, 16)))
    labels = rng.integers(0, 512, 128)
    pins = {r"\[0\]": P(None, "x"), r"\[1\]": P()}
    run = parallelize(losses, cluster="cpu:8", mesh="x=8", chunks=4, shardings=pins)
    assert difference(run(w, h, labels), jax.jit(losses)(w, h, labels)) <= 1e-6
    assert "128 rows of 512 in 4 chunks" in run.plan.chunked[0]


def test_no_exported_module_has_chunks() -> None:
    plan = make_plan(step, *arrays(), cluster="cpu:8", chunks=4)
    with pytest.raises(RequestError, match="4 chunks, which no exported module carries out"):
        python_text(plan)
