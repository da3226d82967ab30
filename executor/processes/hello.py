"""The handshake of a process that joins: both ends prove that they know the job's secret.

Each end sends a random number and a description of itself, and proves the secret by an HMAC over
both numbers and the description. The secret itself is never sent. Without a secret, the key is
empty, and any process that reaches the port can join.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor.processes.sockets import Connection, HostError, Peer

SECRET, SECRET_FILE = "MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"
ONCE = "MESHWRIGHT_SECRET_ONCE"
"""Like SECRET_FILE, for a file of one start, which is removed once all processes have met."""
LONGEST = 4096
"""Maximum size of a message of a process that has not joined, in bytes."""
LONGEST_HOST = 255
ANSWER_S = 5.0
"""Maximum duration of one attempt to connect, in seconds."""

log = logging.getLogger("meshwright")


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The job's shared secret; empty if there is none.

    Args:
        environment: has MESHWRIGHT_SECRET, or MESHWRIGHT_SECRET_FILE, which names a file with it.

    Raises:
        HostError: the file can't be read, or is empty.
    """
    if environment.get(SECRET):
        return environment[SECRET].encode()
    name = next((n for n in (ONCE, SECRET_FILE) if environment.get(n)), None)
    if name is None:
        return b""
    try:
        secret = Path(environment[name]).expanduser().read_bytes().strip()
    except OSError as error:
        raise HostError(f"{name}={environment[name]}: {error.strerror}") from error
    if not secret:
        raise HostError(f"{name}={environment[name]}: the file is empty; expected a secret")
    return secret


def forget_secret(environment: Mapping[str, str]) -> None:
    """Remove the secret file that was written for this start, if there is one."""
    if environment.get(ONCE) and not environment.get(SECRET):
        Path(environment[ONCE]).expanduser().unlink(missing_ok=True)


def new_number() -> str:
    """A random number, 32 hexadecimal digits."""
    return secrets.token_hex(16)


def new_secret() -> dict[str, str]:
    """Environment variables with the secret for one start: those of the user, or a new one."""
    users = {name: os.environ[name] for name in (SECRET, SECRET_FILE) if os.environ.get(name)}
    return users or {SECRET: secrets.token_hex(32)}


def proof(secret: bytes, side: str, numbers: tuple[str, str], says: Mapping[str, Any]) -> str:
    """The proof that a side knows the secret.

    Args:
        secret: the job's secret.
        side: "joins" or "listens".
        numbers: the random numbers of the side that joins and of the side that listens.
        says: the side's description of itself.
    """
    text = json.dumps([side, *numbers, says], sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, *expected: Any) -> bool:
    """Whether a proof equals ``proof(*expected)``; the comparison takes constant time."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode("utf-8", "replace"), proof(*expected).encode()
    )


def read_peer(says: Any, processes: int) -> Peer:
    """The identity of another process, from its description of itself.

    Raises:
        ValueError: a field is missing, of another type or out of range; says which.
    """
    if not isinstance(says, dict):
        raise ValueError(f"it says {str(says)[:80]!r}, expected its number, host and process id")
    process, host, pid = (says.get(name) for name in ("process", "host", "pid"))
    if type(process) is not int or not 0 <= process < processes:
        raise ValueError(f"it says it is process {str(process)[:20]} of {processes}")
    if type(pid) is not int or not 0 < pid < 1 << 32:
        raise ValueError(f"process {process} says its process id is {str(pid)[:20]}")
    if not isinstance(host, str) or not 0 < len(host) <= LONGEST_HOST or not host.isprintable():
        raise ValueError(f"process {process} says its host is {str(host)[:80]!r}")
    return Peer(process, host, pid)


@dataclass(frozen=True)
class Greeting:
    """One end of the handshake: of a process that joins, or that another process joins.

    Attributes:
        job: name of the job.
        secret: the job's secret; empty if there is none.
        processes: number of processes of the job.
        me: this process.
    """

    job: str
    secret: bytes = field(repr=False)
    processes: int
    me: Peer

    @property
    def says(self) -> dict[str, Any]:
        """The description of this process that is sent."""
        return {"processes": self.processes, **self.me.__dict__}

    def heard(self, line: Connection) -> tuple[bool, Any]:
        """Whether the other end belongs to the job, and its description of itself. Logs an error if
        it names the job but does not know the secret."""
        until = time.monotonic() + ANSWER_S
        first = line.receive(LONGEST, until) or {}
        if first.get("job") != self.job:  # not ours: another job, or a port scan
            return False, None
        says, numbers = first.get("says"), (str(first.get("number")), new_number())
        own_says = self.says
        shown = proof(self.secret, "listens", numbers, own_says)
        line.send({"job": self.job, "number": numbers[1], "says": own_says, "proof": shown})
        second = line.receive(LONGEST, until) or {}
        if not is_proof(second.get("proof"), self.secret, "joins", numbers, says):
            log.error("refused: somebody did not prove that it knows the job's secret")
            return False, None
        return True, says

    def join(self, line: Connection, where: str) -> Peer | None:
        """Join the process at the other end.

        Args:
            line: the connection to it.
            where: its address, for messages.

        Returns:
            That process; None if it belongs to another job, or does not answer in time.

        Raises:
            HostError: that process does not know the secret, or refuses this process.
        """
        says, number = self.says, new_number()
        line.send({"job": self.job, "number": number, "says": says})
        until = time.monotonic() + ANSWER_S
        answer = line.receive(LONGEST, until) or {}
        if answer.get("job") != self.job:
            return None
        numbers = (number, str(answer.get("number")))
        peer_says = answer.get("says")
        if not is_proof(answer.get("proof"), self.secret, "listens", numbers, peer_says):
            line.connection.close()
            raise HostError(
                f"who listens at {where} does not know the secret of this job; give all "
                f"processes the same {SECRET} or {SECRET_FILE}, or none"
            )
        line.send({"proof": proof(self.secret, "joins", numbers, says)})
        verdict = line.receive(LONGEST, until)
        if verdict is None:
            return None
        if verdict.get("refused") is not None:
            raise HostError(f"refused by process 0: {verdict['refused']}")
        return read_peer(peer_says, 1)
