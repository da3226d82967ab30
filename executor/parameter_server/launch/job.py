"""A parameter-server job: the script runs once, here; its ``train`` starts workers and servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from executor.launch.job import Job, LaunchError, Start, Task, outer, shared
from executor.launch.ray.actors import look_for
from executor.parameter_server.launch.roles import PREFIX


@dataclass(frozen=True)
class Servers:
    """Starts the script with the settings that its ``train`` reads.

    Attributes:
        workers, servers: number of each.
        backend: "ray", or "local": threads of the script's process.
        address: address of a Ray cluster; None: the script starts a cluster on this host.
        gpus: GPUs per worker; None leaves it to the script.
    """

    workers: int
    servers: int
    backend: str
    address: str | None = None
    gpus: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pass these settings to the script."""
        settings = {
            "WORKERS": str(self.workers),
            "SERVERS": str(self.servers),
            "BACKEND": self.backend,
            "ADDRESS": self.address,
            "GPUS": None if self.gpus is None else str(self.gpus),
        }
        return {PREFIX + name: value for name, value in settings.items() if value is not None}

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """One task: the script. Processes that it started on this host end with its guard; on a
        cluster, Ray ends the processes of a script that has ended."""
        if self.backend == "ray" and importlib.util.find_spec("ray") is None:
            raise LaunchError(
                "--launcher ray needs Ray; pip install 'meshwright[ray]', or use --launcher local: "
                "workers and servers are threads then"
            )
        if self.address is not None:
            look_for(self.address)
        here = {name: value for name, value in outer().items() if not name.startswith(PREFIX)}
        environment = {**here, **shared(job, restart), **self.variables}
        return Start(1, (Task(job.command, environment, process=0),))
