"""One server: clocks, duplicates, deadlines, and synchronous updates in a fixed order."""

from __future__ import annotations

import random
import threading
from typing import Any

import jax
import numpy as np
import optax
import pytest

from executor.parameter_server import LostError, Rule, WaitError
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.store import Pushed
from planner.errors import RequestError


def zeros() -> dict[str, Any]:
    return {"float32": np.zeros(3, np.float32)}


def ones(value: float = 1.0) -> Pushed:
    return Pushed({"float32": np.full(3, value, np.float32)})


def shard(rule: Rule, workers: int, optimizer: Any = None, wait_s: float = 0.05) -> Shard:
    made = Shard(rule, workers, optimizer, wait_s)
    made.init(zeros())
    return made


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_read_misses_more_than_the_bound(staleness: int) -> None:
    """Schedules drawn at random: a worker reads if it may, pushes what it read for."""
    for seed in range(350):
        draw = random.Random(seed)
        workers = draw.randint(2, 5)
        served = shard(Rule("ssp", staleness), workers, wait_s=0.0)
        pushed, reading = [0] * workers, [False] * workers
        blocked = 0
        for _ in range(40):
            worker = draw.randrange(workers)
            if not reading[worker]:
                if served.clocks.blockers(worker):
                    with pytest.raises(WaitError):
                        served.pull(worker)
                    blocked += 1
                    continue
                seen = float(served.pull(worker).values["float32"][0])
                reading[worker] = True
                # what it must have seen: all pushes but those of the last `staleness` clocks
                assert seen >= sum(min(p, pushed[worker] - staleness) for p in pushed)
                assert pushed[worker] - min(pushed) <= staleness
            else:
                pushed[worker] += 1
                assert served.push(worker, pushed[worker], ones())
                reading[worker] = False
        assert sum(pushed) == served.counts.applied == served.version
        assert blocked or staleness


def test_async_never_waits_and_knows_its_lag() -> None:
    served = shard(Rule("async", discard_lag=2), 3)
    for worker in range(3):
        served.pull(worker)
    assert [served.push(0, k, ones()) for k in (1, 2, 3)] == [True, True, True]
    assert served.pull(0).version == 3
    assert served.push(1, 1, ones()) is False  # three updates since it read
    assert served.counts.discarded == {1: 1} and served.version == 3
    assert served.counts.lags == {0: 1, 1: 1, 2: 1}


def test_a_push_that_comes_again_counts_once() -> None:
    served = shard(Rule("async"), 1)
    for number in (1, 1, 2, 1, 2, 3):
        served.push(0, number, ones())
    assert float(served.pull(0).values["float32"][0]) == 3.0
    assert (served.counts.applied, served.counts.duplicates) == (3, 3)


def test_synchronous_updates_do_not_depend_on_who_comes_first() -> None:
    draw = np.random.default_rng(0)
    optimizer = optax.adam(1e-2)
    pushes = draw.normal(size=(5, 3, 3)).astype(np.float32)
    ends = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        served = shard(Rule("sync"), 3, optimizer)
        for k, push in enumerate(pushes):
            for worker in order:
                served.push(worker, k + 1, Pushed({"float32": push[worker]}))
        ends.append(served.pull(0).values["float32"])
    values, state = {"float32": np.zeros(3, np.float32)}, None
    update = jax.jit(optimizer.update)
    state = optimizer.init(values)
    for push in pushes:
        mean = ((push[0] + push[1]) + push[2]) / 3
        updates, state = update({"float32": mean}, state, values)
        values = jax.jit(optax.apply_updates)(values, updates)
    for end in ends:
        np.testing.assert_array_equal(end, ends[0])
        np.testing.assert_allclose(end, values["float32"], rtol=1e-6)


def test_backup_workers_are_late_and_counted() -> None:
    served = shard(Rule("sync", aggregate=2), 3)
    for worker in range(3):
        served.pull(worker)
    assert served.push(0, 1, ones(1)) and served.push(2, 1, ones(3))
    assert served.version == 1
    assert served.push(1, 1, ones(100)) is False
    assert float(served.pull(1).values["float32"][0]) == 2.0
    assert served.counts.discarded == {1: 1}


def test_who_leaves_is_not_waited_for() -> None:
    served = shard(Rule("sync"), 3)
    assert served.push(0, 1, ones()) and served.push(1, 1, ones())
    with pytest.raises(WaitError, match=r"worker 0 waited 0.05 s to read: worker 2 did not push"):
        served.pull(0)
    served.leave(2)
    assert served.pull(0).version == 1 and served.members() == (0, 1)


def test_what_was_pushed_before_leaving_counts() -> None:
    served = shard(Rule("sync"), 2)
    assert served.push(0, 1, ones(2.0))
    served.leave(0)
    assert served.version == 0
    assert served.push(1, 1, ones(4.0))
    assert float(served.pull(1).values["float32"][0]) == 3.0
    assert served.push(1, 2, ones(1.0))
    served.leave(1)
    assert (served.counts.applied, served.version) == (3, 2)


def test_what_is_missing_when_its_worker_leaves_was_lost() -> None:
    """It came to an earlier life of this server."""
    served = shard(Rule("async"), 2)
    served.push(0, 1, ones()), served.push(1, 1, ones())
    served.leave(0, 4)
    served.leave(1, 1)
    served.leave(0, 4)  # told again
    assert served.counts.lost == {0: 3} and served.counts.applied == 2
    served.leave(1)
    assert served.counts.lost == {0: 3}


def test_a_wait_before_init_says_so() -> None:
    served = Shard(Rule(), 1, None, 0.05)
    with pytest.raises(WaitError, match="nobody has called init"):
        served.pull(0)
    with pytest.raises(RequestError, match="push before init"):
        served.push(0, 1, ones())


def test_a_barrier_names_who_is_missing_and_works_again_and_again() -> None:
    served = shard(Rule("async"), 3, wait_s=0.05)
    with pytest.raises(WaitError, match=r"at a barrier for: 1, 2"):
        served.barrier(0, 1)
    served.wait_s = 20.0
    passed: list[int] = []

    def walk(worker: int) -> None:
        for k in range(20):
            served.barrier(worker, k + 1)
            passed.append(k)

    threads = [threading.Thread(target=walk, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert passed == sorted(passed) and len(passed) == 60


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "expected one of sync, ssp, async"),
        ({"mode": "async", "staleness": 2}, "in mode 'ssp' only"),
        ({"mode": "ssp", "staleness": -1}, "staleness=-1"),
        ({"mode": "ssp", "aggregate": 2}, "aggregate=2"),
        ({"mode": "sync", "discard_lag": 2}, "discard_lag=2"),
    ],
)
def test_broken_rules(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        Rule(**options)


def test_two_pushes_without_a_read_are_two_updates() -> None:
    served = shard(Rule("sync"), 2, wait_s=0.05)
    assert served.push(0, 1, ones(1))
    with pytest.raises(WaitError, match="worker 1 did not push"):
        served.push(0, 2, ones(2))
    served.wait_s = 20.0
    second = threading.Thread(target=served.push, args=(0, 2, ones(2)))
    second.start()
    assert served.push(1, 1, ones(1))
    second.join(30)
    assert served.push(1, 2, ones(2))
    assert float(served.pull(0).values["float32"][0]) == 3.0
    assert served.counts.applied == 4 and not served.counts.discarded


def test_who_has_left_does_not_come_back_by_itself() -> None:
    """A push of a lost worker that arrives late, or a wait of it that goes on."""
    for rule in (Rule("sync"), Rule("ssp", 1)):
        served = shard(rule, 2)
        assert served.push(0, 1, ones())
        served.leave(0)
        for call in (lambda s=served: s.push(0, 2, ones()), lambda s=served: s.pull(0)):
            with pytest.raises(LostError, match="worker 0 has left"):
                call()
        assert served.members() == (1,)
        served.join(0)
        assert served.members() == (0, 1)


def test_a_push_that_comes_again_while_it_waits_counts_once() -> None:
    served = shard(Rule("sync"), 2, wait_s=20.0)
    served.push(0, 1, ones(1))
    twice = [threading.Thread(target=served.push, args=(0, 2, ones(2))) for _ in range(2)]
    for thread in twice:
        thread.start()
    served.push(1, 1, ones(1))
    served.push(1, 2, ones(2))
    for thread in twice:
        thread.join(30)
    assert served.counts.applied == 4 and served.counts.duplicates == 1
    assert float(served.pull(0).values["float32"][0]) == 3.0


def test_a_push_of_another_form_changes_nothing() -> None:
    served = shard(Rule("async"), 1)
    with pytest.raises(RequestError, match=r"got float32\[4\], the server holds \[3\]"):
        served.push(0, 1, Pushed({"float32": np.ones(4, np.float32)}))
    assert served.push(0, 1, ones()) and served.version == 1


def test_a_push_that_waited_when_the_job_ended_is_made_again() -> None:
    before = shard(Rule("sync"), 2)
    for worker in (0, 1):
        before.push(worker, 1, ones())
    before.push(0, 2, ones())  # of which nothing comes
    after = Shard(Rule("sync"), 2, None, 0.05)
    after.load(*before.dump())
    after.again(2, None)
    assert [after.join(worker)[0] for worker in (0, 1)] == [1, 1]
    for worker in (0, 1):
        assert after.push(worker, 2, ones(3.0))
    np.testing.assert_array_equal(after.pull(0).values["float32"], 4.0)
    assert after.version == 2
