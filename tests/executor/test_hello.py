"""Who joins a job proves that it belongs to it, and says nothing that can not be."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from executor.launch.start import free_port
from executor.processes import hello
from executor.processes.failure_detection import Watch
from executor.processes.roles import Role
from executor.processes.sockets import LONGEST, Connection, HostError, listen
from tests.executor.test_peers import Told


def fails_to_join(first: Watch, **options: Any) -> None:
    with pytest.raises(HostError, match="does not know the secret of this job"):
        Watch(Role(2, 1, first.role.coordinator), 30.0, **options).start(10.0)


def started(secret: bytes = b"", address: str = "") -> tuple[Watch, threading.Thread]:
    """Process 0 of two, about to meet the other."""
    role = Role(2, 0, f"127.0.0.1:{free_port()}")
    first = Watch(role, 30.0, secret=secret, address=address, end=Told())
    starting = threading.Thread(target=first.start, args=(20.0,))
    starting.start()
    return first, starting


def stranger(first: Watch, words: bytes) -> dict[str, Any] | None:
    """What process 0 answers to these words."""
    until = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", first.ports[0]), 5)
            break
        except OSError:
            assert time.monotonic() < until
    with connection:
        connection.sendall(words)
        return Connection(connection, 30.0).receive(until=time.monotonic() + 10)


def test_who_does_not_know_the_secret_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    first, starting = started(b"one")
    fails_to_join(first, secret=b"two")
    fails_to_join(first)
    hello_ = {"job": first.job, "number": "1", "says": {"process": 1}}
    assert "proof" in (stranger(first, json.dumps(hello_).encode() + b'\n{"proof": "x"}\n') or {})
    second = Watch(Role(2, 1, first.role.coordinator), 30.0, secret=b"one", end=Told())
    second.start(20.0)
    starting.join(20)
    assert sorted(first.peers) == [0, 1]
    assert "did not prove that it knows the job's secret" in caplog.text


def test_a_proof_is_of_both_numbers_and_what_was_said() -> None:
    given = hello.proof(b"s", "joins", ("a", "b"), {"process": 1})
    assert hello.is_proof(given, b"s", "joins", ("a", "b"), {"process": 1})
    for other in (
        (b"t", "joins", ("a", "b"), {"process": 1}),
        (b"s", "listens", ("a", "b"), {"process": 1}),
        (b"s", "joins", ("a", "c"), {"process": 1}),
        (b"s", "joins", ("a", "b"), {"process": 2}),
    ):
        assert not hello.is_proof(given, *other)
    assert not hello.is_proof(None, b"s", "joins", ("a", "b"), {})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"process": 7}, "it says it is process 7 of 2"),
        ({"process": -5}, "it says it is process -5 of 2"),
        ({"process": True}, "it says it is process True of 2"),
        ({"process": "1"}, "it says it is process 1 of 2"),
        ({"pid": -1}, "process 1 says its process id is -1"),
        ({"host": "a\nb"}, "process 1 says its host is"),
        ({"host": "h" * 256}, "process 1 says its host is"),
    ],
)
def test_who_says_what_can_not_be_is_refused(change: dict[str, Any], text: str) -> None:
    says = {"process": 1, "host": "a", "pid": 5}
    assert hello.read_peer(says, 2).host == "a"
    with pytest.raises(ValueError, match=text):
        hello.read_peer({**says, **change}, 2)
    with pytest.raises(ValueError, match="expected its number"):
        hello.read_peer([1], 2)


def test_process_7_of_2_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    first, starting = started()
    wrong = Watch(Role(2, 7, first.role.coordinator), 30.0, end=Told())
    with pytest.raises(HostError, match="it says it is process 7 of 2"):
        wrong.start(10.0)
    Watch(Role(2, 1, first.role.coordinator), 30.0, end=Told()).start(20.0)
    starting.join(20)


def test_a_long_hello_and_a_slow_one_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    first, starting = started()
    assert stranger(first, b"x" * (hello.LONGEST + 70_000)) is None
    assert stranger(first, b"[" * 3000 + b"\n") is None
    monkeypatch.setattr("executor.processes.hello.ANSWER_S", 0.2)
    assert stranger(first, b'{"job": ') is None  # and no more
    monkeypatch.undo()
    Watch(Role(2, 1, first.role.coordinator), 30.0, end=Told()).start(20.0)
    starting.join(20)


def test_a_line_does_not_grow_without_end() -> None:
    with listen("127.0.0.1", 0) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    line = Connection(here, 30.0)
    there.sendall(b'{"a": 1}\n{"b"')
    assert line.receive() == {"a": 1}
    there.sendall(b": 2}\n" + b"x" * 100)
    assert line.receive() == {"b": 2}
    sending = threading.Thread(target=lambda: _sent(there, b"y" * (4 * LONGEST)), daemon=True)
    sending.start()
    assert line.receive() is None and len(line.rest) < 2 * LONGEST
    here.close()
    sending.join(10)
    there.close()


def _sent(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


def test_the_watch_listens_where_it_should() -> None:
    first, starting = started(address="127.0.0.1")
    Watch(Role(2, 1, first.role.coordinator), 30.0, end=Told()).start(20.0)
    starting.join(20)
    with listen("127.0.0.1", 0) as one, listen("", 0) as all_:
        assert one.getsockname()[0] == "127.0.0.1"
        assert all_.getsockname()[0] in ("::", "0.0.0.0")


def test_secrets_come_from_a_variable_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("abc\n")
    assert hello.read_secret({}) == b""
    assert hello.read_secret({"MESHWRIGHT_SECRET": "x"}) == b"x"
    assert hello.read_secret({"MESHWRIGHT_SECRET_FILE": str(file)}) == b"abc"
    hello.forget_secret({"MESHWRIGHT_SECRET_FILE": str(file)})
    assert file.exists()
    hello.forget_secret({"MESHWRIGHT_SECRET_ONCE": str(file)})
    with pytest.raises(HostError, match=r"MESHWRIGHT_SECRET_FILE=.*No such file"):
        hello.read_secret({"MESHWRIGHT_SECRET_FILE": str(file)})
    for name in ("MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert hello.new_secret() != hello.new_secret()
    monkeypatch.setenv("MESHWRIGHT_SECRET", "mine")
    assert hello.new_secret() == {"MESHWRIGHT_SECRET": "mine"}
