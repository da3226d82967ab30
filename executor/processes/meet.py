"""Meetings: process 0 gets one value of every process and sends its answer to all.

Comparisons between processes use them. Processes that joined by ``initialize`` use the connections
of ``failure_detection``, with time limits: an error names a process that has ended, or that goes on
with its steps instead. Other processes (JAX's own ``jax.distributed.initialize``) use one
collective over the first device of every process.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from executor.processes.progress import StepProgress
from executor.processes.sockets import HostError, Peer
from planner.errors import RequestError

log = logging.getLogger("meshwright")

Judge = Callable[[list[Any]], Any]
"""From the values of all processes, in order, to the answer; both JSON."""
PIECE = 1 << 18
"""Maximum number of characters of a value in one message."""
TELL_S = 30.0
"""Interval at which a waiting process logs which processes it waits for."""


class ProcessMismatchError(RequestError):
    """The processes of a job differ in what must be equal; names the processes and the
    differences."""


class Room(Protocol):
    """The parts of ``failure_detection.Watch`` that a meeting uses."""

    me: Peer
    peers: dict[int, Peer]
    gone: set[int]

    def tell(self, process: int, message: dict[str, Any]) -> None:
        """Send a message."""


class Meetings:
    """The meetings of one process with all others. They are numbered: the first of one process is
    the first of all.

    Args:
        room: the processes of the job, and the connections to them.
        progress: step progress of this process; a process that waits in a meeting takes part in no
            step.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, room: Room, progress: StepProgress, timeout_s: float = 300.0) -> None:
        self.room, self.progress, self.timeout_s = room, progress, timeout_s
        self.changed = threading.Condition()
        self.count = 0
        self.pieces: dict[tuple[int, int], list[str]] = defaultdict(list)
        self.came: dict[int, dict[int, Any]] = defaultdict(dict)

    def meet(self, name: str, value: Any, judge: Judge) -> Any:
        """Return, in every process, the answer of ``judge`` in process 0.

        Args:
            name: what this process is about to do.
            value: this process's value, JSON.
            judge: runs in process 0 only.

        Raises:
            ProcessMismatchError: other processes are about to do something else.
            HostError: others did not come in time, or have ended; says which.
        """
        number, self.count = self.count, self.count + 1
        others = self.room.peers.keys() - {self.room.me.process}
        if self.room.me.process:
            self._send(0, number, name, {"name": name, "value": value})
            answer = self._wait(number, {0}, name)[0]
        else:
            for process in others:
                self.room.tell(process, {"meet": number, **self._halts(name)})
            came = self._wait(number, set(others), name)
            answer = self._judged({0: {"name": name, "value": value}, **came}, judge)
            self.progress.clear()
            for process in others:
                self._send(process, number, name, answer)
        if "differ" in answer:
            raise ProcessMismatchError(answer["differ"])
        return answer["value"]

    def hear(self, peer: Peer, message: dict[str, Any]) -> None:
        """Handle a piece of another process's value; from any thread."""
        if "after" in message:
            self.progress.hear(peer, int(message["after"]), f"waits for all ({message['why']})")
        if "piece" not in message:
            return
        key = (peer.process, int(message["meet"]))
        with self.changed:
            self.pieces[key].append(str(message["piece"]))
            if message["more"]:
                return
            if self.room.me.process:
                self.progress.clear()
            self.came[key[1]][peer.process] = json.loads("".join(self.pieces.pop(key)))
            self.changed.notify_all()

    def _halts(self, name: str) -> dict[str, Any]:
        return {"after": self.progress.begun, "why": name}

    def wake(self) -> None:
        """Wake waiting threads: a process has ended."""
        with self.changed:
            self.changed.notify_all()

    def _judged(self, entries: dict[int, Any], judge: Judge) -> dict[str, Any]:
        values = [entries[k] for k in sorted(entries)]
        others = [k for k, v in enumerate(values) if v["name"] != values[0]["name"]]
        if others:
            return {
                "differ": "processes do different things: "
                + ", ".join(f"{self.room.peers[k]}: {values[k]['name']}" for k in (0, *others))
            }
        return {"value": judge([v["value"] for v in values])}

    def _send(self, process: int, number: int, name: str, value: Any) -> None:
        text = json.dumps(value)
        first = self._halts(name) if self.room.me.process else {}
        for k in range(0, len(text), PIECE):
            piece = {"piece": text[k : k + PIECE], "more": k + PIECE < len(text)}
            self.room.tell(process, {"meet": number, **piece, **({} if k else first)})

    def _wait(self, number: int, who: set[int], name: str) -> dict[int, Any]:
        begun = time.monotonic()
        tell_at = begun + TELL_S
        with self.changed:
            while who - self.came[number].keys():
                missing = who - self.came[number].keys()
                ended = missing & self.room.gone
                now = time.monotonic()
                names = ", ".join(str(self.room.peers[k]) for k in sorted(ended or missing))
                if ended:
                    raise HostError(f"{name}: {names} has ended and does not come")
                if now > begun + self.timeout_s:
                    raise HostError(f"{name}: {names} did not come in {self.timeout_s:g} s")
                if now > tell_at:
                    tell_at = now + TELL_S
                    log.warning("%s: waiting %.0f s for %s", name, now - begun, names)
                self.changed.wait(1.0)
            return self.came.pop(number)


_meetings: Meetings | None = None


def open_meetings(meetings: Meetings | None) -> None:
    """Use these connections for meetings from now on; None goes back to collectives."""
    global _meetings
    _meetings = meetings


def meet(name: str, value: Any, judge: Judge) -> Any:
    """Like ``Meetings.meet``, over the connections of this job. With one process, returns the
    answer of ``judge``."""
    if jax.process_count() == 1:
        return judge([value])
    if _meetings is not None:
        return _meetings.meet(name, value, judge)
    entries = [json.loads(x) for x in gathered(json.dumps({"name": name, "value": value}).encode())]
    names = [x["name"] for x in entries]
    if len(set(names)) > 1:
        raise ProcessMismatchError(
            "processes do different things: "
            + ", ".join(f"process {k}: {text}" for k, text in enumerate(names))
        )
    return judge([x["value"] for x in entries])


def gathered(content: bytes) -> list[bytes]:
    """The bytes of every process, gathered by a collective over one device of each: processes may
    have different numbers of devices."""
    lengths = _gather(np.asarray([len(content)], np.int32))[:, 0]
    padded = np.zeros(max(1, int(lengths.max())), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = _gather(padded)
    return [rows[k, :n].tobytes() for k, n in enumerate(lengths)]


def _gather(array: Any) -> Any:
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = jax.sharding.Mesh(np.asarray([first[k] for k in sorted(first)]), ("process",))
    each = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    alike = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh), jax.transfer_guard("allow"):
        spread = jax.make_array_from_callback(
            (len(first), *array.shape), each, lambda _: array[np.newaxis]
        )
        return np.asarray(jax.jit(lambda x: x, out_shardings=alike)(spread).addressable_data(0))
