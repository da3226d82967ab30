"""An evaluator beside the workers."""

from __future__ import annotations

import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from executor.parameter_server import ParameterServer, WaitError, train
from planner.errors import RequestError
from planner.modes import set_parallel_mode


def ones() -> Any:
    return {"w": jnp.ones((5, 2)), "b": jnp.ones(3)}


def test_it_reads_what_the_workers_wrote() -> None:
    begun = threading.Event()

    def evaluate(params: Any) -> float:
        begun.set()
        return float(params["w"].sum() + params["b"].sum())

    def loop(server: ParameterServer) -> None:
        server.init(ones())
        assert begun.wait(30)  # the first values, or some of the first updates
        for _ in range(3):
            server.push(ones())

    done = train(
        loop,
        workers=2,
        servers=2,
        mode="async",
        backend="local",
        split_bytes=20,
        evaluate=evaluate,
        evaluate_every=0.05,
    )
    versions = [version for version, _ in done.evaluations]
    assert versions == sorted(set(versions)) and len(versions) >= 2
    assert done.evaluations[-1] == (6, 13 * 7.0)
    assert float(done.params["w"].sum() + done.params["b"].sum()) == 13 * 7.0


def test_only_the_last_values_where_the_run_is_short() -> None:
    def loop(server: ParameterServer) -> None:
        server.init(ones())
        server.push(ones())

    done = train(loop, backend="local", evaluate=lambda p: p["b"].tolist())
    assert done.evaluations == ((1, [2.0, 2.0, 2.0]),)
    assert train(loop, backend="local").evaluations == ()


def test_tables_are_told_too() -> None:
    def loop(server: ParameterServer) -> None:
        server.init({}, tables={"t": np.zeros((5, 2), np.float32)})
        server.push(rows={"t": ([1, 4], np.ones((2, 2), np.float32))})

    def evaluate(params: Any, tables: Any) -> Any:
        return params, tables["t"][:, 0].tolist()

    done = train(loop, servers=2, mode="async", backend="local", evaluate=evaluate)
    assert done.evaluations == ((1, ({}, [0.0, 1.0, 0.0, 0.0, 1.0])),)


def test_one_that_fails_does_not_end_the_run() -> None:
    def evaluate(params: Any) -> None:
        raise OSError("no data")

    done = train(lambda server: server.init(ones())["b"].sum(), backend="local", evaluate=evaluate)
    ((version, error),) = done.evaluations
    assert version == 0 and isinstance(error, OSError) and done.returned == (3.0,)


def test_nobody_is_waited_for_when_the_run_fails() -> None:
    def loop(server: ParameterServer) -> None:
        server.init(ones())
        if server.is_chief:
            server.push_pull(ones())

    with pytest.raises(WaitError, match="worker 0 waited"):
        train(
            lambda server: (
                loop(server) or server.barrier() if server.is_chief else threading.Event().wait(2)
            ),
            workers=2,
            backend="local",
            wait_s=0.3,
            evaluate=lambda params: threading.Event().wait(600),
            evaluate_every=0.05,
        )


def test_seconds_that_are_none() -> None:
    with pytest.raises(RequestError, match="evaluate_every=0: expected seconds"):
        train(lambda server: None, backend="local", evaluate_every=0)


def test_the_mode_that_was_set() -> None:
    def loop(server: ParameterServer) -> None:
        server.init(ones())
        server.push(ones())

    set_parallel_mode("DATA_PARALLEL", update="async")
    (counts,) = train(loop, workers=2, backend="local").counts
    assert counts.updates == 2
    (counts,) = train(loop, workers=2, backend="local", mode="sync").counts
    assert counts.updates == 1
    set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=1)

    def ahead(server: ParameterServer) -> None:
        server.init(ones())
        for _ in range(3 if server.is_chief else 1):
            server.push_pull(ones())
        threading.Event().wait(0 if server.is_chief else 1)

    with pytest.raises(WaitError, match="worker 0 waited"):
        train(ahead, workers=2, backend="local", wait_s=0.3)


@pytest.mark.slow
def test_on_ray() -> None:
    pytest.importorskip("ray")

    def loop(server: ParameterServer) -> None:
        server.init(ones())
        for _ in range(3):
            server.push_pull(ones())

    done = train(
        loop,
        workers=2,
        servers=2,
        mode="async",
        wait_s=60,
        split_bytes=20,
        evaluate=lambda params: float(np.sum(params["w"])),
        evaluate_every=0.2,
    )
    assert done.evaluations[-1] == (6, 70.0)
