"""All processes stop after the same step, whoever is told to end, and whenever."""

from __future__ import annotations

import random
import threading
import time

import pytest

from executor.processes.preemption import Agreement, Place
from tests.executor.test_peers import job


class Steps:
    """The steps of a job: none ends before all processes have begun the one two before it."""

    def __init__(self, count: int) -> None:
        self.begun = [0] * count
        self.changed = threading.Condition()

    def make(self, process: int) -> None:
        with self.changed:
            self.begun[process] += 1
            mine = self.begun[process]
            self.changed.notify_all()
            ok = self.changed.wait_for(lambda: min(self.begun) >= mine - 2, 20)
            assert ok, "a step hangs"


@pytest.mark.parametrize("seed", range(8))
def test_all_stop_after_one_step(seed: int) -> None:
    draw = random.Random(seed)
    count, steps = draw.randint(2, 4), 40
    watches, _ = job(count)
    agreements = [Agreement(watch) for watch in watches]
    shared, stopped = Steps(count), list[Place]()

    def run(process: int) -> None:
        mine = random.Random(100 * seed + process)
        for made in range(steps):
            if agreements[process].reached((1, made)):
                stopped.append((process, made))
                return
            shared.make(process)
            time.sleep(mine.random() / 200)

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    told = draw.sample(range(count), draw.randint(1, count))  # one of them, or all
    time.sleep(draw.uniform(0, 0.25))
    for process in told:
        agreements[process].request()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "hangs"
    places = {made for _, made in stopped}
    assert len(places) <= 1, stopped
    assert len(stopped) in (0, count), stopped  # none if one had begun its last step
    for watch in watches:
        watch.leave()


def test_who_is_told_before_the_others_begin_stops_with_them() -> None:
    """As after a restart: the steps go on from another number, and one is told at once."""
    watches, _ = job(3)
    agreements = [Agreement(watch) for watch in watches]
    agreements[2].request()
    found: list[tuple[int, int]] = []

    def run(process: int) -> None:
        time.sleep(0.1 * process)
        for made in range(101, 10_000):
            time.sleep(0.002)
            if agreements[process].reached((1, made)):
                found.append((process, made))
                return

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3 and len({made for _, made in found}) == 1
    assert all(agreement.reached((2, 1)) for agreement in agreements)  # no other run begins


def test_who_has_finished_is_not_waited_for() -> None:
    watches, _ = job(2)
    agreements = [Agreement(watch) for watch in watches]
    assert not agreements[0].reached((1, 9))  # it makes its last step, the tenth
    assert not agreements[1].reached((1, 6))
    agreements[1].request()
    until = time.monotonic() + 20
    while agreements[1].last is None and time.monotonic() < until:
        time.sleep(0.01)
    assert agreements[1].last == (1, 10)
    assert not any(agreements[1].reached((1, made)) for made in (7, 8, 9))
    assert agreements[1].reached((1, 10)) and agreements[1].reached((2, 0))
