"""Who waits for the end of a queue is not waited for, and keeps its clock and its barriers."""

from __future__ import annotations

import time

import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, Rule, WaitError, train
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.store import Pushed

ONE = Pushed({"float32": np.ones(1, np.float32)})


def shard(rule: Rule, workers: int = 2) -> Shard:
    made = Shard(rule, workers, None, 0.05)
    made.init({"float32": np.zeros(1, np.float32)})
    return made


def test_away_and_back_gains_no_clock() -> None:
    """With a bound of 1 a worker may push twice before the other; no more by going away."""
    served, pushed = shard(Rule("ssp", 1)), 0
    for _ in range(4):
        while not served.clocks.blockers(0):
            served.pull(0)
            pushed += 1
            served.push(0, pushed, ONE)
        with pytest.raises(WaitError, match="worker 1 did not push"):
            served.pull(0)
        served.away(0)
        served.join(0)
    assert (pushed, served.clocks.at) == (2, {0: 2, 1: 0})


def test_who_was_long_away_goes_on_with_the_slowest() -> None:
    served = shard(Rule("ssp", 1))
    served.away(1)
    for k in range(1, 6):
        served.push_pull(0, k, ONE)  # nobody waits for 1
    assert served.members() == (0, 1)
    served.join(1)
    assert served.clocks.at == {0: 5, 1: 5}
    served.away(1)
    served.leave(1)
    served.join(1)  # another life of it: where the others are
    assert served.clocks.at == {0: 5, 1: 5} and not served.clocks.aside


def test_a_push_ends_being_away() -> None:
    served = shard(Rule("async"))
    served.away(1)
    served.push(1, 1, ONE)
    assert served.clocks.at == {0: 0, 1: 1} and not served.clocks.aside


def test_a_barrier_waits_for_who_is_away() -> None:
    served = shard(Rule("async"))
    served.away(1)
    with pytest.raises(WaitError, match="at a barrier for: 1"):
        served.barrier(0, 1)
    assert served.join(1, 0) == (0, 0)  # it has passed none
    served.barrier(1, 1)


def test_a_copy_and_a_snapshot_know_who_is_away() -> None:
    served = shard(Rule("ssp", 1))
    copy = shard(Rule("ssp", 1))
    served.on_change = lambda change: getattr(copy, change[0])(*change[1])
    for k in (1, 2):
        served.push(0, k, ONE)
    served.away(0)
    assert copy.clocks.aside == {0: 2}
    again = Shard(Rule("ssp", 1), 2, None, 0.05)
    again.load(*served.dump())
    for one in (served, copy, again):
        one.join(0)
        assert one.clocks.at == {0: 2, 1: 0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_queues_and_barriers_alternate(mode: str) -> None:
    """Who passes a barrier has seen the same number of them as the others."""

    def loop(server: ParameterServer) -> list[int]:
        params = server.init(np.zeros(4, np.float32))
        seen = []
        for _ in range(3):
            for item in server.shares(range(5), how="queue"):
                params = server.pull()
                time.sleep(0.3 if item == 4 else 0.02)  # the others find the queue empty
                params = server.push_pull(np.ones_like(params))
            server.barrier()
            seen.append(server._calls._barriers)
        return seen

    done = train(
        loop,
        workers=3,
        servers=2,
        optimizer=optax.sgd(0.1),
        mode=mode,
        backend="local",
        wait_s=20,
    )
    assert done.returned == ([1, 2, 3],) * 3
    assert sum(c.applied for c in done.counts) == 15


def test_who_breaks_off_leaves_its_item() -> None:
    """And the others, who do it, do not wait for it at the end of the queue."""

    def loop(server: ParameterServer) -> list[int]:
        server.init(np.zeros(3, np.float32))
        done = []
        for item in server.shares(range(4), how="queue"):
            if server.rank == 1:
                break
            time.sleep(0.1)
            done.append(item)
        server.barrier()
        return done

    done = train(loop, workers=2, mode="async", backend="local", wait_s=20)
    assert [sorted(items) for items in done.returned] == [[0, 1, 2, 3], []]


def test_a_wait_looks_again_before_it_gives_up() -> None:
    """The lock is held, by a long update say, while the time runs out and the rule is met."""
    served, now = shard(Rule("async")), [0.0]
    served.clock = lambda: now[0]

    class Changed:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def notify_all(self) -> None: ...

        def wait(self, left: float) -> bool:
            now[0] += 1
            served.at_barrier[1] = 1
            return False

    served.changed = Changed()  # type: ignore[assignment]
    served.barrier(0, 1)
    served.clocks.join(2)
    with pytest.raises(WaitError, match="for: 2"):
        served.barrier(0, 1)
