"""Connections between the processes of a job: who is at the other end, and one message a line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import RequestError


class HostError(RequestError):
    """A host that can't be found, reached or bound; says which, and what to look at."""


@dataclass(frozen=True)
class Peer:
    """One process: its number, host and process id."""

    process: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


class Line:
    """A connection that carries one JSON object a line.

    Args:
        connection: a TCP connection.
        deadline_s: after how long a silent other end counts as gone.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection = connection
        connection.settimeout(None)
        keep_alive(connection, deadline_s)
        self.reader = connection.makefile("r", encoding="utf-8")
        self.lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, unless the connection is broken: who reads will notice."""
        with self.lock, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the connection is broken."""
        try:
            text = self.reader.readline()
            return dict(json.loads(text)) if text.endswith("\n") else None
        except (OSError, ValueError, TypeError):
            return None


def keep_alive(connection: socket.socket, deadline_s: float) -> None:
    """Let the kernel break a connection whose other end is silent for ``deadline_s``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(deadline_s / 2))),
        ("TCP_KEEPINTVL", max(1, round(deadline_s / 8))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(deadline_s * 1000)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(port: int) -> socket.socket:
    """Listen on every address of this host; raises OSError."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def hint(error: OSError | None, ports: int) -> str:
    """What may be wrong where nobody was reached."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return "the host answers, but nobody listens: process 0 has not started, or has ended"
    return (
        "no answer: a wrong address, a host that is down, or a firewall (the coordinator's port "
        f"and the {ports} after it must be open)"
    )
