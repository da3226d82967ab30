"""Who else is in the job, and who was lost: every process is connected to process 0.

A process that ends breaks its connection at once; a host that vanishes is found by TCP keepalive,
which the kernel keeps, whatever Python is doing. Process 0 tells the others. Who learns of a loss
names it and ends with ``AGAIN``: a program over all processes can't go on, and would only hang.
A process that is frozen is named once it has not answered for half the deadline; JAX's heartbeat
ends the job at the deadline.
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

from executor.lines import HostError, Line, Peer, hint, listen
from executor.roles import Role

AGAIN = 75
"""Exit code of a process that should be started again from the last checkpoint (EX_TEMPFAIL)."""
PORTS = 16
"""Ports after the coordinator's, of which process 0 listens on the first that is free."""
WORD_S = 2.0
"""How long a process that fails waits for the word that another was lost."""
ANSWER_S = 5.0
"""How long one try to connect may take."""
RETRY_S = 0.25

log = logging.getLogger("meshwright")


def _end(text: str) -> None:
    """Say it and end, from any thread, at once: the main thread may hang in a collective."""
    with contextlib.suppress(Exception):
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(AGAIN)


def unseen_error() -> BaseException | None:
    """At exit: the exception that ends this process. Another hook than this module's may be set."""
    return getattr(sys, "last_value", None)


class Watch:
    """This process's part in the watch over all.

    Args:
        role: who this process is.
        deadline_s: after how long a host that no longer answers counts as lost.
        end: told what happened, and by whom; for tests.
    """

    def __init__(self, role: Role, deadline_s: float, *, end: Callable[[str], None] = _end) -> None:
        assert role.coordinator is not None
        self.role, self.deadline_s, self.end = role, deadline_s, end
        self.me = Peer(role.process, socket.gethostname(), os.getpid())
        self.host, _, port = role.coordinator.rpartition(":")
        self.job = f"meshwright {port}"  # not its host: that has several names
        self.ports = range(int(port) + 1, min(int(port) + 1 + PORTS, 65536))
        self.peers: dict[int, Peer] = {role.process: self.me}
        self.lines: dict[int, Line] = {}
        self.gone: set[int] = set()
        self.leaving = False
        self.seen: dict[int, float] = {}
        self.error: str | None = None
        self.hear: Callable[[int, dict[str, Any]], None] = lambda process, message: None
        self.heard = threading.Event()
        self.lock = threading.Lock()

    def start(self, timeout_s: float) -> None:
        """Meet all others.

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
                    server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
                server.close()
        threading.Thread(target=self._ask, daemon=True).start()

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
        """Say that this process parts as it should; its connections may break then."""
        if self.error is not None:
            return
        self.leaving = True
        for line in tuple(self.lines.values()):
            line.send({"leaves": self.me.process})

    def fail(self, error: str) -> None:
        """Say that this process ends by an error of its own. If the error comes from a loss, the
        word of that loss is on its way: it is waited for, and ends the process instead."""
        if self.leaving or self.heard.wait(WORD_S):
            return
        self.error = error
        self._tell(self.me, f"it ended by {error}")

    def _tell(self, lost: Peer, how: str) -> None:
        """Tell those that this process is connected to."""
        with self.lock:
            for line in tuple(self.lines.values()):
                line.send({"lost": lost.__dict__, "how": how})

    def _listen(self) -> socket.socket:
        for port in self.ports:
            with contextlib.suppress(OSError):
                return listen(port)
        raise HostError(
            f"coordinator {self.role.coordinator}: none of the ports {self.ports[0]} to "
            f"{self.ports[-1]} is free, over which processes watch each other; choose another port"
        )

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed once all are there
            while True:
                connection, _ = server.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        line = Line(connection, self.deadline_s)
        hello = line.receive() or {}
        if hello.pop("job", None) != self.job:  # not ours: another job, or a port scan
            connection.close()
            return
        count = hello.pop("processes")
        peer = Peer(**hello)
        with self.lock:
            why = None
            if count != self.role.processes:
                why = f"{self.me} expects {self.role.processes} processes, {peer} says {count}"
            elif peer.process in self.peers:
                why = f"{peer} came when {self.peers[peer.process]} was there"
            line.send({"job": self.job, "refused": why, **self.me.__dict__})
            if why is None:
                self.lines[peer.process] = line
                self.peers[peer.process] = peer
        if why is None:
            self._follow(peer, line)
        else:
            log.error("refused: %s", why)
            connection.close()

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
        """Connect to a port, and see whether process 0 of this job is there."""
        connection = socket.create_connection((self.host.strip("[]"), port), ANSWER_S)
        line = Line(connection, self.deadline_s)
        connection.settimeout(ANSWER_S)
        line.send({"job": self.job, "processes": self.role.processes, **self.me.__dict__})
        hello = line.receive() or {}
        if hello.pop("job", None) != self.job:
            connection.close()
            return False
        refused = hello.pop("refused")
        if refused is not None:
            raise HostError(f"refused by process 0: {refused}")
        connection.settimeout(None)
        self.peers[0], self.lines[0] = Peer(**hello), line
        threading.Thread(target=self._follow, args=(self.peers[0], line), daemon=True).start()
        return True

    def _ask(self) -> None:
        """Ask the others now and then; name who does not answer. Only that: an interpreter that
        holds its lock for long is no dead one."""
        asked: dict[int, float] = {}
        while not self.leaving:
            now = time.monotonic()
            for number, line in tuple(self.lines.items()):
                silent = now - self.seen.get(number, now)
                if silent > self.deadline_s / 2 and asked.get(number) != self.seen[number]:
                    asked[number] = self.seen[number]
                    log.warning("%s has not answered for %.0f s", self.peers[number], silent)
                self.seen.setdefault(number, now)
                line.send({"asks": self.me.process})
            time.sleep(self.deadline_s / 8)

    def _follow(self, peer: Peer, line: Line) -> None:
        """Read what a peer says until its connection breaks."""
        while (message := line.receive()) is not None:
            self.seen[peer.process] = time.monotonic()
            if "asks" in message:
                line.send({"answers": self.me.process})
            elif "leaves" in message:
                self.gone.add(int(message["leaves"]))
            elif "lost" in message:
                self._stop(Peer(**message["lost"]), str(message["how"]))
            else:
                self.hear(peer.process, message)
        if peer.process not in self.gone:
            self._stop(peer, "its connection broke")

    def _stop(self, lost: Peer, how: str) -> None:
        """Tell the others, and end."""
        self.heard.set()
        if self.me.process == 0:
            self._tell(lost, how)
        if self.error is None:
            self.end(
                f"{lost} was lost: {how}. {self.me} ends with code {AGAIN}: start the job again "
                "from its last checkpoint"
            )


def watch(role: Role, deadline_s: float, timeout_s: float) -> Watch:
    """Meet all processes of the job and watch over them, until this process ends.

    Raises:
        HostError: as ``Watch.start``.
    """
    watching = Watch(role, deadline_s)
    watching.start(timeout_s)
    before = sys.excepthook

    def failed(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        watching.fail(f"{kind.__name__}: {error}".strip().splitlines()[0][:300])
        ended()

    def ended() -> None:
        if (unseen := unseen_error()) is not None and watching.error is None:
            watching.fail(f"{type(unseen).__name__}: {unseen}")
        watching.leave()
        if watching.error is not None:  # an end in order would wait for processes that are ending
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1)

    sys.excepthook = failed
    atexit.register(ended)
    return watching
