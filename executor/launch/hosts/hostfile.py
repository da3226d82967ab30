"""Host files in OpenMPI's format, and the assignment of processes to hosts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from executor.launch.job import LaunchError
from planner.files import MIB, read_text

LARGEST = MIB
"""Bytes of the largest host file that is read."""
USER = r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]*"
"""Excludes options of ssh, and characters that a shell interprets."""
EXPECTED = "expected: HOST [slots=K] [port=P] [user=NAME]"


@dataclass(frozen=True)
class Host:
    """A line of the file.

    Attributes:
        name: host name, as it is passed to ssh.
        slots: number of processes that it takes; None if not given.
        port: port of its sshd; None leaves it to ssh.
        user: user name on the host; None leaves it to ssh.
    """

    name: str
    slots: int | None = None
    port: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Place:
    """Place of a process: its host, and its number there."""

    host: Host
    local: int


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a file.

    Raises:
        LaunchError: the file can't be read, a line is malformed (names the line), or there is no
            host.
    """
    try:
        text = read_text(path, LARGEST)
    except OSError as error:
        raise LaunchError(f"cannot read the hosts in {path}: {error.strerror}") from error
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """The hosts of a text; ``#`` starts a comment.

    Raises:
        LaunchError: a line is malformed, or there is no host; names ``source`` and the line.

    >>> parse_hosts("node0 slots=2  # the fast one\\nnode1 port=2222", "hosts")[1]
    Host(name='node1', slots=None, port=2222, user=None)
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_host(words))
        except ValueError as error:
            raise LaunchError(f"{source}, line {number}: {error}; {EXPECTED}") from error
    if not hosts:
        raise LaunchError(f"{source} names no host; {EXPECTED}, one a line")
    return tuple(hosts)


def _host(words: list[str]) -> Host:
    user, at, name = words[0].rpartition("@")
    if not re.fullmatch(r"[A-Za-z0-9_.:%\[\]][A-Za-z0-9_.:%\[\]-]*", name) or (at and not user):
        raise ValueError(f"{words[0][:60]!r} is no host")
    options: dict[str, str] = {"user": user} if user else {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "port", "user") or not equals or not value:
            raise ValueError(f"got {word[:60]!r}")
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    who = options.get("user")
    if who is not None and not re.fullmatch(USER, who):
        raise ValueError(f"user {who[:60]!r}")
    return Host(name, _count(options, "slots"), _count(options, "port"), who)


def _count(options: dict[str, str], key: str) -> int | None:
    if key not in options:
        return None
    top = 65535 if key == "port" else 100_000
    if not re.fullmatch("0*[0-9]{1,6}", options[key]) or not 1 <= int(options[key]) <= top:
        raise ValueError(f"{key}={options[key][:60]}, a whole number from 1 to {top} is needed")
    return int(options[key])


def room(hosts: tuple[Host, ...], processes: int) -> tuple[tuple[Host, int], ...]:
    """How many processes each host takes: its slots (1 if only other hosts give slots). If no host
    gives slots, ``processes`` is split equally, and the first hosts take one more if it does not
    divide.

    >>> [n for _, n in room((Host("a"), Host("b")), 3)]
    [2, 1]
    """
    if any(host.slots is not None for host in hosts):
        return tuple((host, host.slots or 1) for host in hosts)
    each, more = divmod(processes, len(hosts))
    return tuple((host, each + (k < more)) for k, host in enumerate(hosts))


def places(rooms: tuple[tuple[Host, int], ...], processes: int) -> tuple[Place, ...]:
    """Places for up to ``processes``, filling host after host; fewer if there is no more room."""
    here: Counter[str] = Counter()
    out: list[Place] = []
    for host, count in rooms:
        for _ in range(min(count, processes - len(out))):
            out.append(Place(host, here[host.name]))
            here[host.name] += 1
    return tuple(out)
