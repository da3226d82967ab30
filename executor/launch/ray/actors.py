"""Processes in Ray actors, on the nodes of a cluster or in a local Ray on this host."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from executor.launch.hosts.slurm import read
from executor.launch.job import Job, LaunchError, Start, Task, outer, sent, shared
from executor.launch.ray import driver
from executor.processes.hello import new_secret

CONNECT_S = 10.0


@dataclass(frozen=True)
class Ray:
    """Starts processes as actors.

    Attributes:
        address: address of a cluster; None starts a Ray on this host, which ends with the job.
        python: the interpreter, on every node.
        gpus: GPUs of each process; None requests none.
    """

    address: str | None
    python: str
    gpus: int | None = None

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """One task: the driver. The coordinator is the node of process 0, at a free port there."""
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("--launcher ray needs Ray; pip install 'meshwright[ray]'")
        if self.address is not None:
            look_for(self.address)
        driver_job = {
            "address": self.address,
            "processes": job.processes,
            "gpus": self.gpus,
            "words": sent(job, self.python, "--report"),
            "environment": {**new_secret(), **shared(job, restart)},
            "folder": os.getcwd(),
        }
        words = (sys.executable, "-P", driver.__file__)
        env = {**outer(), driver.JOB: json.dumps(driver_job)}
        return Start(job.processes, (Task(words, env, read=read, flags=("--usr1",)),))


def look_for(address: str) -> None:
    """Check that something listens at a cluster's address; Ray itself would try for minutes.

    Raises:
        LaunchError: nothing listens there.
    """
    match = re.fullmatch(r"(?:ray://)?\[?([^\]]+?)\]?:(\d+)", address)
    if match is None:
        return  # "auto", or a name that only Ray knows
    try:
        socket.create_connection((match[1], int(match[2])), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"cannot reach Ray at {address} ({error}); expected the address of a cluster's head, "
            "as ray start --head prints it"
        ) from error
