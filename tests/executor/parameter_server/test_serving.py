"""A server in an actor, without Ray's cluster: what stands for its copy answers as Ray would."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.parameter_server import LostError, Rule
from executor.parameter_server.server.snapshots import Places, listed
from executor.parameter_server.server.store import Pushed
from executor.parameter_server.transport import serving as module
from executor.parameter_server.transport.serving import Copy, Serving

MADE = (Rule("async"), 1, None, 0.3)
ONE = Pushed({"float32": np.ones(2, np.float32)})


class Twin:
    """The actor of a copy: its calls answer, or are late, or it is gone for good."""

    def __init__(self) -> None:
        self.copy, self.late, self.gone = Copy(MADE), False, False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            ready = not self.late and not self.gone
            return self, getattr(self.copy, name)(*args) if ready else None

        return type("Method", (), {"remote": staticmethod(call)})


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ray = pytest.importorskip("ray")
    found: list[Any] = []

    def get(ref: Any, timeout: float) -> Any:
        twin, answer = ref
        if twin.gone or twin in found:
            time.sleep(0.05)
            raise ray.exceptions.ActorDiedError
        if twin.late:
            raise ray.exceptions.GetTimeoutError
        return answer

    def kill(actor: Any, *, no_restart: bool) -> None:
        assert isinstance(actor, Twin) and no_restart
        found.append(actor)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(module, "_came_back", lambda: False)
    return found


def begun(twin: Any = None, places: Places | None = None, begin: int | None = None) -> Serving:
    made = Serving(MADE, 0, places, twin, begin, (1, None))
    if begin is None:
        made.init({"float32": np.zeros(2, np.float32)}, {}, {})
    made.join(0)
    return made


def push(served: Serving, first: int, last: int) -> None:
    for k in range(first, last + 1):
        served.push(0, k, ONE)
        if served.writer is not None and served.writer.thread is not None:
            served.writer.thread.join()


def test_a_copy_that_was_given_up_is_not_believed(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is alive and of the past: the next life of the server must not take what it has."""
    twin = Twin()
    served = begun(twin)
    push(served, 1, 5)
    twin.late = True
    push(served, 6, 40)
    assert served.twin is None and killed == [twin]
    twin.late = False
    monkeypatch.setattr(module, "_came_back", lambda: True)
    with pytest.raises(LostError, match="server 0 was lost, and its copy too"):
        begun(twin, begin=None)


def test_a_copy_that_is_there_is_taken_up(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin()
    push(begun(twin), 1, 5)
    monkeypatch.setattr(module, "_came_back", lambda: True)
    assert Serving(MADE, 0, None, twin, None, (1, None)).version == 5
    assert not killed


def test_several_find_out_that_the_copy_is_gone(killed: list[Any]) -> None:
    twin = Twin()
    served, found = begun(twin), []
    twin.gone = True
    start = threading.Barrier(2)

    def settle() -> None:
        served.mine.sent = twin, None
        start.wait()
        try:
            served._settle()
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=settle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found and killed == [twin]
    served.push(0, 1, ONE)  # it goes on without


def test_what_a_job_began_with_may_be_gone(
    killed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path, 1, 10)
    first = begun(places=places)
    push(first, 1, 20)
    first.finish()
    push(begun(places=places, begin=20), 21, 45)
    assert listed(places.of(0)) == [30, 40]
    monkeypatch.setattr(module, "_came_back", lambda: True)
    again = Serving(MADE, 0, places, None, 20, (1, None))
    assert (again.gone, again.version, again.last) == ("", 40, {0: (40, True)})
    for version in (30, 40):
        (places.of(0) / f"{version:012d}.npz").unlink()
    assert "cannot begin" in Serving(MADE, 0, places, None, 20, (1, None)).gone
