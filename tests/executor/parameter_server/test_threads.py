"""Loops with several threads, loops that never end or never begin, and two jobs at once."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, Rule, WaitError, train
from executor.parameter_server.jobs import threads
from executor.parameter_server.jobs.asked import JobRequest
from executor.parameter_server.jobs.job import TrainingJob, worker_life
from executor.parameter_server.placement.layout import layout_of
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.transport.calls import Behind
from executor.parameter_server.transport.links import LocalLinks
from planner.errors import RequestError

ONES = np.ones(3, np.float32)


@pytest.fixture
def often() -> Any:
    """Threads take turns more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("row_cache", [0, 3])
def test_all_pushes_of_several_threads_count(row_cache: int, often: None) -> None:
    def loop(server: ParameterServer) -> list[Exception]:
        server.init(0 * ONES, tables={"t": np.zeros((5, 1), np.float32)})
        errors: list[Exception] = []

        def push() -> None:
            try:
                for _ in range(100):
                    server.push(ONES, rows={"t": ([1], np.ones((1, 1), np.float32))})
                    server.pull_rows({"t": [1, 2]})
                    server.pull()
            except Exception as error:
                errors.append(error)

        both = [threading.Thread(target=push) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        return errors

    job = {"mode": "async", "backend": "local", "wait_s": 20, "row_cache": row_cache}
    done = train(loop, workers=2, servers=2, **job)
    assert done.returned == ([], [])
    assert all(c.applied == 400 and c.duplicates == 0 and not c.lost for c in done.counts)
    np.testing.assert_array_equal(done.params, 400 * ONES)
    assert done.tables["t"][1] == 400


def test_a_thread_takes_the_share_ahead(often: None) -> None:
    """While the loop pushes, with messages that travel meanwhile."""

    def loop(server: ParameterServer) -> int:
        params, ahead = server.init(0 * ONES), queue.Queue[int | None](3)

        def take() -> None:
            for item in server.shares(range(60), how="queue"):
                ahead.put(item)
            ahead.put(None)

        thread = threading.Thread(target=take)
        thread.start()
        count = 0
        while ahead.get() is not None:
            params = server.push_pull(params + ONES - params, overlap=True)
            count += 1
        thread.join()
        return count

    done = train(loop, workers=3, servers=2, mode="async", backend="local", wait_s=20)
    assert sum(done.returned) == 60
    assert all(not c.duplicates and not c.lost for c in done.counts)
    np.testing.assert_array_equal(done.params, 60 * ONES)


def test_the_next_call_is_not_taken_for_the_last() -> None:
    """Two threads wait for one call; the first begins another before the second has seen it."""
    behind: Behind[int] = Behind()
    first, seen, second = Future[int](), threading.Event(), Future[int]()
    behind._under_way = first
    real = first.result

    def late(timeout: float | None = None) -> int:
        found = real(timeout)
        behind._under_way = second
        seen.set()
        return found

    first.result = late  # type: ignore[method-assign]
    first.set_result(1)
    assert behind.arrived() == 1 and seen.is_set()
    assert behind._under_way is second


def test_a_barrier_beside_pushes() -> None:
    """Calls that wait leave room for those that they wait for."""

    errors: list[Exception] = []

    def loop(server: ParameterServer) -> None:
        params = server.init(0 * ONES)

        def barrier() -> None:
            try:
                server.barrier()
            except WaitError as error:
                errors.append(error)

        thread = threading.Thread(target=barrier)
        if server.rank:
            thread.start()
            time.sleep(0.1)
        for _ in range(3):
            params = server.push_pull(ONES + 0 * params)
        if server.rank:
            thread.join()
        else:
            server.barrier()

    done = train(loop, workers=3, servers=1, backend="local", wait_s=10)
    assert not errors
    np.testing.assert_array_equal(done.params, 3 * ONES)


def test_who_fails_leaves_though_a_thread_of_it_waits() -> None:
    begun, over, waiting = threading.Event(), threading.Event(), list[threading.Thread]()

    def loop(server: ParameterServer) -> None:
        server.init(0 * ONES)
        server.push(ONES)

        def answers_late(ahead: int = 0) -> Any:
            begun.set()
            over.wait(60)
            raise WaitError("the test is over")

        def waits() -> None:
            with contextlib.suppress(WaitError):
                server.pull()

        server._calls.pull = answers_late  # type: ignore[method-assign]
        waiting.append(threading.Thread(target=waits))
        waiting[0].start()
        begun.wait()
        raise KeyError("a fault of the loop")

    rule, options = Rule(), {"rule": Rule(), "on_lost": "leave", "wait_s": 60.0}
    job = TrainingJob(loop, JobRequest(2, 1, "local"), rule, None, 60.0, {}, options)
    shard = Shard(*job.shard)
    links = LocalLinks([shard], 8)
    other = ParameterServer(links, 1, 2, **options)
    joining = threading.Thread(target=other.init, args=(0 * ONES,))
    joining.start()
    with pytest.raises(KeyError):
        worker_life(job, links, 0)
    assert waiting[0].is_alive() and shard.members() == (1,)
    over.set()
    waiting[0].join()
    joining.join()


def test_a_worker_that_never_ends_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "END_S", 0.5)
    enough = threading.Event()

    def loop(server: ParameterServer) -> None:
        server.init(0 * ONES)
        if server.rank == 1:
            enough.wait()
        server.push_pull(ONES)

    try:
        with pytest.raises(WaitError, match="to read: worker 1 did not push") as caught:
            train(loop, workers=3, backend="local", wait_s=1.0)
        note = "still at work 0.5 s later, and until this process ends: worker 1"
        assert caught.value.__notes__ == [note]
        assert note in caplog.text
    finally:
        enough.set()


def test_what_threads_return_is_in_order() -> None:
    turns = [threading.Event() for _ in range(4)]
    turns[3].set()

    def life(number: int) -> int:
        turns[number].wait()
        turns[number - 1].set()
        return number

    told: list[str] = []
    assert threads.together(life, 4, told.append) == [0, 1, 2, 3] and not told

    def fails(number: int) -> int:
        if number == 2:
            raise KeyError(number)
        return number

    with pytest.raises(KeyError, match="2"):
        threads.together(fails, 3, told.append)
    assert told == ["the job has failed: KeyError: 2"]


async def waits(server: ParameterServer) -> None:
    server.init(ONES)


def yields(server: ParameterServer, more: int = 0) -> Any:
    yield server.init(ONES)


async def both(server: ParameterServer) -> Any:
    yield server.init(ONES)


@pytest.mark.parametrize(
    ("loop", "text"),
    [(waits, "is async"), (yields, "yields"), (partial(yields, more=1), "yields"), (both, "async")],
)
def test_loops_that_would_not_run_are_refused(loop: Any, text: str) -> None:
    with pytest.raises(RequestError, match=rf"the loop .*{text}: expected a plain function"):
        train(loop, workers=1, backend="local", wait_s=5)


def test_init_is_called_once() -> None:
    def loop(server: ParameterServer) -> None:
        with pytest.raises(RequestError, match=r"\['text'\]: got str"):
            server.init({"text": "no array"})
        server.init({"first": ONES})
        server.init({"first": ONES})

    with pytest.raises(RequestError, match="init was called before in this loop"):
        train(loop, workers=2, backend="local", wait_s=5)


@dataclass
class Script:
    """As a class of the script comes to a worker's process: by value, and unknown to JAX."""

    x: Any


def test_pytrees_that_only_the_script_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"the parameters: got Script, .* of numbers$"):
        layout_of(Script(ONES), 1)
    monkeypatch.setattr(Script, "__module__", "__main__")
    with pytest.raises(RequestError, match=r"\['w'\]: got Script, .* define it in a module"):
        layout_of({"w": Script(ONES)}, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wait_s": "5"}, "wait_s='5', .*expected seconds"),
        ({"snapshots": ""}, "snapshots='': expected the name of a folder"),
    ],
)
def test_options_that_make_no_sense(options: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        train(lambda server: None, workers=1, backend="local", **options)


def test_refused_optimizers_have_the_public_error() -> None:
    with pytest.raises(RequestError) as caught:
        train(lambda s: None, optimizer=optax.lbfgs(), workers=1, backend="local")
    assert type(caught.value) is RequestError


@pytest.mark.slow
@pytest.mark.parametrize("part", ["what worker 0's loop returned", "the loop", "evaluate"])
def test_what_cannot_be_sent_is_told(part: str) -> None:
    pytest.importorskip("ray")
    lock = threading.Lock()

    def loop(server: ParameterServer) -> Any:
        return threading.Lock() if "returned" in part else lock if part == "the loop" else None

    if part != "the loop":
        lock = None  # type: ignore[assignment]
    held = threading.Lock()
    evaluate = (lambda params: held) if part == "evaluate" else None
    words = "worker 0: .*" if "returned" in part else f"{part} can't be sent to another process: .*"
    with pytest.raises(RequestError, match=words + "cannot pickle .*lock"):
        train(loop, workers=1, wait_s=30, evaluate=evaluate)


@pytest.mark.slow
def test_of_two_jobs_at_once_neither_ends_the_others_ray() -> None:
    ray = pytest.importorskip("ray")

    def loop(server: ParameterServer) -> float:
        server.init(np.zeros(2, np.float32))
        for _ in range(3):
            server.push(np.ones(2, np.float32))
        return float(jax.device_get(server.pull()).sum())

    from executor.parameter_server.jobs.on_ray import ray_at

    with ray_at(None):
        with pytest.raises(RequestError, match="another training in this process has started Ray"):
            train(loop, workers=1, wait_s=60)
        assert ray.is_initialized()
    assert not ray.is_initialized()
    ray.init(address="local", include_dashboard=False)
    ended: list[Any] = []

    def one() -> None:
        ended.append(train(loop, workers=1, wait_s=60).returned)

    try:
        both = [threading.Thread(target=one) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert ended == [(6.0,), (6.0,)] and ray.is_initialized()
    finally:
        ray.shutdown()
