"""Connections between the processes of a job, with one message per line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import RequestError


class HostError(RequestError):
    """A host can't be resolved, reached or bound; says which, and what to check."""


@dataclass(frozen=True)
class Peer:
    """One process: its number, host and process id."""

    process: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


LONGEST = 1 << 20
"""Maximum number of bytes of one message; a longer one breaks the connection."""


class Connection:
    """A connection that carries one JSON object per line.

    Args:
        connection: a TCP connection.
        deadline_s: seconds of silence after which the other end counts as gone.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection = connection
        connection.settimeout(None)
        keep_alive(connection, deadline_s)
        self.rest = b""
        self.lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a broken connection is ignored here, since the reading thread notices
        it."""
        with self.lock, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, longest: int = LONGEST, until: float | None = None) -> dict[str, Any] | None:
        """The next message; None once the connection is broken.

        Args:
            longest: maximum number of bytes of the message.
            until: time (``time.monotonic``) by which all of it must have arrived; None waits
                forever.
        """
        try:
            text = self._line(longest, until)
            return dict(json.loads(text)) if text else None
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        finally:
            if until is not None:
                with contextlib.suppress(OSError):
                    self.connection.settimeout(None)

    def _line(self, longest: int, until: float | None) -> bytes:
        while b"\n" not in self.rest:
            if len(self.rest) > longest:
                return b""
            if until is not None:
                self.connection.settimeout(max(0.001, until - time.monotonic()))
            data = self.connection.recv(65536)
            if not data:
                return b""
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return line if len(line) <= longest else b""


def keep_alive(connection: socket.socket, deadline_s: float) -> None:
    """Make the kernel break a connection whose other end is silent for ``deadline_s``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(deadline_s / 2))),
        ("TCP_KEEPINTVL", max(1, round(deadline_s / 8))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(deadline_s * 1000)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: str, port: int) -> socket.socket:
    """Listen at one address of this host, or at all of them if it is empty; raises OSError."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def hint(error: OSError | None, ports: int) -> str:
    """Possible causes when no process was reached, as text."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return "the host answers, but nothing listens: process 0 has not started, or has ended"
    return (
        "no answer: a wrong address, a host that is down, or a firewall (the coordinator's port "
        f"and the {ports} after it must be open)"
    )
