"""One owner of a run directory: a lock with a lease, and a number that fences out earlier owners.

Owner number n holds the file ``owner-<n>.json``. It is created exclusively, which works on shared
file systems where locks do not. A thread of the owner increments a count in the file. Another
process that sees the same count for `LEASE_S` seconds of its local clock takes over: it creates the
file with the next number and removes the previous one. So no clocks are compared. If owner and
newcomer are on one machine and the owner's process has ended, the newcomer takes over at once.

If an owner was stopped and resumes, its file is gone, or there is a higher number: `Owner.check`
runs before everything that it writes (decision 013). Its unfinished files are in `workplace`. The
new owner replaces that folder with a file, so nothing more can be created there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path as File

from executor.checkpoint.common import CheckpointError

log = logging.getLogger("meshwright")

LEASE_S = 30.0
"""Seconds without a count after which an owner on another machine counts as gone."""

BEAT_S = 2.0
"""Seconds between counts."""

RECORD_BYTES = 512
BAR_TRIES = 100
"""Number of attempts to move away a folder that an earlier owner creates again and again."""

REMOVED = ".removed-"
"""Prefix of the names of folders that are about to be deleted."""
_FILE = re.compile(r"owner-([1-9][0-9]{0,14})\.json")


class FencedError(CheckpointError):
    """Another job owns the run directory: it did not give it up, or has taken it over meanwhile."""


@dataclass(frozen=True)
class Identity:
    """Identity of the owner of a run directory.

    Attributes:
        number: counts owners from 1; the highest is the owner.
        host: name of its host.
        pid: pid of the process that holds the lock, process 0 of its job.
        start: when that process started, in clock ticks since boot; 0 if unknown.
        machine: the boot and the process namespace; pids are comparable where it is equal.
        since: when it became the owner, in UTC by its local clock; for messages only.
    """

    number: int
    host: str
    pid: int
    start: int
    machine: str
    since: str

    def __str__(self) -> str:
        return f"{self.number} {self.host}:{self.pid} {self.since}"


class Owner:
    """The lock of a run directory, held by this process.

    Args:
        folder: the directory.
        me: this process, with its number.
    """

    def __init__(self, folder: File, me: Identity) -> None:
        self.folder, self.me = folder, me
        self._count, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="owner")
        self._thread.start()

    def check(self) -> None:
        """Raise FencedError if another process took over. Costs a few file system operations."""
        highest = max(_numbers(self.folder), default=0)
        if highest == self.me.number:
            with contextlib.suppress(OSError), _file(self.folder, highest).open("rb"):
                return  # opening queries the server; a listing may be some seconds old
        other = _state(self.folder, highest)[2]
        by = "another job" if other is None else f"the job of process {other.pid} on {other.host}"
        raise FencedError(
            f"{self.folder} was taken over by {by} (owner {highest}, this is owner "
            f"{self.me.number}): this job was stopped or cut off for longer than {LEASE_S:g} s; it "
            "writes and deletes nothing more there"
        )

    def release(self) -> None:
        """Let the next job take over at once."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            workplace(self.folder, self.me.number).rmdir()
        _write(self.folder, self.me, self._count, released=True, create=False)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._count += 1
            _write(self.folder, self.me, self._count, released=False, create=False)


def acquire(folder: File) -> Owner:
    """Become the owner of a run directory, and remove what earlier owners left unfinished.

    Raises:
        FencedError: another job owns it; names its host and process.
        CheckpointError: the directory can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Owner(folder, _acquired(folder))
    except OSError as error:
        raise CheckpointError(f"no lock in {folder}: {error}") from error


def _acquired(folder: File) -> Identity:
    deadline = time.monotonic() + 10 * LEASE_S
    while time.monotonic() < deadline:
        before = max(_numbers(folder), default=0)
        if before and not _is_gone(folder, before):
            continue
        me = _identity(before + 1)
        if not _write(folder, me, 0, released=False, create=True):
            continue
        if max(_numbers(folder), default=0) != me.number:  # two others were faster
            _file(folder, me.number).unlink(missing_ok=True)
            continue
        for number in _numbers(folder):
            if number < me.number:
                if not _state(folder, number)[1]:
                    bar(folder, number)
                _file(folder, number).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # left by that number, if its file was removed manually
            workplace(folder, me.number).unlink()
        return me
    raise FencedError(f"{folder}: other jobs took it over for {10 * LEASE_S:g} s; try again")


def workplace(folder: File, number: int | str) -> File:
    """The folder for the unfinished files of an owner."""
    return folder / f".unfinished-{number}"


def bar(folder: File, number: int) -> None:
    """Put an empty file in place of an earlier owner's workplace, so that it can't write there.

    Raises:
        OSError: the folder can't be written.
    """
    place = workplace(folder, number)
    for _ in range(BAR_TRIES):
        try:
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            return
        except FileExistsError:
            if not place.is_dir() or place.is_symlink():
                return
        remove(place)
    raise OSError(f"{place} comes back again and again")


def remove(place: File) -> None:
    """Delete a folder. It is renamed first, so a process that still writes into it can't move a
    half-deleted folder into place."""
    away = place.with_name(f"{REMOVED}{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        place.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _is_gone(folder: File, number: int) -> bool:
    """Whether an owner released its lock, ended, or did not count for a lease; False if another
    process took over meanwhile.

    Raises:
        FencedError: the owner is alive.
    """
    begun, first, waits = time.monotonic(), _state(folder, number), False
    while True:
        count, released, who = _state(folder, number)
        if released or (who is not None and _has_ended(who)):
            return True
        if max(_numbers(folder), default=0) != number:
            return False
        if count != first[0] and who is not None:
            raise FencedError(
                f"{folder} belongs to the job of process {who.pid} on {who.host}, which has run "
                f"since {who.since} (owner {number}); wait for its end, stop it, or give this job "
                "another directory"
            )
        if time.monotonic() - begun > LEASE_S:
            return True
        if who is not None and not waits and time.monotonic() - begun > 2 * BEAT_S:
            waits = True
            log.info(
                "%s: waiting up to %g s for a sign of process %d on %s, which owned it last",
                folder,
                LEASE_S,
                who.pid,
                who.host,
            )
        time.sleep(BEAT_S / 10)


def _state(folder: File, number: int) -> tuple[int, bool, Identity | None]:
    """The count of an owner, whether it released the lock, and its identity; -1, False and None if
    the file can't be read."""
    try:
        content = json.loads(_file(folder, number).read_bytes())
        who = Identity(
            number,
            str(content["host"]),
            int(content["pid"]),
            int(content["start"]),
            str(content["machine"]),
            str(content["since"]),
        )
        return int(content["count"]), bool(content["released"]), who
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1, False, None


def _write(folder: File, who: Identity, count: int, *, released: bool, create: bool) -> bool:
    """Write the record in place, in one call; returns whether that was possible. Without ``create``
    the removed file of an earlier owner is not created again."""
    record = json.dumps(asdict(who) | {"count": count, "released": released})
    flags = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        opened = os.open(_file(folder, who.number), flags, 0o644)
    except FileExistsError:
        return False
    except OSError:
        if create:
            raise
        return False
    try:
        os.pwrite(opened, record.encode().ljust(RECORD_BYTES), 0)
        os.fsync(opened)
    except OSError:
        if create:
            raise
        return False
    finally:
        os.close(opened)
    return True


def _numbers(folder: File) -> list[int]:
    try:
        matches = (_FILE.fullmatch(name) for name in os.listdir(folder))
    except FileNotFoundError:
        return []
    return [int(m[1]) for m in matches if m]


def _file(folder: File, number: int) -> File:
    return folder / f"owner-{number}.json"


def _identity(number: int) -> Identity:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    pid = os.getpid()
    return Identity(number, socket.gethostname()[:100], pid, _start(pid), _machine(), since)


def _machine() -> str:
    """A text that is equal for two processes that can see each other's pids; empty if unknown."""
    try:
        boot = File("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if unknown, -1 if it has ended."""
    try:
        fields = File(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except FileNotFoundError:
        return -1
    except (OSError, ValueError, IndexError):
        return 0


def _has_ended(who: Identity) -> bool:
    """Whether an owner is a process of this machine that has ended."""
    if not who.machine or who.machine != _machine() or who.host != socket.gethostname()[:100]:
        return False
    return _start(who.pid) not in (0, who.start)


_held: dict[File, tuple[Owner, int]] = {}
_lock = threading.Lock()


def hold(folder: File) -> Owner:
    """Like `acquire`, but several users in one process share the lock; each calls `let_go`."""
    place = folder.resolve()
    with _lock:
        owner, users = _held.get(place) or (acquire(folder), 0)
        owner.check()
        _held[place] = (owner, users + 1)
        return owner


def let_go(folder: File) -> None:
    """Release a lock if this is its last user in this process."""
    place = folder.resolve()
    with _lock:
        owner, users = _held.pop(place)
        if users > 1:
            _held[place] = (owner, users - 1)
        else:
            owner.release()
