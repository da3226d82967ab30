"""Steps that train nothing: evaluations, predictions and decoding know weights from the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from executor import parallelize
from planner import make_plan
from planner.graph.ir import Role
from planner.graph.trace import trace
from tests.zoo.running import difference

N, D, H, C = 64, 32, 128, 16


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layers(*sizes: int) -> list[Any]:
    return [(struct(a, b), struct(b)) for a, b in itertools.pairwise(sizes)]


def network(p: Any, x: jax.Array) -> jax.Array:
    for w, b in p:
        x = jax.nn.relu(x @ w + b)
    return x


def evaluated(p: Any, batch: Any) -> Any:
    logits = network(p, batch["x"])
    found = jnp.argmax(logits, -1) == batch["y"]
    return {"loss": jnp.mean(jax.nn.logsumexp(logits, -1)), "found": jnp.mean(found)}


def denoised(p: Any, x: jax.Array) -> jax.Array:
    return x - network(p, x)


def searched(p: Any, x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.argmax(network(p, x) @ index.T, -1)


def of_documents(p: Any, queries: jax.Array, documents: jax.Array) -> jax.Array:
    return network(p, queries) @ network(p, documents).T


def recurrent(p: Any, x: jax.Array) -> jax.Array:
    def turn(h: jax.Array, x_t: jax.Array) -> Any:
        h = jnp.tanh(h @ p["up"] + x_t @ p["in"])
        return h, h

    return jax.lax.scan(turn, jnp.zeros((x.shape[1], H)), x)[1]


def guided(p: Any, x: jax.Array, key: jax.Array) -> Any:
    def body(_: Any, carry: Any) -> Any:
        x, key = carry
        key, now = jax.random.split(key)
        slope = jax.grad(lambda x: jnp.sum(network(p, x)))(x)
        return x - 0.1 * slope + jax.random.normal(now, x.shape), key

    return jax.lax.fori_loop(0, 3, body, (x, key))[0]


def on_edges(p: Any, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    summed = jax.ops.segment_sum(jnp.tanh(nodes[senders]), receivers, 2 * N)
    return jnp.mean(network(p, nodes + summed))


def stacked(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None), x, p)[0]


W = layers(D, H, C)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "evaluation": (evaluated, (W, {"x": struct(N, D), "y": struct(N, dtype=jnp.int32)}), "fb"),
    "unused labels": (
        lambda p, batch: network(p, batch["x"]),
        (W, {"x": struct(N, D), "y": struct(N, dtype=jnp.int32)}),
        "fb",
    ),
    "denoiser": (denoised, (layers(D, H, D), struct(N, D)), "fe"),
    "index": (searched, (W, struct(N, D), struct(5000, C)), "fbf"),
    "documents": (of_documents, (W, struct(N, D), struct(1000, D)), "fbb"),
    "time first": (recurrent, ({"up": struct(H, H), "in": struct(D, H)}, struct(20, N, D)), "fb"),
    "guided": (guided, (layers(D, H, 1), struct(N, D), jax.random.key(0)), "fek"),
    "stacked layers": (stacked, ({"w": struct(6, D, D), "b": struct(6, D)}, struct(N, D)), "fe"),
    "one layer": (lambda w, b, x: x @ w + b, (struct(D, C), struct(C), struct(N, D)), "ffb"),
    "edges": (
        on_edges,
        (
            layers(D, H, C),
            struct(2 * N, D),
            struct(300, dtype=jnp.int32),
            struct(300, dtype=jnp.int32),
        ),
        "fbbb",
    ),
    "no examples": (lambda p, x: network(p, x[None])[0], (W, struct(D)), "aa"),
}
ROLES = {
    "f": Role.FROZEN,
    "b": Role.BATCH,
    "e": Role.EXAMPLES,
    "k": Role.KEY,
    "a": Role.ARGUMENT,
}


@pytest.mark.parametrize("name", CASES)
def test_roles_follow_from_dimensions(name: str) -> None:
    function, args, expected = CASES[name]
    graph = trace(function, args).graph
    found: dict[str, set[Role]] = {}
    for path, v in zip(graph.input_paths, graph.inputs, strict=True):
        found.setdefault(path.partition("]")[0], set()).add(graph.values[v].role)
    assert list(found.values()) == [{ROLES[letter]} for letter in expected]


def test_one_argument_holds_both() -> None:
    graph = trace(lambda a: network(a["p"], a["x"]), ({"p": W, "x": struct(N, D)},)).graph
    roles = {graph.input_paths[k]: graph.values[v].role for k, v in enumerate(graph.inputs)}
    assert roles.pop("[0]['x']") is Role.BATCH
    assert set(roles.values()) == {Role.FROZEN}


@pytest.mark.parametrize("mode", ["dp", "fsdp"])
@pytest.mark.parametrize("name", ["evaluation", "denoiser", "index", "guided"])
def test_the_examples_are_split_and_the_numbers_the_same(name: str, mode: str) -> None:
    function, shapes, _ = CASES[name]

    def real(s: Any) -> jax.Array:
        if jax.dtypes.issubdtype(s.dtype, jax.dtypes.prng_key):
            return s if isinstance(s, jax.Array) else jax.random.key(0)
        if s.dtype == jnp.int32:
            return jax.random.randint(jax.random.key(1), s.shape, 0, C)
        return 0.3 * jax.random.normal(jax.random.key(2), s.shape)

    args = jax.tree.map(real, shapes)
    step = parallelize(function, mode=mode, cluster="cpu:8")
    assert difference(jax.jit(function)(*args), step(*args)) < 1e-5
    plan = make_plan(function, *args, mode=mode, cluster="cpu:8")
    assert "batch split 8 ways" in plan.strategy
    assert not any("not split" in note or "holds a batch" in note for note in plan.notes), (
        plan.notes
    )
    rows = [leaf.path for leaf in plan.inputs if leaf.rows]
    assert rows == (["[1]"] if name in ("denoiser", "guided") else [])
    assert ("state with a row per example" in str(plan)) == bool(rows)


def test_fsdp_shards_the_weights_of_an_evaluation() -> None:
    wide = layers(1024, 4096, 1024)
    batch = {"x": struct(N, 1024), "y": struct(N, dtype=jnp.int32)}
    plan = make_plan(evaluated, wide, batch, mode="fsdp", cluster="h100:8")
    assert plan.strategy == "FSDP over 8; batch split 8 ways"
