"""One owner of a run directory: refused by name, taken over when gone, fenced out when back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from executor import CheckpointError, Checkpoints
from executor.checkpoint import FencedError, owner
from executor.checkpoint.manager import UNFINISHED
from executor.train.metrics import Meter

pytestmark = pytest.mark.devices
ROOT = Path(__file__).resolve().parents[2]

OTHER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from executor.checkpoint import FencedError, owner
owner.LEASE_S, owner.BEAT_S = 1.0, 0.05
held = owner.acquire(Path(sys.argv[1]))
print("held", held.me, flush=True)
for line in sys.stdin:
    try:
        held.check()
        print("mine", flush=True)
    except FencedError as error:
        print("fenced", error, flush=True)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LEASE_S", 1.0)
    monkeypatch.setattr(owner, "BEAT_S", 0.05)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that owns ``tmp_path`` and says whether it still does, a line for a line."""
    jobs: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OTHER, str(tmp_path)]
        job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        jobs.append(job)
        assert job.stdout is not None and job.stdout.readline().startswith("held")
        return job

    yield start
    for job in jobs:
        job.kill()
        job.wait()


def said(job: subprocess.Popen[str]) -> str:
    assert job.stdin is not None and job.stdout is not None
    job.stdin.write("?\n")
    job.stdin.flush()
    return job.stdout.readline()


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on another machine: it sees no pids of the others."""
    monkeypatch.setattr(owner, "_machine", lambda: "another")


def test_a_second_job_is_refused_by_name(other: Any, tmp_path: Path) -> None:
    job = other()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FencedError) as caught:
            checkpoints.save(1, {"w": jnp.ones(3)})
        assert checkpoints.steps == ()
    text = str(caught.value)
    assert f"process {job.pid} on {os.uname().nodename}" in text and "since 20" in text
    assert said(job) == "mine\n"


def test_an_owner_whose_process_ended_here_is_taken_over_at_once(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LEASE_S", 1000.0)
    job = other()
    job.send_signal(signal.SIGKILL)  # not waited for: a process that ended, and is still listed
    while owner._start(job.pid) != -1:
        time.sleep(0.01)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
    assert owner._numbers(tmp_path) == [2]


def test_a_released_directory_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LEASE_S", 1000.0)
    for step in (1, 2, 3):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step, {"w": jnp.ones(3)})
        elsewhere(monkeypatch)
    assert owner._numbers(tmp_path) == [3]


def test_an_owner_on_another_machine_is_taken_over_after_the_lease(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = other()
    elsewhere(monkeypatch)
    with pytest.raises(FencedError, match="belongs to the job of process"):
        owner.acquire(tmp_path)
    job.send_signal(signal.SIGKILL)
    begun = time.monotonic()
    held = owner.acquire(tmp_path)
    assert time.monotonic() - begun >= owner.LEASE_S
    assert held.me.number == 2
    held.release()


def test_a_frozen_owner_that_wakes_up_is_fenced_out(other: Any, tmp_path: Path) -> None:
    job = other()
    assert said(job) == "mine\n"
    job.send_signal(signal.SIGSTOP)
    held = owner.acquire(tmp_path)
    job.send_signal(signal.SIGCONT)
    text = said(job)
    assert text.startswith("fenced") and "owner 2, this is owner 1" in text
    assert f"process {os.getpid()}" in text
    held.check()
    time.sleep(4 * owner.BEAT_S)  # the other's count goes on, and must not bring its file back
    assert owner._numbers(tmp_path) == [2]
    held.release()


def test_of_many_newcomers_one_becomes_the_owner(tmp_path: Path) -> None:
    code = OTHER.split("held =")[0] + (
        "try:\n    owner.acquire(Path(sys.argv[1])); print('held', flush=True); time.sleep(8)\n"
        "except FencedError: print('refused', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [job.stdout.readline().strip() for job in jobs if job.stdout is not None]
    for job in jobs:
        job.kill()
        job.wait()
    assert sorted(told) == ["held", "refused", "refused", "refused"]


def usurped(folder: Path) -> owner.Owner:
    """Another owner, as of another job, while this process holds the directory."""
    number = max(owner._numbers(folder))
    me = owner.Identity(number + 1, "elsewhere", 4711, 1, "another", "2026-01-01T00:00:00Z")
    assert owner._write(folder, me, 0, released=False, create=True)
    owner._file(folder, number).unlink()
    return owner.Owner(folder, me)


def test_a_fenced_owner_saves_nothing_and_deletes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": jnp.ones(3)})
    checkpoints.wait()
    heir = usurped(tmp_path)
    with pytest.raises(FencedError, match="process 4711 on elsewhere"):
        checkpoints.save(2, {"w": jnp.ones(3)})
    checkpoints.close()
    assert [x.name for x in tmp_path.glob("[0-9]*")] == ["1"]
    heir.release()


def test_an_owner_that_is_fenced_during_a_save_does_not_commit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heirs = []
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": jnp.ones(3)})
    checkpoints.wait()
    before = checkpoints._before_commit

    def late() -> None:
        heirs.append(usurped(tmp_path))
        before()

    monkeypatch.setattr(type(checkpoints), "_before_commit", lambda self: late())
    again = Checkpoints(tmp_path, keep=1)
    again.save(2, {"w": jnp.ones(3)})
    with pytest.raises(FencedError, match="was taken over"):
        again.wait()
    with pytest.raises(CheckpointError):
        again.close()
    checkpoints.disown()
    assert [x.name for x in tmp_path.glob("[0-9]*") if UNFINISHED not in x.name] == ["1"]
    for heir in heirs:
        heir.release()


def test_what_is_unfinished_at_a_takeover_is_not_written_any_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers that make the folders that they miss find a file in their place."""
    heirs, there, made = [], [], []

    def late(folder: Path) -> None:
        there.extend(x for x in tmp_path.rglob("*") if UNFINISHED in str(x) and x.is_dir())
        monkeypatch.setattr(owner, "_held", {})
        monkeypatch.setattr(owner, "_has_ended", lambda who: True)
        heirs.append(Checkpoints(tmp_path))
        heirs[0].own()
        for folder in there:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True)
                made.append(folder)

    monkeypatch.setattr("executor.checkpoint.manager.seal", late)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, {"w": jnp.ones(3)})
    with pytest.raises(FencedError, match="was taken over"):
        checkpoints.wait()
    assert there and not made
    assert sorted(x.name for x in tmp_path.iterdir()) == [".unfinished-1", "owner-2.json"]
    heirs[0].close()


def test_a_save_that_fails_because_of_a_takeover_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails first: here the folder is gone."""
    heirs = []

    def gone(folder: Path) -> None:
        heirs.append(usurped(tmp_path))
        raise FileNotFoundError(folder)

    monkeypatch.setattr("executor.checkpoint.manager.seal", gone)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, {"w": jnp.ones(3)})
    with pytest.raises(FencedError, match="was taken over"):
        checkpoints.wait()
    heirs[0].release()


def test_a_save_that_can_not_make_its_folder_leaves_no_thread_behind(tmp_path: Path) -> None:
    """Python waits for threads at its end; these waited five minutes for the folder."""
    before = set(threading.enumerate())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.own()
    owner.bar(tmp_path, 1)
    with pytest.raises(CheckpointError, match="a save failed"):
        checkpoints.save(2, {"w": jnp.ones(3)}, extra={"position": 3})
        checkpoints.wait()
    started = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in started:
        with contextlib.suppress(Exception):  # Orbax's threads raise their error here
            thread.join(20)
    assert not [t.name for t in started if t.is_alive()]
    checkpoints.disown()


def test_the_next_owner_removes_what_was_unfinished(tmp_path: Path) -> None:
    other_program = tmp_path / f"5{UNFINISHED}" / "state"
    owner_before = tmp_path / ".unfinished-3" / f"6{UNFINISHED}" / "state"
    for left in (other_program, owner_before):
        left.mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert other_program.exists() and owner_before.exists()  # a reader removes nothing
        checkpoints.own()
        assert sorted(x.name for x in tmp_path.iterdir()) == ["owner-1.json"]


def test_numbers_may_begin_anew(tmp_path: Path) -> None:
    """Somebody removed the lock, and a file that fences out an owner of that number is left."""
    owner.bar(tmp_path, 1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
        checkpoints.wait()
        assert checkpoints.steps == (1,)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["1", "owner-1.json"]


def test_a_fenced_owner_writes_no_metrics(tmp_path: Path) -> None:
    held = owner.acquire(tmp_path)
    meter = Meter(10, 0, tmp_path, None, False, held)
    with meter.opened():
        meter.add(1, {"loss": jnp.float32(1)}, {})
        meter.flush({})
        heir = usurped(tmp_path)
        meter.add(2, {"loss": jnp.float32(1)}, {})
        with pytest.raises(FencedError):
            meter.flush({})
        with pytest.raises(FencedError):
            meter.evaluated(2, {"loss": 1.0})
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [1]
    assert lines[0]["owner"] == str(held.me) and lines[0]["owner"].startswith("1 ")
    assert (tmp_path / "evaluations.jsonl").read_text() == ""
    heir.release()
    held.release()


def test_what_a_fenced_owner_had_opened_is_not_the_file_of_the_next(tmp_path: Path) -> None:
    """Between its check and its write an owner may be frozen: the next puts another file there."""
    held = owner.acquire(tmp_path)
    first = Meter(10, 0, tmp_path, None, False, held)
    with first.opened():
        first.add(1, {"loss": jnp.float32(1)}, {})
        first.flush({})
    with open(tmp_path / "metrics.jsonl", "a") as opened:
        heir = usurped(tmp_path)
        with Meter(10, 1, tmp_path, None, False, heir).opened():
            opened.write('{"step": 2, "loss": 7.0}\n')
            opened.flush()
        assert "7.0" not in (tmp_path / "metrics.jsonl").read_text()
    heir.release()
    held.release()


def test_checkpoints_say_their_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from executor.cli.main import main

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
    assert main(["checkpoint", "info", str(tmp_path)]) == 0
    assert f"1 {os.uname().nodename}:{os.getpid()} 20" in capsys.readouterr().out


def test_two_users_in_one_process_share_the_lock(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as one, Checkpoints(tmp_path) as two:
        one.own()
        two.own()
        one.disown()
        two.save(1, {"w": jnp.ones(3)})
    assert '"released": true' in owner._file(tmp_path, 1).read_text()


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 50_000, b'{"host": 3}', b"\xff" * 512])
def test_a_damaged_lock_is_taken_over_after_the_lease(text: bytes, tmp_path: Path) -> None:
    owner._file(tmp_path, 7).write_bytes(text)
    held = owner.acquire(tmp_path)
    assert held.me.number == 8
    held.release()
