"""Steps between pushes: one step is plain training, several converge with fewer pushes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import LocalSteps, ParameterServer, Served, train
from planner.errors import RequestError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 12)).astype(np.float32)
Y = (X @ RNG.normal(size=(12, 3)) + 0.5).astype(np.float32)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def fresh() -> Any:
    return {"w": jnp.zeros((12, 3)), "b": jnp.zeros(3)}


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


GRADIENT = jax.jit(jax.grad(loss))


def run(inner: Any, push_every: int, steps: int, **options: Any) -> Served:
    def loop(server: ParameterServer) -> Any:
        params = server.init(fresh())
        local = LocalSteps(server, params, inner=inner, push_every=push_every)
        rows = slice(server.rank, None, server.num_workers)
        for _ in range(steps):
            params = local.step(GRADIENT(params, X[rows], Y[rows]))
        return local.finish()

    return train(loop, servers=2, split_bytes=64, backend="local", **options)


def plain(server: ParameterServer) -> None:
    params = server.init(fresh())
    rows = slice(server.rank, None, server.num_workers)
    for _ in range(30):
        params = server.push_pull(GRADIENT(params, X[rows], Y[rows]))


@pytest.mark.parametrize("outer", [optax.sgd(1.0), None])
def test_one_step_is_synchronous_sgd(outer: Any) -> None:
    expected = train(plain, workers=3, optimizer=optax.sgd(0.1), backend="local")
    done = run(optax.sgd(0.1), 1, 30, workers=3, optimizer=outer)
    # p - (p - g / 10) is g / 10 up to a rounding of p, which is of order 1, in each of 30 steps
    most = 30 * 2 * np.finfo(np.float32).eps
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=most),
        done.params,
        expected.params,
    )
    jax.tree.map(np.testing.assert_array_equal, done.params, done.returned[1])


def test_where_nothing_is_rounded_the_bits_are_those_of_synchronous_sgd() -> None:
    pushes = RNG.integers(-64, 64, size=(10, 2, 5)).astype(np.float32)  # sums stay whole

    def local(server: ParameterServer) -> None:
        steps = LocalSteps(server, server.init(np.zeros(5, np.float32)), inner=optax.sgd(0.5),
                           push_every=1)  # fmt: skip
        for push in pushes:
            steps.step(push[server.rank])

    def directly(server: ParameterServer) -> None:
        server.init(np.zeros(5, np.float32))
        for push in pushes:
            server.push_pull(push[server.rank])

    found = [
        train(loop, workers=2, optimizer=optax.sgd(rate), backend="local").params
        for loop, rate in ((local, 1.0), (directly, 0.5))
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": NESTEROV},
        {"optimizer": None},
        {"optimizer": None, "mode": "ssp", "staleness": 1},
        {"optimizer": None, "mode": "async"},
        {"optimizer": optax.sgd(0.35), "mode": "async"},
        {"optimizer": NESTEROV, "compress": "int8"},
    ],
)
def test_four_steps_to_a_push_converge(options: dict[str, Any]) -> None:
    inner = optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(0.05))  # sees whole arrays
    steps = 102
    done = run(inner, 4, steps, workers=2, **options)
    assert float(loss(done.params, X, Y)) < 0.05 * float(loss(fresh(), X, Y))
    pushes = 26  # 25 of four steps, and the two that were left
    together = options.get("mode", "sync") == "sync"
    for counts in done.counts:
        assert counts.applied == 2 * pushes
        assert counts.updates == (pushes if together else 2 * pushes)


def test_the_way_is_shared_among_workers() -> None:
    """Each of three workers comes 6 far: the servers' values come 6 far, not 18."""
    for mode in ("sync", "async"):

        def loop(server: ParameterServer) -> None:
            params = server.init(np.zeros(4, np.float32))
            server.barrier()
            local = LocalSteps(server, params, inner=optax.sgd(1.0), push_every=2)
            for _ in range(2):
                local.step(np.full(4, -3.0, np.float32))

        done = train(loop, workers=3, mode=mode, backend="local")
        np.testing.assert_allclose(done.params, np.full(4, 6.0), rtol=1e-6)


def test_no_steps() -> None:
    def loop(server: ParameterServer) -> Any:
        local = LocalSteps(server, server.init(fresh()), inner=optax.sgd(0.1), push_every=3)
        return local.finish()

    done = train(loop, workers=1, optimizer=optax.sgd(1.0), backend="local")
    assert done.counts[0].applied == 0
    with pytest.raises(RequestError, match="push_every=0: expected at least 1"):
        run(optax.sgd(0.1), 0, 1, workers=1)
