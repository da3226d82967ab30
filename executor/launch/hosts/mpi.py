"""Processes that OpenMPI's mpirun starts; ``executor.processes.roles`` reads its variables."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from executor.launch.hosts.hostfile import Host, room
from executor.launch.job import (
    Job,
    LaunchError,
    OutputLine,
    Start,
    Task,
    need,
    outer,
    reported,
    sent,
    shared,
)
from executor.processes.hello import new_secret

TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>:(.*)", re.S)


@dataclass(frozen=True)
class Mpi:
    """Starts processes with mpirun.

    Attributes:
        hosts: hosts to use; empty leaves it to OpenMPI (this host, or the batch system's).
        python: the interpreter, on every host.
        options: more options for mpirun.
    """

    hosts: tuple[Host, ...]
    python: str
    options: tuple[str, ...] = ()

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """One task: mpirun. Every OpenMPI job has a different port."""
        need("mpirun", "openmpi-bin")
        variables = {**new_secret(), **shared(job, restart)}
        words = command(self, job, sorted(variables), root=os.geteuid() == 0)
        return Start(
            job.processes, (Task(words, {**outer(), **variables}, read=read, flags=("--usr1",)),)
        )


def where(hosts: Sequence[Host], processes: int) -> str:
    """The hosts in mpirun's form, with their slots.

    Raises:
        LaunchError: a host has a port or a user, which mpirun does not support.

    >>> where([Host("a", 2), Host("b")], 3)
    'a:2,b:1'
    """
    for host in hosts:
        if host.port is not None or host.user is not None:
            raise LaunchError(
                f"{host.name}: mpirun takes no port= and user=; put them into ~/.ssh/config"
            )
    return ",".join(f"{host.name}:{n}" for host, n in room(tuple(hosts), processes) if n)


def command(mpi: Mpi, job: Job, names: Sequence[str], *, root: bool) -> tuple[str, ...]:
    """The command line of mpirun. It must not end the other processes after a failure, because it
    would give them only one second.

    Args:
        mpi, job: the launcher and the job to run.
        names: variables to export to other hosts.
        root: whether this user is root, which mpirun has to allow explicitly.
    """
    return (
        *("mpirun", "-n", str(job.processes), "--tag-output", "--bind-to", "none"),
        *("--mca", "orte_abort_on_non_zero_status", "0"),
        *(["--allow-run-as-root"] if root else []),
        *(["--host", where(mpi.hosts, job.processes)] if mpi.hosts else ["--oversubscribe"]),
        *(word for name in names for word in ("-x", name)),
        *mpi.options,
        *sent(job, mpi.python, "--deaf", "--report"),
    )


def read(text: str) -> OutputLine:
    """Parse a line of mpirun: the process that wrote it, and whether it reports a failure.

    >>> read("[1,3]<stderr>:oh")
    OutputLine(process=3, text='oh', failed=None)
    """
    match = TAG.match(text)
    return reported(int(match[1]), match[2]) if match else OutputLine(None, text)
