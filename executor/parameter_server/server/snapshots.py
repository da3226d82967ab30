"""Snapshots of servers in files: each server writes its own, and a job reads them all.

A file is written under a temporary name and renamed, so that a name stands for a whole snapshot.
The last two of each server stay: servers write at different times, and a synchronous job resumes
from the newest number of updates that all of them have.

    folder/of-2/server-0/000000120.npz
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes the names of its dtypes known to NumPy)
import numpy as np

from executor.parameter_server.placement.layout import Array, layout_from
from executor.parameter_server.server.shard import Shard
from planner.errors import RequestError

Dump = tuple[Mapping[str, Any], Mapping[str, Array]]
"""Facts and arrays of one server, as ``Shard.dump`` returns them."""

FACTS = "facts"
KEPT = 2
BEFORE = "before-"
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """Where the servers of a job write their snapshots.

    Attributes:
        folder: folder of the job, shared by all hosts.
        servers: number of servers.
        every: updates between snapshots.
    """

    folder: Path
    servers: int
    every: int

    def of(self, index: int) -> Path:
        """The folder of one server."""
        return self.folder / f"of-{self.servers}" / f"server-{index}"


def write(folder: Path, dump: Dump) -> Path:
    """Write a snapshot, whole or not at all, and remove all but the newest two."""
    facts, arrays = dump
    folder.mkdir(parents=True, exist_ok=True)
    forms = {name: (str(x.dtype), x.shape) for name, x in arrays.items()}
    text = json.dumps({"facts": facts, "forms": forms}).encode()
    path = folder / f"{facts['version']:012d}.npz"
    beside = folder / f".{path.name}.{os.getpid()}"
    with beside.open("wb") as file:
        raw: dict[str, Any] = {name: x.reshape(-1).view(np.uint8) for name, x in arrays.items()}
        np.savez(file, **{FACTS: np.frombuffer(text, np.uint8), **raw})
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _settle(folder)  # older ones are removed only after that
    for old in listed(folder)[:-KEPT]:
        (folder / f"{old:012d}.npz").unlink(missing_ok=True)
    return path


def _settle(folder: Path) -> None:
    """Wait until the names in a folder are on disk, if the system supports it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def read(folder: Path, version: int, *, arrays: bool = True) -> Dump:
    """Read a snapshot, or only its facts.

    Raises:
        RequestError: the file is damaged; names it.
    """
    path = folder / f"{version:012d}.npz"
    try:
        with np.load(path) as file:
            said = json.loads(bytes(file[FACTS]))
            forms = said["forms"].items() if arrays else ()
            contents = {n: file[n].view(np.dtype(d)).reshape(s) for n, (d, s) in forms}
    except Exception as error:
        raise RequestError(
            f"snapshot {path} can't be read ({type(error).__name__}: {error}); remove it to go on "
            "from the one before it"
        ) from error
    return said["facts"], contents


def listed(folder: Path) -> list[int]:
    """The numbers of updates of a server's snapshots, oldest first."""
    matches = (re.fullmatch(r"([0-9]{12})\.npz", p.name) for p in folder.glob("*.npz"))
    return sorted(int(m[1]) for m in matches if m)


def chosen(places: Places, mode: str) -> tuple[int, ...] | None:
    """The snapshot that every server resumes from; None if a server has none.

    In a synchronous job, this is the newest one that all servers that take part in it have.
    Otherwise, or without a common one, it is the newest of each server.
    """
    had = [listed(places.of(k)) for k in range(places.servers)]
    if not all(had):
        return None
    busy = tuple(range(places.servers))
    for version in reversed(had[0]):
        with contextlib.suppress(RequestError):  # a damaged one is named when it is resumed from
            busy = busy_of(read(places.of(0), version, arrays=False)[0])
            break
    common = set.intersection(*(set(had[k]) for k in busy))
    both = mode == "sync" and common
    return tuple(max(common) if both and k in busy else h[-1] for k, h in enumerate(had))


def busy_of(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The servers that took part in pushes and pulls of a job, from the facts of one of them."""
    return layout_from(facts["about"]).busy(tables=bool(facts["about"].get("tables")))


def earlier(places: Places, mode: str) -> tuple[Places, tuple[int, ...]] | None:
    """What a job in this folder resumes from: the servers of an earlier job (any number of them)
    and the snapshot of each. Of several jobs, the one with the most updates; None without one."""
    candidates = []
    for before in places.folder.glob(f"{BEFORE}of-*"):  # a job ended in replace_all
        here = before.with_name(before.name.removeprefix(BEFORE))
        if not here.exists():
            before.rename(here)
    for folder in places.folder.glob("of-*"):
        number = folder.name.removeprefix("of-")
        if re.fullmatch(r"[1-9][0-9]{0,5}", number):
            other = Places(places.folder, int(number), places.every)
            versions = chosen(other, mode)
            if versions is not None:
                done = max(versions)  # a server that does not take part has none
                candidates.append((done, other.servers == places.servers, other, versions))
    return max(candidates, key=lambda f: f[:2])[2:] if candidates else None


def replace_all(places: Places, dumps: Sequence[Dump]) -> None:
    """Write the snapshots of all servers of a job; remove those for other numbers of servers."""
    begun = Places(places.folder / "begun", places.servers, places.every)
    shutil.rmtree(begun.folder, ignore_errors=True)
    for k, dump in enumerate(dumps):
        write(begun.of(k), dump)
    here = places.of(0).parent
    before = here.with_name(f"{BEFORE}{here.name}")
    if here.exists():
        shutil.rmtree(before, ignore_errors=True)  # a job ended before its removal below
        here.rename(before)
    begun.of(0).parent.rename(here)
    shutil.rmtree(before, ignore_errors=True)
    shutil.rmtree(begun.folder)
    for other in places.folder.glob("of-*"):
        if other != here:
            shutil.rmtree(other)


def forget(places: Places, begin: Sequence[int] | None) -> None:
    """Remove snapshots of an earlier run that are newer than those a job resumes from, and
    incomplete files."""
    for k in range(places.servers):
        for path in places.of(k).glob(".*.npz.*"):
            path.unlink(missing_ok=True)
        for version in listed(places.of(k)):
            if begin is None or version > begin[k]:
                LOG.warning("server %d: the snapshot of update %d is left out", k, version)
                (places.of(k) / f"{version:012d}.npz").unlink(missing_ok=True)


class Writer:
    """Writes a server's snapshots in the background.

    Values are copied between two updates, and a thread writes them. No other snapshot begins while
    it writes, so snapshots may be further apart than requested, and never pile up.

    Args:
        shard: the server; calls this after its updates.
        places: where to write, and how often.
        index: index of the server.
    """

    def __init__(self, shard: Shard, places: Places, index: int) -> None:
        self.shard, self.places, self.index = shard, places, index
        there = listed(places.of(index))  # a restarted server may be ahead of them
        self.written = min(max(there, default=-1), shard.version)
        self.queues = dict(shard.queues)
        self.thread: threading.Thread | None = None
        self.failed: Exception | None = None
        shard.on_update, shard.on_begun = self.updated, self.first

    def updated(self) -> None:
        """Begin a snapshot if one is due; called after an update, while the server is locked."""
        every = self.places.every  # at multiples, like the other servers
        late = self.shard.version // every > self.written // every
        if late and (self.thread is None or not self.thread.is_alive()):
            self.begin()

    def first(self) -> None:
        """Write a first snapshot, if there is none, before the server answers any call.

        Raises:
            RequestError: the snapshot could not be written.
        """
        if not listed(self.places.of(self.index)):
            self.begin()
            if why := self.finish():
                raise RequestError(f"{why}; expected a folder that every server can write to")

    def begin(self) -> None:
        """Copy the server's state, and write it in a thread."""
        self.queues = dict(self.shard.queues)
        dump = self.shard.dump()
        self.written = self.shard.version
        self.thread = threading.Thread(target=self._write, args=(dump,), daemon=True)
        self.thread.start()

    def _write(self, dump: Dump) -> None:
        try:
            write(self.places.of(self.index), dump)
            self.failed = None
        except Exception as error:
            self.failed = error
            LOG.warning("server %d: no snapshot was written: %s", self.index, error)

    def finish(self) -> str:
        """Write a last snapshot if the state has changed, and wait for it; returns the error if it
        could not be written, else "". The last items of queues are finished after the last update.

        The caller has the trained values, so the error is not raised: the log and the result of
        the job report it.
        """
        if self.thread is not None:
            self.thread.join()
        newer = self.shard.version > self.written or self.shard.queues != self.queues
        if newer or self.failed is not None:
            self.begin()
        if self.thread is not None:
            self.thread.join()
        if self.failed is None:
            return ""
        return f"server {self.index}: no snapshot was written: {self.failed}"
