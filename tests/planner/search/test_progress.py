"""Monitors: who hears reports, and who is asked to stop."""

from __future__ import annotations

import math
import threading

from planner.search.progress import Monitor, Progress, current, monitored, silenced

BEGUN = Progress(0.0, math.inf, -math.inf, False, "begun")


def test_without_a_monitor_nothing_is_heard_and_nothing_stops() -> None:
    current().report(BEGUN)
    current().stop()
    assert not current().should_stop()


def test_a_monitor_hears_and_stops_only_inside_its_block() -> None:
    heard: list[Progress] = []
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
    heard: list[Progress] = []
    with monitored(Monitor(heard.append)) as monitor, silenced():
        current().report(BEGUN)
        assert not current().should_stop()
        monitor.stop()
        assert current().should_stop()
    assert heard == []


def test_reports_of_several_threads_come_one_at_a_time() -> None:
    inside, heard = threading.Lock(), list[bool]()

    def hear(progress: Progress) -> None:
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
