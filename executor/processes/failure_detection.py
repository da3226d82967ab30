"""Failure detection: every process is connected to process 0 and learns which processes are lost.

A process that ends breaks its connection at once. A host that vanishes is detected by TCP
keepalive, which the kernel maintains whatever Python is doing. Process 0 informs the others. A
process that learns of a loss names the lost process and ends with ``AGAIN``: a program over all
processes can't go on, and would only hang. A frozen process is named once it has not answered for
half the deadline, and counts as lost at the deadline; JAX's own heartbeat, which would abort the
others, comes later.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from executor.processes import hello
from executor.processes.meet import Meetings, ProcessMismatchError, open_meetings
from executor.processes.progress import ENDED, StepProgress, count_steps, doing
from executor.processes.roles import Role
from executor.processes.sockets import Connection, HostError, Peer, hint, listen

AGAIN = 75
"""Exit code of a process that should be started again from the last checkpoint (EX_TEMPFAIL)."""
PORTS = 16
"""Number of ports after the coordinator's; process 0 listens on the first free one."""
WORD_S = 2.0
"""How long a process that fails waits for the report that another was lost."""
RETRY_S = 0.25
STRANGERS = 64
"""Maximum number of connections that have not yet proved that they belong to the job."""
HALT_S = 0.5
"""How long process 0 waits for the others to end before it ends."""

log = logging.getLogger("meshwright")


def _end(text: str, code: int = AGAIN) -> None:
    """Print ``text`` and end at once, from any thread: the main thread may hang in a collective."""
    with contextlib.suppress(Exception):
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def _exit_now() -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


def unseen_error() -> BaseException | None:
    """At exit, the exception that ends this process, even if another excepthook than this module's
    is set."""
    return getattr(sys, "last_value", None)


class Watch:
    """One process's part in monitoring the job.

    Args:
        role: the role of this process.
        deadline_s: seconds without an answer after which a host counts as lost.
        secret: the job's shared secret; empty if there is none.
        address: the address of this host at which process 0 listens; empty for all of its
            addresses.
        end: called with what happened and the exit code; replaced in tests.
    """

    def __init__(
        self,
        role: Role,
        deadline_s: float,
        *,
        secret: bytes = b"",
        address: str = "",
        end: Callable[[str, int], None] = _end,
    ) -> None:
        assert role.coordinator is not None
        self.address = address
        self.strangers = threading.BoundedSemaphore(STRANGERS)
        self.role, self.deadline_s, self.end = role, deadline_s, end
        self.me = Peer(role.process, socket.gethostname(), os.getpid())
        self.host, _, port = role.coordinator.rpartition(":")
        self.job = f"meshwright {port}"  # without the host, which may have several names
        self.greeting = hello.Greeting(self.job, secret, role.processes, self.me)
        self.ports = range(int(port) + 1, min(int(port) + 1 + PORTS, 65536))
        self.peers: dict[int, Peer] = {role.process: self.me}
        self.lines: dict[int, Connection] = {}
        self.gone: set[int] = set()
        self.leaving = self.halting = False
        self.seen: dict[int, float] = {}
        self.error: str | None = None
        self.hear: Callable[[int, dict[str, Any]], None] = lambda process, message: None
        self.heard = threading.Event()
        self.lock = threading.Lock()
        self.progress = StepProgress(self.me, self.halt)
        self.meetings = Meetings(self, self.progress)

    def start(self, timeout_s: float) -> None:
        """Connect to all others.

        Raises:
            HostError: no port could be bound, process 0 was not reached, or others did not come in
                time; says which.
        """
        until = time.monotonic() + timeout_s
        if self.role.process:
            self._connect(until, timeout_s)
        else:
            server = self._listen()
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()
            try:
                self._meet(until, timeout_s)
            finally:
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
                server.close()
        threading.Thread(target=self._ask, daemon=True).start()

    def tell(self, process: int, message: dict[str, Any]) -> None:
        """Send a message to a connected process."""
        if process in self.lines:
            self.lines[process].send(message)

    def halt(self, text: str) -> None:
        """End all processes, including this one, for a reason that a restart does not fix."""
        if self.me.process:
            self.tell(0, {"halt": text})
            return
        self.halting = True
        for process in tuple(self.lines):
            self.tell(process, {"halt": text})
        time.sleep(HALT_S)  # else they end with JAX's coordinator, before they read it
        self.end(text, 1)

    def leave_together(self) -> None:
        """Leave when all processes end by the same error; process 0, with JAX's coordinator, is
        last."""
        self.leave()
        until = time.monotonic() + hello.ANSWER_S
        while self.me.process == 0 and time.monotonic() < until:
            if self.gone >= self.lines.keys():
                return
            time.sleep(0.05)

    def _meet(self, until: float, timeout_s: float) -> None:
        while len(self.peers) < self.role.processes:
            if time.monotonic() >= until:
                self._tell(self.me, "others did not come in time")
                missing = [k for k in range(self.role.processes) if k not in self.peers]
                raise HostError(
                    f"not all of {self.role.processes} processes came in {timeout_s:g} s; missing: "
                    f"{', '.join(map(str, missing))}; there: "
                    + ", ".join(str(self.peers[k]) for k in sorted(self.peers))
                )
            time.sleep(0.05)

    def leave(self) -> None:
        """Announce an orderly end of this process; its connections may break after that."""
        if self.error is not None:
            return
        self.leaving = True
        self.progress.end()
        for line in tuple(self.lines.values()):
            line.send({"leaves": self.me.process, "after": self.progress.begun})

    def fail(self, error: str) -> None:
        """Announce that this process ends by an error. If a report of a lost process arrives within
        ``WORD_S``, the error comes from that loss, and the report ends the process instead."""
        if self.leaving or self.heard.wait(WORD_S):
            return
        self.error = error
        self._tell(self.me, f"it ended by {error}")

    def _tell(self, lost: Peer, how: str) -> None:
        """Report a lost process to all connected processes."""
        with self.lock:
            for line in tuple(self.lines.values()):
                line.send({"lost": lost.__dict__, "how": how})

    def _listen(self) -> socket.socket:
        for port in self.ports:
            with contextlib.suppress(OSError):
                return listen(self.address, port)
        raise HostError(
            f"coordinator {self.role.coordinator}: none of the ports {self.ports[0]} to "
            f"{self.ports[-1]} is free, over which processes watch each other; choose another port"
        )

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed once all have joined
            while True:
                connection, _ = server.accept()
                if self.strangers.acquire(blocking=False):
                    threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            line = Connection(connection, self.deadline_s)
            peer = self._joined(line)
        except OSError:
            peer = None
        finally:
            self.strangers.release()
        if peer is None:
            connection.close()
        else:
            self._follow(peer, line)

    def _joined(self, line: Connection) -> Peer | None:
        """The peer at the other end, once it has proved that it belongs to the job and is accepted;
        None if it is not, with a line in the log if it belongs to a job of this port."""
        belongs, says = self.greeting.heard(line)
        if not belongs:
            return None
        with self.lock:
            peer, why = self._checked(says)
            line.send({"refused": why})
            if peer is not None and why is None:
                self.lines[peer.process] = line
                self.peers[peer.process] = peer
                return peer
        log.error("refused: %s", why)
        return None

    def _checked(self, says: Any) -> tuple[Peer | None, str | None]:
        """The peer that sent this, and the reason why it can't join, or None."""
        count = says.get("processes") if isinstance(says, dict) else None
        try:
            peer = hello.read_peer(says, self.role.processes if type(count) is not int else count)
        except ValueError as error:
            return None, str(error)
        if count != self.role.processes:
            text = f"{self.me} expects {self.role.processes} processes, {peer} says {count}"
            return None, text
        if peer.process in self.peers:
            return None, f"{peer} came when {self.peers[peer.process]} was there"
        return peer, None

    def _connect(self, until: float, timeout_s: float) -> None:
        last: OSError | None = None
        while True:
            for port in self.ports:
                try:
                    if self._greeted(port):
                        return
                except OSError as error:
                    last = error
                if time.monotonic() >= until:
                    break
            if time.monotonic() >= until:
                raise HostError(
                    f"process 0 was not reached from {self.me.host} at {self.role.coordinator} in "
                    f"{timeout_s:g} s ({last}); {hint(last, PORTS)}"
                )
            time.sleep(RETRY_S)

    def _greeted(self, port: int) -> bool:
        """Connect to a port and check whether process 0 of this job listens there."""
        connection = socket.create_connection((self.host.strip("[]"), port), hello.ANSWER_S)
        line = Connection(connection, self.deadline_s)
        peer = self.greeting.join(line, f"{self.host}:{port}")
        if peer is None:
            connection.close()
            return False
        self.peers[0], self.lines[0] = peer, line
        threading.Thread(target=self._follow, args=(self.peers[0], line), daemon=True).start()
        return True

    def _ask(self) -> None:
        """Ping the others periodically. A process that does not answer for half the deadline is
        named; one that does not answer for all of it is lost. Time in which this process was frozen
        itself does not count."""
        warned_at: dict[int, float] = {}
        pause, before = self.deadline_s / 8, time.monotonic()
        while not self.leaving:
            now = time.monotonic()
            frozen = now - before - pause
            if frozen > pause:
                self.seen = {k: seen + frozen for k, seen in self.seen.items()}
            before = now
            for number, line in tuple(self.lines.items()):
                silent = now - self.seen.setdefault(number, now)
                if number in self.gone:
                    continue
                if silent > self.deadline_s:
                    self._stop(self.peers[number], f"it has not answered for {silent:.0f} s")
                    return
                if silent > self.deadline_s / 2 and warned_at.get(number) != self.seen[number]:
                    warned_at[number] = self.seen[number]
                    log.warning("%s has not answered for %.0f s", self.peers[number], silent)
                line.send({"asks": self.me.process})
            time.sleep(pause)

    def _follow(self, peer: Peer, line: Connection) -> None:
        """Read a peer's messages until its connection breaks."""
        try:
            while (message := line.receive()) is not None:
                self.seen[peer.process] = time.monotonic()
                self._take(peer, line, message)
        except (KeyError, TypeError, ValueError) as error:
            log.error("%s sent what is no message: %s: %s", peer, type(error).__name__, error)
            with contextlib.suppress(OSError):
                line.connection.close()
        if peer.process not in self.gone:
            self._stop(peer, "its connection broke")

    def _take(self, peer: Peer, line: Connection, message: dict[str, Any]) -> None:
        """Handle a message."""
        if "asks" in message:
            line.send({"answers": self.me.process})
        elif "leaves" in message:
            self.gone.add(peer.process)
            self.progress.hear(peer, int(message["after"]), ENDED)
            self.meetings.wake()
        elif "meet" in message:
            self.meetings.hear(peer, message)
        elif "halt" in message and self.me.process == 0:
            self.halt(str(message["halt"]))
        elif "halt" in message:
            self.end(str(message["halt"]), 1)
        elif "lost" in message:
            self._stop(Peer(**message["lost"]), str(message["how"]))
        else:
            self.hear(peer.process, message)

    def _stop(self, lost: Peer, how: str) -> None:
        """Report a lost process to the others and end, unless all are ending for another reason."""
        if self.halting:
            return
        self.heard.set()
        if self.me.process == 0:
            self._tell(lost, how)
            if len(self.lines) > 1:
                time.sleep(HALT_S)
        if self.error is None:
            self.end(
                f"{lost} was lost: {how}. {self.me}{doing()} ends with code {AGAIN}: start the job "
                "again from its last checkpoint",
                AGAIN,
            )


def watch(
    role: Role, deadline_s: float, timeout_s: float, *, secret: bytes = b"", address: str = ""
) -> Watch:
    """Connect to all processes of the job and monitor them, until this process ends.

    Args:
        role, deadline_s, secret, address: as for ``Watch``.
        timeout_s: how long to wait for the others.

    Raises:
        HostError: as for ``Watch.start``.
    """
    watching = Watch(role, deadline_s, secret=secret, address=address)
    watching.start(timeout_s)
    before = sys.excepthook

    def failed(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        if isinstance(error, ProcessMismatchError):
            watching.leave_together()
            _exit_now()
        watching.fail(f"{kind.__name__}: {error}".strip().splitlines()[0][:300])
        ended()

    def ended() -> None:
        if (unseen := unseen_error()) is not None and watching.error is None:
            watching.fail(f"{type(unseen).__name__}: {unseen}")
        watching.leave()
        if watching.error is not None:  # an orderly end would wait for processes that are ending
            _exit_now()

    sys.excepthook = failed
    atexit.register(ended)
    open_meetings(watching.meetings)
    count_steps(watching.progress)
    return watching
