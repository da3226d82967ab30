"""Processes watch each other: who is lost is named, everywhere, at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from executor.launch.start import Job, free_port, run_local
from executor.processes.failure_detection import AGAIN, Watch
from executor.processes.roles import Role
from executor.processes.sockets import HostError

ROOT = Path(__file__).resolve().parents[2]


class Told:
    """What a process would have ended with."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.code = 0
        self.event = threading.Event()

    def __call__(self, text: str, code: int) -> None:
        self.text, self.code = self.text or text, self.code or code
        self.event.set()


def job(count: int, deadline_s: float = 30.0) -> tuple[list[Watch], list[Told]]:
    """Watches of as many processes, all met, in threads of this one."""
    where = f"127.0.0.1:{free_port()}"
    told = [Told() for _ in range(count)]
    watches = [Watch(Role(count, k, where), deadline_s, end=told[k]) for k in range(count)]
    starts = [threading.Thread(target=w.start, args=(20.0,)) for w in watches]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert sorted(watches[0].peers) == list(range(count))
    return watches, told


def broken(watch: Watch) -> None:
    """End a process as the kernel does: its connections break, and it says nothing of that."""
    watch._tell = lambda lost, how: None  # type: ignore[method-assign]
    for line in watch.lines.values():
        with contextlib.suppress(OSError):  # broken already
            line.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_loss_is_told_to_all(lost: int) -> None:
    watches, told = job(3)
    broken(watches[lost])
    for k in {0, 1, 2} - {lost}:
        assert told[k].event.wait(10), k
        text = told[k].text or ""
        if lost:  # without the coordinator, nobody relays: each names who it was connected to
            assert f"process {lost} (pid {os.getpid()} on {socket.gethostname()}) was lost" in text
        else:
            assert "process 0 (" in text
        assert f"ends with code {AGAIN}" in text


def test_who_leaves_is_not_lost() -> None:
    watches, told = job(3)
    watches[1].leave()
    broken(watches[1])
    watches[2].leave()
    assert not told[0].event.wait(0.5) and not told[2].event.is_set()
    watches[0].leave()
    broken(watches[0])
    assert not told[2].event.wait(0.5)


def test_an_error_is_told_with_its_words() -> None:
    watches, told = job(2)
    watches[1].fail("ValueError: bad batch")
    assert told[0].event.wait(10)
    assert "it ended by ValueError: bad batch" in (told[0].text or "")
    broken(watches[0])
    assert not told[1].event.wait(0.3)  # it ends by its own error, which says more


def test_an_error_that_follows_from_a_loss_is_not_its_own() -> None:
    watches, told = job(3)
    broken(watches[2])
    assert told[1].event.wait(10)
    watches[1].fail("XlaRuntimeError: connection reset")
    assert watches[1].error is None


def test_missing_processes_are_named_and_those_there_told() -> None:
    where, told = f"127.0.0.1:{free_port()}", Told()
    there = Watch(Role(4, 2, where), 30.0, end=told)
    threading.Thread(target=there.start, args=(20.0,), daemon=True).start()
    with pytest.raises(HostError, match=r"not all of 4 .*missing: 1, 3; there: process 0 .*, proc"):
        Watch(Role(4, 0, where), 30.0).start(3.0)
    assert told.event.wait(10) and "others did not come in time" in (told.text or "")


def test_strangers_are_sent_away() -> None:
    where = f"127.0.0.1:{free_port()}"
    first = Watch(Role(2, 0, where), 30.0, end=Told())
    starting = threading.Thread(target=first.start, args=(20.0,))
    starting.start()
    port = int(where.rpartition(":")[2]) + 1
    for words in (b"GET / HTTP/1.0\r\n\r\n", b'{"job": "meshwright 1"}\n', b"[1]\n"):
        until = time.monotonic() + 10
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), 5)
                break
            except OSError:
                assert time.monotonic() < until
        with stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    second = Watch(Role(2, 1, where), 30.0, end=Told())
    second.start(20.0)
    starting.join(20)
    assert sorted(first.peers) == [0, 1]


def test_names_of_one_host_are_one_job() -> None:
    port = free_port()
    watches = [
        Watch(Role(2, k, f"{host}:{port}"), 30.0, end=Told())
        for k, host in enumerate(("127.0.0.1", "localhost"))
    ]
    starting = threading.Thread(target=watches[0].start, args=(20.0,))
    starting.start()
    watches[1].start(20.0)
    starting.join(20)
    assert sorted(watches[0].peers) == [0, 1]


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ((3, 1), r"process 0 .* expects 2 processes, process 1 .* says 3"),
        ((2, 0), None),
    ],
)
def test_who_does_not_fit_is_refused(role: tuple[int, int], text: str | None) -> None:
    where, told = f"127.0.0.1:{free_port()}", Told()
    first = Watch(Role(2, 0, where), 30.0, end=told)
    starting = threading.Thread(target=lambda: _fails(first), daemon=True)
    starting.start()
    if text is not None:
        with pytest.raises(HostError, match=text):
            Watch(Role(*role, where), 30.0).start(10.0)
        return
    second = Watch(Role(2, 1, where), 30.0, end=told)
    second._connect(time.monotonic() + 10, 10)
    with contextlib.suppress(HostError):  # process 0 may have stopped listening by now
        Watch(Role(2, 1, where), 30.0).start(1.0)
    assert not told.event.wait(0.3) and second.lines[0].connection.fileno() >= 0
    assert len(first.lines) == 1


def _fails(watch: Watch) -> None:
    with contextlib.suppress(HostError):
        watch.start(3.0)


def test_another_job_on_the_next_port_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1] - 1}"
        watches = [Watch(Role(2, k, where), 8.0, end=Told()) for k in range(2)]
        starts = [threading.Thread(target=w.start, args=(30.0,)) for w in watches]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join()
        assert sorted(watches[0].peers) == [0, 1]


@pytest.mark.parametrize("frozen", [0, 1])
def test_who_does_not_answer_is_named_then_lost(
    frozen: int, caplog: pytest.LogCaptureFixture
) -> None:
    watches, told = job(2, deadline_s=1.6)
    watches[frozen].leaving = True  # asks no more
    watches[frozen].lines[1 - frozen].send = lambda message: None  # type: ignore[method-assign]
    assert told[1 - frozen].event.wait(10)
    assert f"process {frozen} (" in caplog.text and "has not answered for" in caplog.text
    text = told[1 - frozen].text or ""
    assert text.startswith(f"process {frozen} (") and "it has not answered for 2 s" in text
    assert told[1 - frozen].code == AGAIN


def test_who_was_frozen_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    watches, told = job(2, deadline_s=4.0)
    time.sleep(0.7)
    real, shift = time.monotonic, 100.0
    monkeypatch.setattr(
        "executor.processes.failure_detection.time.monotonic", lambda: real() + shift
    )
    assert not told[0].event.wait(1.5) and not told[1].event.is_set()
    monkeypatch.undo()
    for watch in watches:
        watch.leave()


LOOP = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from executor import initialize
role = initialize(timeout_s=60, deadline_s=float(sys.argv[2]))
from jax.experimental import multihost_utils
for k in range(10_000):
    multihost_utils.process_allgather(np.zeros(3))
    if k == 5 and role.process == int(sys.argv[3]):
        if sys.argv[1] == "error":
            raise ValueError("bad batch")
        os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["error", str(int(signal.SIGKILL))])
def test_no_process_hangs(how: str) -> None:
    lines: list[tuple[int, str]] = []
    command = (sys.executable, "-c", LOOP, how, "60", "1")
    outcome = run_local(Job(command, 2, 1, grace_s=60.0), lambda k, x: lines.append((k, x)))
    text = "\n".join(x for k, x in lines if k == 0)
    assert outcome.codes == (AGAIN, 1 if how == "error" else 137), json.dumps(lines)
    told = "it ended by ValueError: bad batch" if how == "error" else "its connection broke"
    assert "process 1 (pid" in text and told in text


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_named_by_the_others_and_the_launcher(frozen: int) -> None:
    lines: list[tuple[int, str]] = []
    command = (sys.executable, "-c", LOOP, str(int(signal.SIGSTOP)), "6", str(frozen))
    outcome = run_local(Job(command, 2, 1, grace_s=1.0), lambda k, x: lines.append((k, x)))
    assert outcome.codes[1 - frozen] == AGAIN, lines
    assert (outcome.code, outcome.process) == (AGAIN, frozen), lines
    assert "has not answered for" in outcome.lost
