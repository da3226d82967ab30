"""Steps are computed while pushes travel: lags are counted, bounds are kept."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, Rule, WaitError, train
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.store import Pushed
from executor.parameter_server.transport.links import LocalLinks
from planner.errors import RequestError

ONE = np.ones(4, np.float32)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_values_are_those_of_the_call_before_and_lags_say_so(compress: str | None) -> None:
    def loop(server: ParameterServer) -> list[float]:
        server.init(0 * ONE)
        seen = [float(server.push_pull(ONE, overlap=True)[0]) for _ in range(6)]
        versions = server.version
        return [*seen, float(server.pull()[0]), versions, server.version]

    done = train(
        loop, workers=1, servers=2, mode="async", backend="local", split_bytes=8, compress=compress
    )
    assert done.returned[0] == pytest.approx([0, 1, 2, 3, 4, 5, 6, 5, 6], rel=1e-6)
    assert [c.lags for c in done.counts] == [{0: 1, 1: 5}] * 2


class Slow:
    """Servers that answer a push_pull only once they are let."""

    def __init__(self, rule: Rule) -> None:
        self.links, self.let = LocalLinks([Shard(rule, 1, None, 5.0)], 2), threading.Semaphore(0)
        self.fail = False

    @property
    def count(self) -> int:
        return self.links.count

    def call(self, method: str, args: Any, wait_s: float, first: Any = None) -> list[Any]:
        if method == "push_pull":
            assert self.let.acquire(timeout=20)
            if self.fail:
                raise WaitError("the network is gone")
        return self.links.call(method, args, wait_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.links, name)


def test_the_call_returns_while_the_push_travels() -> None:
    links = Slow(Rule("ssp", 1))
    server = ParameterServer(links, 0, 1, rule=Rule("ssp", 1))
    server.init(0 * ONE)
    for k in range(3):
        values = server.push_pull(ONE, overlap=True)  # with waiting, nobody would let it pass
        assert links.shards[0].version <= k
        np.testing.assert_array_equal(values, k * ONE)
        links.let.release()
    server.settle()
    links.fail = True
    server.push_pull(ONE, overlap=True)
    links.let.release()
    with pytest.raises(WaitError, match="the network is gone"):
        server.settle()


def test_what_fails_on_its_way_comes_out_when_the_loop_ends() -> None:
    def loop(server: ParameterServer) -> None:
        server.init(0 * ONE)
        if server.rank == 0:
            server.push_pull(ONE, overlap=True)
        else:
            time.sleep(1.5)  # longer than worker 0 waits for it

    with pytest.raises(WaitError, match=r"worker 0 waited 0.2 s to read: worker 1 did not push"):
        train(loop, workers=2, mode="ssp", staleness=1, backend="local", wait_s=0.2)


def test_an_overlapped_read_waits_a_push_earlier() -> None:
    served = Shard(Rule("ssp", 1), 2, None, 0.01)
    served.init({"float32": 0 * ONE})
    served.push(0, 1, Pushed({"float32": ONE}))
    assert served.pull(0).version == 1
    with pytest.raises(WaitError, match="worker 1 did not push"):
        served.pull(0, ahead=1)
    served.push(1, 1, Pushed({"float32": ONE}))
    assert served.pull(0, ahead=1).version == 2


@pytest.mark.parametrize("staleness", [1, 3])
def test_nothing_is_computed_on_values_older_than_the_bound(staleness: int) -> None:
    """Workers at random speeds; each adds to a number of its own, so reads say what is in them."""

    def loop(server: ParameterServer) -> list[int]:
        draw = random.Random(server.rank)
        mine = np.eye(3, dtype=np.float32)[server.rank]
        params = server.init(np.zeros(3, np.float32))
        missed = []
        for k in range(40):  # k pushes are made; the gradient of the next is of `params`
            missed.append(k - int(min(np.delete(params, server.rank))))
            time.sleep(draw.choice([0, 0, 0.003]))
            params = server.push_pull(mine, overlap=True)
        return missed

    done = train(loop, workers=3, servers=1, mode="ssp", staleness=staleness, backend="local")
    assert max(max(missed) for missed in done.returned) <= staleness
    assert done.params.tolist() == [40.0] * 3


def test_the_bound_holds_where_only_some_calls_overlap() -> None:
    def loop(server: ParameterServer) -> int:
        mine: Any = np.eye(2, dtype=np.float32)[server.rank]
        params, worst = server.init(np.zeros(2, np.float32)), 0
        for k in range(16):  # what the next gradient is of misses k less the other's pushes
            worst = max(worst, k - int(params[1 - server.rank]))
            time.sleep(0.02 * server.rank)
            params = server.push_pull(mine, overlap=k % 4 != 0)
        return worst

    done = train(loop, workers=2, mode="ssp", staleness=1, backend="local", wait_s=20)
    assert max(done.returned) <= 1


def test_overlapped_training_converges() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(96, 12)).astype(np.float32)
    y = (x @ draw.normal(size=(12, 3))).astype(np.float32)

    def loss(w: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean((x @ w - y) ** 2)

    gradient = jax.jit(jax.grad(loss))

    def loop(server: ParameterServer) -> None:
        params = server.init(np.zeros((12, 3), np.float32))
        rows = slice(server.rank, None, server.num_workers)
        for _ in range(100):
            params = server.push_pull(gradient(params, x[rows], y[rows]), overlap=True)

    for options in ({"mode": "async"}, {"mode": "ssp", "staleness": 2}):
        done = train(loop, workers=2, optimizer=optax.sgd(0.1), backend="local", **options)
        assert float(loss(done.params, x, y)) < 1e-2 * float(loss(np.zeros((12, 3)), x, y))
        assert done.counts[0].applied == 200


@pytest.mark.parametrize("rule", [Rule(), Rule("ssp")])
def test_where_no_lag_is_allowed_it_is_refused(rule: Rule) -> None:
    server = ParameterServer(LocalLinks([Shard(rule, 1, None, 1.0)], 1), 0, 1, rule=rule)
    server.init(ONE)
    with pytest.raises(RequestError, match=r"overlap=True in mode '\w+' with staleness=0"):
        server.push_pull(ONE, overlap=True)
    assert server.push_pull(ONE).tolist() == [2.0] * 4
