"""How a process joins: both ends prove that they know the job's secret, then say who they are.

Each end sends a number drawn at random, and proves the secret by an HMAC over both numbers and what
it says of itself; the secret itself is never sent. Without a secret the key is empty: whoever
reaches the port can join.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.processes.sockets import HostError, Peer

SECRET, SECRET_FILE = "MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"
ONCE = "MESHWRIGHT_SECRET_ONCE"
"""A file like SECRET_FILE that a launcher wrote for one start; removed once all have met."""
LONGEST = 4096
"""Bytes of a message of a process that has not joined."""
LONGEST_HOST = 255


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The job's shared secret; empty if there is none.

    Args:
        environment: MESHWRIGHT_SECRET, or MESHWRIGHT_SECRET_FILE, a file that holds it.

    Raises:
        HostError: the file can't be read, or is empty.
    """
    if environment.get(SECRET):
        return environment[SECRET].encode()
    name = next((n for n in (ONCE, SECRET_FILE) if environment.get(n)), None)
    if name is None:
        return b""
    try:
        found = Path(environment[name]).expanduser().read_bytes().strip()
    except OSError as error:
        raise HostError(f"{name}={environment[name]}: {error.strerror}") from error
    if not found:
        raise HostError(f"{name}={environment[name]}: the file is empty; expected a secret")
    return found


def forget_secret(environment: Mapping[str, str]) -> None:
    """Remove a file that was written for this start."""
    if environment.get(ONCE) and not environment.get(SECRET):
        Path(environment[ONCE]).expanduser().unlink(missing_ok=True)


def new_number() -> str:
    """A number drawn at random, 32 hexadecimal digits."""
    return secrets.token_hex(16)


def new_secret() -> dict[str, str]:
    """The variable with a secret for one start of a job: the user's, or a new one."""
    users = {name: os.environ[name] for name in (SECRET, SECRET_FILE) if os.environ.get(name)}
    return users or {SECRET: secrets.token_hex(32)}


def proof(secret: bytes, side: str, numbers: tuple[str, str], says: Mapping[str, Any]) -> str:
    """What only who knows the secret can say.

    Args:
        secret: of the job.
        side: "joins" or "listens".
        numbers: of who joins, and of who listens.
        says: what that side says of itself.
    """
    text = json.dumps([side, *numbers, says], sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, *expected: Any) -> bool:
    """Whether a proof is that of ``proof(*expected)``, in a time that says nothing of it."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode("utf-8", "replace"), proof(*expected).encode()
    )


def read_peer(says: Any, processes: int) -> Peer:
    """Who another process says that it is.

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
