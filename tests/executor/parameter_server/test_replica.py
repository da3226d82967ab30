"""Updates in the workers: the same bits as on the servers, and no mean is missed in silence."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import LocalSteps, ParameterServer, train
from planner.errors import RequestError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 12)).astype(np.float32)
Y = (X @ RNG.normal(size=(12, 3)) + 0.5).astype(np.float32)
OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 20)),
}
TREES = {
    "two arrays": lambda: {"w": jnp.zeros((12, 3)), "b": jnp.zeros(3)},
    "one array": lambda: jnp.full((12, 3), 0.1),
}


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    w, b = (params["w"], params["b"]) if isinstance(params, dict) else (params, 0.0)
    return jnp.mean((x @ w + b - y) ** 2)


GRADIENT = jax.jit(jax.grad(loss))


def fit(fresh: Any, steps: int = 25) -> Any:
    def loop(server: ParameterServer) -> Any:
        params = server.init(fresh())
        rows = slice(server.rank, None, server.num_workers)
        for k in range(steps):
            gradients = GRADIENT(params, X[rows], Y[rows])
            if k % 3:
                params = server.push_pull(gradients)
            else:  # the same in two calls, and a pull of nothing new
                assert server.push(gradients)
                server.pull()
                params = server.pull()
        return jax.device_get(params)

    return loop


QUICK = ("momentum", "schedule")


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_the_same_bits_wherever_the_optimizer_runs(name: str, tree: str) -> None:
    options: dict[str, Any] = {"workers": 3, "servers": 2, "split_bytes": 40, "backend": "local"}
    loop, optimizer = fit(TREES[tree]), OPTIMIZERS[name]
    there = train(loop, optimizer=optimizer, **options)
    here = train(loop, optimizer=optimizer, update_on="worker", **options)
    for params in (here.params, *here.returned):
        jax.tree.map(np.testing.assert_array_equal, params, there.params)
    assert [(c.updates, c.applied) for c in here.counts] == [(25, 75)] * 2


def test_an_optimizer_may_look_at_whole_arrays() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5))
    done = train(fit(TREES["two arrays"]), workers=2, servers=3, optimizer=optimizer,
                 update_on="worker", backend="local", split_bytes=40)  # fmt: skip
    params, state = TREES["two arrays"](), optimizer.init(TREES["two arrays"]())
    for _ in range(25):
        parts = [GRADIENT(params, X[k::2], Y[k::2]) for k in range(2)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), done.params, params)


def test_who_is_longer_there_says_what_the_last_values_are() -> None:
    def loop(server: ParameterServer) -> None:
        params = server.init(jnp.zeros(6))
        for _ in range(2 + 3 * server.rank):
            params = server.push_pull(jnp.ones(6) + 0 * params)

    done = train(loop, workers=2, optimizer=optax.sgd(1.0), update_on="worker", backend="local")
    np.testing.assert_array_equal(done.params, np.full(6, -5.0))
    untouched = train(
        lambda server: server.init(jnp.full(6, 2.0)) is None,
        workers=1, optimizer=optax.sgd(1.0), update_on="worker", backend="local",
    )  # fmt: skip
    np.testing.assert_array_equal(untouched.params, np.full(6, 2.0))


def test_with_other_options() -> None:
    def loop(server: ParameterServer) -> None:
        params = server.init(TREES["two arrays"]())
        local = LocalSteps(server, params, inner=optax.sgd(0.05), push_every=4)
        for _ in range(100):
            params = local.step(GRADIENT(params, X, Y))

    done = train(loop, workers=2, optimizer=optax.sgd(0.7, 0.9, nesterov=True), backend="local",
                 update_on="worker", compress="int8")  # fmt: skip
    assert float(loss(done.params, X, Y)) < 0.05 * float(loss(TREES["two arrays"](), X, Y))


def test_who_comes_later_has_missed_means() -> None:
    left, trained = threading.Event(), threading.Event()

    def loop(server: ParameterServer) -> None:
        if server.rank == 1:
            server.leave()
            left.set()
            assert trained.wait(30)
            server.init(jnp.zeros(6))
        else:
            server.init(jnp.zeros(6))
            assert left.wait(30)
            for _ in range(2):
                server.push_pull(jnp.ones(6))
            trained.set()

    with pytest.raises(RequestError, match="is at update 0 and the servers are at 2; it has to be"):
        train(loop, workers=2, optimizer=optax.sgd(1.0), update_on="worker", backend="local")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "async"}, "in mode 'async' with aggregate=None: workers that do not all get"),
        ({"mode": "ssp", "staleness": 2}, "in mode 'ssp'"),
        ({"aggregate": 1}, "aggregate=1"),
        ({"optimizer": None}, "without an optimizer"),
        ({"update_on": "chief"}, "update_on='chief': expected 'server' or 'worker'"),
        ({"evaluate": loss}, "evaluate with update_on='worker'"),
    ],
)
def test_where_workers_would_not_stay_the_same_it_is_refused(
    options: dict[str, Any], text: str
) -> None:
    asked = {"optimizer": optax.sgd(0.1), "update_on": "worker", "workers": 2, **options}
    with pytest.raises(RequestError, match=text):
        train(fit(TREES["one array"]), backend="local", **asked)


def test_tables_are_refused() -> None:
    def loop(server: ParameterServer) -> None:
        server.init({}, tables={"embed": np.zeros((4, 2), np.float32)})

    with pytest.raises(RequestError, match="tables with update_on='worker'"):
        train(loop, workers=1, optimizer=optax.sgd(1.0), update_on="worker", backend="local")
