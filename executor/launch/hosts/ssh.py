"""Processes on hosts that ssh reaches.

Every process has a separate connection, with a terminal on the host (``-tt``). A guard runs the
process there and ends it when the connection ends, or when no heartbeat arrives for SILENCE_S. The
guard is not installed on the host: its text is sent along. Hosts are checked before every start.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from executor.launch.hosts.hostfile import Host, Place, places, room
from executor.launch.job import Job, LaunchError, Start, Task, need, roles, sent, shared
from executor.processes.hello import ONCE, SECRET, new_secret

Done = subprocess.CompletedProcess[str]
CONNECT_S = 10
SILENCE_S = 60.0
ASK_PORT = "import socket as s; p = s.socket(); p.bind(('', 0)); print('port', p.getsockname()[1])"


@dataclass(frozen=True)
class Sync:
    """A folder to copy to every host, from ``here`` to ``there``."""

    here: Path
    there: str


@dataclass(frozen=True)
class Ssh:
    """Starts processes on hosts with ssh.

    Attributes:
        hosts: the hosts, in the order in which they are filled.
        folder: the folder on the hosts in which the program runs.
        python: the interpreter on the hosts.
        options: more options for ssh.
        least: hosts that do not answer, or that failed first in the last two starts, are left out
            while at least this number of processes remains; None leaves out none.
        sync: the folder that is copied to every host before every start.
        tell: called with messages for the user.
    """

    hosts: tuple[Host, ...]
    folder: str
    python: str = sys.executable
    options: tuple[str, ...] = ()
    least: int | None = None
    sync: Sync | None = None
    tell: Callable[[str], None] = print

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """Check the hosts, copy the folder, choose a port on the first host. Returns one task per
        process."""
        need("ssh", "openssh-client")
        rooms = room(self.hosts, job.processes)
        if len(places(rooms, job.processes)) < job.processes:
            raise LaunchError(
                f"-n {job.processes}: the hosts have room for {sum(n for _, n in rooms)} "
                "processes; raise their slots, or name more hosts"
            )
        there = self._without(failed, self._reachable(rooms, job.processes), job.processes)
        placed = places(there, job.processes)
        if self.sync is not None:
            used = {place.host: None for place in placed}
            for host in used:
                bring(host, self.sync, self.options)
        variables = new_secret()
        if SECRET in variables:
            used = {place.host: None for place in placed}
            variables = {ONCE: hand_secret(tuple(used), variables[SECRET], self.options)}
        port = self._free_port(placed[0].host)
        where = f"{address(placed[0].host, [p.host for p in placed], self.options)}:{port}"
        return Start(len(placed), tasks(self, job, restart, placed, where, variables))

    def _reachable(
        self, rooms: tuple[tuple[Host, int], ...], processes: int
    ) -> tuple[tuple[Host, int], ...]:
        """The hosts that answer, if enough do."""
        candidates = [pair for pair in rooms if pair[1]]
        with ThreadPoolExecutor(16) as pool:
            said = list(pool.map(lambda pair: ask(pair[0], self.options), candidates))
        there = tuple(pair for pair, reason in zip(candidates, said, strict=True) if reason is None)
        lost = [
            f"{pair[0].name} ({reason})"
            for pair, reason in zip(candidates, said, strict=True)
            if reason is not None
        ]
        count = len(places(there, processes))
        if lost and (self.least is None or count < self.least):
            more = "" if self.least is None else f"; {count} processes are left, at least "
            more += "" if self.least is None else f"{self.least} are needed"
            raise LaunchError(f"no ssh to {', '.join(lost)}{more}")
        if lost:
            self.tell(f"left out: {', '.join(lost)}; {count} of {processes} processes")
        return there

    def _without(
        self, failed: Sequence[str], rooms: tuple[tuple[Host, int], ...], processes: int
    ) -> tuple[tuple[Host, int], ...]:
        """The hosts without one that failed first twice in a row, if enough remain."""
        if self.least is None or len(failed) < 2 or not failed[-1] or failed[-1] != failed[-2]:
            return rooms
        there = tuple(pair for pair in rooms if pair[0].name != failed[-1])
        count = len(places(there, processes))
        if count < self.least:
            return rooms
        self.tell(f"left out: {failed[-1]} (failed first twice); {count} of {processes} processes")
        return there

    def _free_port(self, host: Host) -> int:
        words = [*connection(host, self.options), shlex.join([self.python, "-c", ASK_PORT])]
        done = _run(words)
        lines = [line for line in done.stdout.splitlines() if line.startswith("port ")]
        if done.returncode == 0 and lines:
            return int(lines[-1].split()[1])
        if done.returncode in (126, 127):
            raise LaunchError(
                f"no Python at {self.python} on {host.name} ({_last(done.stderr)}); name it with "
                "--python"
            )
        raise LaunchError(f"{self.python} on {host.name} does not run: {_last(done.stderr)}")


def connection(host: Host, options: Sequence[str]) -> list[str]:
    """The ssh command line that reaches a host, without a remote command."""
    port = [] if host.port is None else ["-p", str(host.port)]
    user = [] if host.user is None else ["-l", host.user]
    fixed = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": 10,
        "ServerAliveCountMax": 3,
        "LogLevel": "ERROR",
    }
    words = [word for name, value in fixed.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", *options, *words, *port, *user, host.name]


def tasks(
    ssh: Ssh,
    job: Job,
    restart: int,
    placed: Sequence[Place],
    coordinator: str,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Task, ...]:
    """One connection per process. Its variables, including those of ``more``, are in the command
    line on the host, where all users can see them; a secret is not."""
    out = []
    for k, place in enumerate(placed):
        variables = {
            **more,
            **shared(job, restart),
            **roles(len(placed), k, place.local, coordinator),
            "TERM": "dumb",
        }
        inner = ["env", *(f"{name}={value}" for name, value in variables.items())]
        inner += sent(job, ssh.python, "--silence", str(SILENCE_S))
        command = f"cd {shlex.quote(ssh.folder)} && exec {shlex.join(inner)}"
        words = connection(place.host, ssh.options)
        words.insert(1, "-tt")
        out.append(
            Task((*words, command), os.environ, process=k, host=place.host.name, flags=("--relay",))
        )
    return tuple(out)


def hand_secret(hosts: Sequence[Host], secret: str, options: Sequence[str]) -> str:
    """Write a secret to a file on every host that only its user can read; returns the file's name.

    Raises:
        LaunchError: the file can't be written; names the host and the reason.
    """
    name = f"~/.meshwright-{secrets.token_hex(8)}"
    for host in hosts:
        words = [*connection(host, options), f"umask 077 && cat > {name}"]
        done = subprocess.run(words, input=secret, capture_output=True, text=True)
        if done.returncode:
            raise LaunchError(f"cannot write {name} on {host.name}: {_last(done.stderr)}")
    return name


def ask(host: Host, options: Sequence[str]) -> str | None:
    """Why a host can't be reached; None if it can."""
    done = _run([*connection(host, options), "true"])
    return None if done.returncode == 0 else _last(done.stderr) or f"exit code {done.returncode}"


def address(first: Host, hosts: Sequence[Host], options: Sequence[str]) -> str:
    """The first host's name as ssh's configuration resolves it, for the other hosts to connect to.

    Raises:
        LaunchError: the name means "this host" although there are other hosts.
    """
    names = {host: _real_name(host, options) for host in dict.fromkeys([first, *hosts])}
    if _loopback(names[first]) and not all(map(_loopback, names.values())):
        raise LaunchError(
            f"process 0 would be on {first.name}, a name that means something else on the other "
            "hosts; name it by an address or a name that all of them reach"
        )
    name = names[first]
    return f"[{name}]" if ":" in name else name


def _real_name(host: Host, options: Sequence[str]) -> str:
    done = _run(["ssh", "-G", *options, host.name])
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    return said.get("hostname", host.name).strip("[]")


def _loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def bring(host: Host, sync: Sync, options: Sequence[str]) -> None:
    """Copy a folder's files to a host, with rsync if both have it, else as a tar archive. Files
    that exist only on the host stay.

    Raises:
        LaunchError: the copy failed; includes the program's message.
    """
    reach = connection(host, options)
    there = shlex.quote(sync.there)
    ready = _run([*reach, f"mkdir -p {there} && command -v rsync"])
    if ready.returncode == 0 and shutil.which("rsync"):
        target = f"{host.name}:{sync.there.rstrip('/')}/"
        done = _run(["rsync", "-a", "-e", shlex.join(reach[:-1]), f"{sync.here}/", target])
    else:
        read = subprocess.Popen(
            ["tar", "-C", str(sync.here), "-cf", "-", "."], stdout=subprocess.PIPE
        )
        assert read.stdout is not None
        done = _run([*reach, f"tar -C {there} -xf -"], read.stdout)
        read.wait()
    if done.returncode:
        raise LaunchError(
            f"cannot copy {sync.here} to {host.name}:{sync.there}: {_last(done.stderr)}"
        )


def _run(words: Sequence[str], given: IO[bytes] | int = subprocess.DEVNULL) -> Done:
    return subprocess.run(words, stdin=given, capture_output=True, text=True, errors="replace")


def _last(text: str) -> str:
    return text.strip().splitlines()[-1].strip() if text.strip() else "it said nothing"
