"""Launches processes on this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor.launch.job import Job, Start, Task, free_port, outer, roles, shared
from executor.processes.hello import new_secret


@dataclass(frozen=True)
class Local:
    """Starts every process on this host, with a new port for every start."""

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """One task per process."""
        return Start(job.processes, tasks(job, restart, free_port()))


def tasks(job: Job, restart: int, port: int) -> tuple[Task, ...]:
    """The tasks of one start; the coordinator listens on a port of this host."""
    where = f"127.0.0.1:{port}"
    secret = new_secret()
    return tuple(
        Task(
            job.command,
            {**outer(), **secret, **shared(job, restart), **roles(job.processes, k, k, where)},
            process=k,
        )
        for k in range(job.processes)
    )
