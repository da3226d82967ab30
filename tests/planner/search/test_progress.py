"""Monitors: who hears reports, and who is asked to stop."""

from __future__ import annotations

import math
import threading
import time

import pytest

from planner.search import SEARCHES, evaluate
from planner.search.progress import (
    Monitor,
    SearchProgress,
    current,
    monitored,
    silenced,
    time_is_up,
)
from tests.planner.search.search_cases import layered_problem

BEGUN = SearchProgress(0.0, math.inf, -math.inf, False, "begun")


def test_without_a_monitor_nothing_is_heard_and_nothing_stops() -> None:
    current().report(BEGUN)
    current().stop()
    assert not current().should_stop()


def test_a_monitor_hears_and_stops_only_inside_its_block() -> None:
    heard: list[SearchProgress] = []
    with monitored(Monitor(heard.append)) as monitor:
        current().report(BEGUN)
        assert current() is monitor
        assert not current().should_stop()
        threading.Thread(target=monitor.stop).start()
        while not current().should_stop():
            pass
    current().report(BEGUN)
    assert heard == [BEGUN]
    assert not current().should_stop()


def test_silenced_drops_reports_and_still_stops() -> None:
    heard: list[SearchProgress] = []
    with monitored(Monitor(heard.append)) as monitor, silenced():
        current().report(BEGUN)
        assert not current().should_stop()
        monitor.stop()
        assert current().should_stop()
    assert heard == []


def test_reports_of_several_threads_come_one_at_a_time() -> None:
    inside, heard = threading.Lock(), list[bool]()

    def hear(progress: SearchProgress) -> None:
        heard.append(inside.acquire(blocking=False))
        inside.release()

    monitor = Monitor(hear)
    threads = [
        threading.Thread(target=lambda: [monitor.report(BEGUN) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [True] * 800


def test_time_is_up_at_the_deadline_or_when_asked() -> None:
    now = time.monotonic()
    assert time_is_up(now)
    assert not time_is_up(now + 60)
    with monitored(Monitor()) as monitor:
        assert not time_is_up(now + 60)
        monitor.stop()
        assert time_is_up(now + 60)


@pytest.mark.long
@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_a_search_that_is_asked_to_stop_returns_soon(search: str) -> None:
    problem = layered_problem(2, 3, 4) if search == "brute" else layered_problem(60, 6, 24)
    with monitored(Monitor()) as monitor:
        threading.Timer(0.2, monitor.stop).start()
        begun = time.monotonic()
        solution = SEARCHES[search](problem, time_limit_s=120.0)
    assert time.monotonic() - begun < 90
    assert len(solution.choice) == len(problem.names)
    assert solution.cost_s == evaluate(problem, solution.choice)[0]
    assert solution.lower_bound_s <= solution.cost_s
