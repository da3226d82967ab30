"""Whole runs: threads of one process, and Ray actors."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import (
    FixedShardsPartitioner,
    LostError,
    ParameterServer,
    Rule,
    WaitError,
    train,
)
from executor.parameter_server.jobs.asked import JobRequest
from executor.parameter_server.jobs.job import TrainingJob, worker_life
from executor.parameter_server.placement.elementwise import EXACT
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.transport.links import LocalLinks
from planner.errors import RequestError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 12)).astype(np.float32)
Y = (X @ RNG.normal(size=(12, 3)) + 0.5).astype(np.float32)
OPTIMIZER = optax.adam(0.05)
STEPS = 40


def fresh() -> Any:
    return {"w": jnp.zeros((12, 3)), "b": jnp.zeros(3)}


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


GRADIENT = jax.jit(jax.grad(loss))


def fit(server: ParameterServer) -> int:
    """Every worker its rows."""
    params = server.init(fresh())
    rows = slice(server.rank, None, server.num_workers)
    for _ in range(STEPS):
        params = server.push_pull(GRADIENT(params, X[rows], Y[rows]))
    return server.rank


def alone(workers: int) -> Any:
    """The same in one loop: the mean of the workers' gradients, in order of rank."""
    params, state = fresh(), OPTIMIZER.init(fresh())

    @functools.partial(jax.jit, compiler_options=EXACT)
    def update(params: Any, state: Any, mean: Any) -> Any:
        updates, state = OPTIMIZER.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        parts = [GRADIENT(params, X[k::workers], Y[k::workers]) for k in range(workers)]
        total = jax.tree.map(lambda *g: sum(map(np.asarray, g[1:]), np.asarray(g[0])), *parts)
        mean = jax.tree.map(lambda g: g / np.float32(workers), total)
        params, state = update(params, state, mean)
    return params


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 1), (3, 2), (2, 4)])
def test_synchronous_training_is_that_of_one_process(workers: int, servers: int) -> None:
    done = train(
        fit, workers=workers, servers=servers, optimizer=OPTIMIZER, backend="local", split_bytes=40
    )
    assert done.returned == tuple(range(workers)) and done.lost == ()
    expected = alone(workers)
    jax.tree.map(np.testing.assert_array_equal, done.params, expected)
    again = train(
        fit, workers=workers, servers=servers, optimizer=OPTIMIZER, backend="local", split_bytes=40
    )
    jax.tree.map(np.testing.assert_array_equal, done.params, again.params)  # whoever came first
    assert all(c.updates == STEPS and c.applied == STEPS * workers for c in done.counts)


@pytest.mark.parametrize("options", [{"mode": "ssp", "staleness": 2}, {"mode": "async"}])
def test_stale_training_ends_as_well(options: dict[str, Any]) -> None:
    sync = train(fit, workers=3, optimizer=OPTIMIZER, backend="local")
    done = train(fit, workers=3, servers=2, optimizer=OPTIMIZER, backend="local", **options)
    first, last = float(loss(fresh(), X, Y)), float(loss(done.params, X, Y))
    assert last < 0.2 * first and last < 2 * float(loss(sync.params, X, Y)) + 0.05
    for counts in done.counts:
        assert counts.applied == counts.updates == 3 * STEPS


def test_a_late_update_is_scaled_by_its_lag() -> None:
    read, pushed = threading.Event(), threading.Event()

    def loop(server: ParameterServer) -> None:
        server.init(np.zeros(5, np.float32))
        if server.rank == 1:  # reads, then three updates of worker 0 come between
            server.pull()
            read.set()
            assert pushed.wait(30)
            server.push(np.ones(5, np.float32))
        else:
            assert read.wait(30)
            for _ in range(3):
                server.pull()
                server.push(np.ones(5, np.float32))
            pushed.set()

    for scaled, expected in ((False, 4.0), (True, 3.25)):
        read.clear(), pushed.clear()
        done = train(loop, workers=2, servers=2, mode="async", backend="local", lag_scaled=scaled,
                     partition=FixedShardsPartitioner(2))  # fmt: skip
        np.testing.assert_array_equal(done.params, np.full(5, expected, np.float32))
        assert [c.lags for c in done.counts] == [{0: 3, 3: 1}] * 2


def test_errors_of_a_loop_come_out() -> None:
    def breaks(server: ParameterServer) -> None:
        server.init(fresh())
        if server.rank == 1:
            raise OSError("disk gone")
        server.push(fresh())

    with pytest.raises(OSError, match="disk gone"):
        train(breaks, workers=2, optimizer=OPTIMIZER, backend="local")


class OddError(Exception):
    """Its words are not its arguments: pickle can't make it again."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


def test_an_error_ends_the_threads_of_the_others() -> None:
    steps = []

    def loop(server: ParameterServer) -> None:
        server.init(np.zeros(3, np.float32))
        if server.rank == 1:
            raise KeyError("mine")
        for k in range(10**6):
            server.push_pull(np.ones(3, np.float32))
            steps.append(k)

    with pytest.raises(KeyError, match="mine"):
        train(loop, workers=2, backend="local", mode="async", wait_s=30)
    assert len(steps) < 10**6


def test_an_error_that_cannot_be_sent_comes_in_words() -> None:
    def breaks(server: ParameterServer) -> None:
        server.init(fresh())
        raise OddError("data.txt", 7)

    with pytest.raises(RequestError, match=r"(?s)in breaks.*OddError: data.txt:7"):
        train(breaks, workers=1, backend="local")


def test_who_is_waited_for_is_named() -> None:
    def sleeps(server: ParameterServer) -> Any:
        params = server.init(fresh())
        if server.rank == 0:
            return server.push_pull(params)
        time.sleep(2)  # longer than worker 0 waits
        return None

    with pytest.raises(WaitError, match=r"worker 0 waited 0.3 s to read: worker 1 did not push"):
        train(sleeps, workers=2, backend="local", wait_s=0.3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers=0"),
        ({"servers": 0}, "servers=0"),
        ({"mode": "eventually"}, "mode 'eventually'"),
        ({"aggregate": 5}, "aggregate=5: there are 2 workers"),
        ({"lag_scaled": True}, "there are no lags"),
        ({"backend": "mpi"}, "backend 'mpi'"),
        ({"optimizer": optax.clip_by_global_norm(1.0)}, "looks at several elements at once"),
    ],
)
def test_broken_requests(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        train(fit, **{"workers": 2, "backend": "local", **options})


@pytest.mark.slow
def test_on_ray() -> None:
    pytest.importorskip("ray")
    done = train(fit, workers=2, servers=2, optimizer=OPTIMIZER, wait_s=60, split_bytes=40)
    assert done.returned == (0, 1)
    jax.tree.map(np.testing.assert_array_equal, done.params, alone(2))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_left_behind() -> None:
    pytest.importorskip("ray")

    def dies(server: ParameterServer) -> int:
        params = server.init(fresh())
        for k in range(STEPS):
            if server.rank == 1 and k == 10:
                os._exit(9)
            params = server.push_pull(GRADIENT(params, X, Y))
        return server.rank

    done = train(dies, workers=3, optimizer=OPTIMIZER, wait_s=60)
    assert done.lost == (1,) and done.returned == (0, None, 2)
    (counts,) = done.counts
    assert counts.updates == STEPS and counts.applied == 2 * STEPS + 10


@pytest.mark.parametrize("on_lost", ["leave", "fail"])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_threads_do_not_wait_for_one_that_ended(on_lost: str, error: type[BaseException]) -> None:
    seen: list[BaseException] = []

    def loop(server: ParameterServer) -> None:
        server.init({"w": np.zeros(3, np.float32)})
        if server.rank == 1:
            raise error
        try:
            server.push_pull({"w": np.ones(3, np.float32)})
            server.barrier()
        except Exception as late:
            seen.append(late)
            raise

    said = "worker 1: its loop called sys.exit" if error is SystemExit else None
    with pytest.raises(RequestError if said else error, match=said):
        train(loop, workers=2, backend="local", wait_s=30, on_lost=on_lost)
    assert not any(isinstance(x, WaitError) for x in seen)


@pytest.mark.parametrize(("on_lost", "left"), [("leave", True), ("fail", False)])
def test_a_process_that_fails_leaves_unless_that_ends_the_job(on_lost: str, left: bool) -> None:
    """Else servers would make an update of what the others have pushed, and maybe keep it."""

    def loop(server: ParameterServer) -> None:
        raise ValueError

    rule = Rule()
    options = {"rule": rule, "on_lost": on_lost}
    job = TrainingJob(loop, JobRequest(2, 1, "ray"), rule, None, 5.0, {}, options, on_lost=on_lost)
    shard = Shard(*job.shard)
    with pytest.raises(ValueError):
        worker_life(job, LocalLinks([shard], 2), 1)
    assert shard.members() == ((0,) if left else (0, 1))


@pytest.mark.parametrize("other", [{"v": 4}, {"w": 5}, {"w": 4, "v": 1}])
def test_workers_have_the_same_parameters(other: dict[str, int]) -> None:
    def loop(server: ParameterServer) -> None:
        sizes = other if server.rank == 1 else {"w": 4}
        server.init({name: np.zeros(n, np.float32) for name, n in sizes.items()})

    with pytest.raises(RequestError, match=r"worker 1 has other parameters than worker 0: \['[vw]"):
        train(loop, workers=2, backend="local", wait_s=20)


def test_who_waits_hears_that_the_job_has_failed() -> None:
    """Worker 0 raises before anybody has values; the others do not wait until their deadline."""
    waited: list[BaseException] = []

    def loop(server: ParameterServer) -> None:
        if server.rank == 0:
            time.sleep(0.3)
            raise ValueError("no data")
        try:
            server.init(np.zeros(3, np.float32)) if server.rank == 1 else server.barrier()
        except LostError as error:
            waited.append(error)
            raise

    with pytest.raises(ValueError, match="no data"):
        train(loop, workers=3, backend="local", wait_s=3600)
    assert [str(e) for e in waited] == ["the job has failed: ValueError: no data"] * 2


def test_first_values_are_not_rounded_where_workers_keep_them() -> None:
    def loop(server: ParameterServer) -> None:
        server.push_pull(0 * server.init(np.full(4, 1.001, np.float32)))

    more: dict[str, Any] = {"optimizer": optax.sgd(0.1), "pull_dtype": "bfloat16"}
    done = train(loop, workers=2, update_on="worker", backend="local", **more)
    np.testing.assert_array_equal(done.params, np.full(4, 1.001, np.float32))
