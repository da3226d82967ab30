"""Plans by hand are plans: they run, and give the numbers of the unsharded step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan
from planner.compare.manual_plans import compare

pytestmark = pytest.mark.devices

WIDTH, HEADS, VOCAB = 32, 8, 64


def step(state: Any, tokens: Any) -> Any:
    def loss(w: Any) -> Any:
        h = w["embed"][tokens]
        q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[n]) for n in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k), -1)
        h = h + jnp.einsum("bhst,bthe,hed->bsd", scores, v, w["o"])
        h = h + jax.nn.relu(h @ w["up"]) @ w["down"]
        logits = h @ w["embed"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    value, grads = jax.value_and_grad(loss)(state["w"])
    moved = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"w": jax.tree.map(lambda p, m: p - 0.1 * m, state["w"], moved), "m": moved}, value


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)

    each = WIDTH // HEADS
    w = {n: normal(WIDTH, HEADS, each) for n in "qkv"}
    w |= {"o": normal(HEADS, each, WIDTH), "embed": normal(VOCAB, WIDTH)}
    w |= {"up": normal(WIDTH, 128), "down": normal(128, WIDTH)}
    state = {"w": w, "m": jax.tree.map(np.zeros_like, w)}
    return state, rng.integers(0, VOCAB, (8, 16)).astype(np.int32)


def test_kinds_that_modes_do_not_know_give_the_same_numbers() -> None:
    args = arguments()
    expected = jax.tree.leaves(jax.jit(step)(*args))
    by_name = {c.name: c for c in compare(step, *args, cluster="cpu:8").candidates}
    for name in ("tensor 4", "FSDP 2 x tensor 4", "sequence 4"):
        plan = by_name[name].plan
        assert plan is not None
        got = jax.tree.leaves(compile_plan(step, plan)(*args))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=name)
