"""Random networks in stages under random schedules: equal to the plain step, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import parallelize
from planner.errors import MeshwrightError
from tests.zoo.running import difference

pytestmark = pytest.mark.devices
ROWS, SEQ = 16, 4
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-2", "zb-v", "auto")

Layer = tuple[str, dict[str, Any]]


def weight(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


def layers_of(rng: np.random.Generator, width: int) -> list[Layer]:
    """Layers that keep ``width``, as (kind, parameters)."""
    triple = 3 * width
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "dense": lambda: {"w": weight(rng, width, width), "b": jnp.zeros(width)},
        "residual": lambda: {
            "up": weight(rng, width, triple),
            "down": weight(rng, triple, width),
        },
        "gated": lambda: {"w": weight(rng, width, 2 * width)},
        "norm": lambda: {"scale": jnp.ones(width)},
        "attention": lambda: {
            "qkv": weight(rng, width, triple),
            "out": weight(rng, width, width),
        },
        "mixing": lambda: {"w": weight(rng, SEQ, SEQ)},
        "scanned": lambda: {"w": weight(rng, 4, width, width)},
        "tied": dict,
        "skip": dict,
    }
    kinds = rng.choice(list(makers), size=int(rng.integers(3, 9)))
    return [(str(kind), makers[kind]()) for kind in kinds]


def applied(kind: str, p: dict[str, Any], x: Any, first: Any, table: Any) -> Any:
    """A layer on [rows, SEQ, width]."""
    if kind == "dense":
        return jnp.tanh(x @ p["w"] + p["b"])
    if kind == "residual":
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    if kind == "gated":
        a, b = jnp.split(x @ p["w"], 2, axis=-1)
        return x + a * jax.nn.sigmoid(b)
    if kind == "norm":
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * p["scale"]
    if kind == "attention":
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1])
        return x + jax.nn.softmax(scores) @ v @ p["out"]
    if kind == "mixing":
        return x + jnp.einsum("bsd,st->btd", x, p["w"])
    if kind == "scanned":
        return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, p["w"])[0]
    if kind == "tied":
        return jnp.tanh(x @ table.T @ table)
    return x + 0.5 * first  # "skip"


def step_of(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """A step, its state and a batch."""
    width = int(rng.choice([8, 16, 24]))
    made = layers_of(rng, width)
    kinds = [kind for kind, _ in made]
    momentum, clipped = rng.random(2) < 0.5

    def loss(params: Any, batch: Any) -> Any:
        x = first = params["table"][batch["tokens"]]
        for kind, p in zip(kinds, params["layers"], strict=True):
            x = applied(kind, p, x, first, params["table"])
        scores = jax.nn.log_softmax(x.mean(axis=1) @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, batch["next"][:, None], 1))

    def step(state: Any, batch: Any) -> Any:
        params, speed = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        if clipped:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
        if momentum:
            speed = grads = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, speed), value

    params = {"table": weight(rng, 64, width), "layers": [p for _, p in made]}
    tokens = jnp.asarray(rng.integers(0, 64, (ROWS, SEQ + 1)), jnp.int32)
    batch = {"tokens": tokens[:, :SEQ], "next": tokens[:, SEQ]}
    return step, (params, jax.tree.map(jnp.zeros_like, params)), batch


def outcome(seed: int) -> str:
    """Whether a random step in random stages is equal, or refused."""
    rng = np.random.default_rng(seed)
    step, state, batch = step_of(rng)
    options: dict[str, Any] = {
        "stages": int(rng.choice([2, 4])),
        "microbatches": int(rng.choice([4, 8])),
        "remat": str(rng.choice(["none", "full"])),
        "schedule": str(rng.choice(SCHEDULES)),
    }
    want = jax.jit(step)(*jax.jit(step)(state, batch)[:1], batch)
    try:
        run = parallelize(step, cluster="cpu:8", **options)
        got = run(run(state, batch)[0], batch)
    except MeshwrightError as error:
        assert "stages" in str(error) or "microbatch" in str(error), (seed, error)
        return "refused"
    assert difference(got, want) <= 2e-5, (seed, options)
    return "equal"


def test_random_networks() -> None:
    found = Counter(map(outcome, range(6)))
    assert found["equal"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(100, 600, 50))
def test_many_random_networks(start: int) -> None:
    assert Counter(map(outcome, range(start, start + 50)))["equal"] >= 25
