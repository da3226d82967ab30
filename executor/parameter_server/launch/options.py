"""From the options of ``planner launch`` to a parameter-server job."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from executor.parameter_server.launch.job import Servers
from executor.parameter_server.launch.roles import PREFIX, PsRole, ps_role
from planner.errors import RequestError

LAUNCHERS = {"ray": "ray", "local": "local", "k8s": "ray"}
"""Those that start such a job, and what its workers and servers run on."""
UNUSED = {
    "devices_per_process": "a worker has all devices that it sees",
    "min_processes": "a worker that is lost is left behind",
}
SET_BY = {
    PREFIX + "WORKERS": "--workers",
    PREFIX + "SERVERS": "--servers",
    PREFIX + "BACKEND": "--launcher",
    PREFIX + "ADDRESS": "--ray-address",
    PREFIX + "GPUS": "--gpus",
}
"""Variables of such a job, and the options that say them."""
HOW = "planner launch --launcher ray --workers 4 --servers 2 train.py"


def servers_of(
    options: argparse.Namespace, environ: Mapping[str, str], tell: Callable[[str], None]
) -> Servers | None:
    """The parameter-server job that was asked for, by options or in an older system's variables.

    Args:
        options: of ``planner launch``.
        environ: ``os.environ``, say; looked at where no option says how many of what.
        tell: told what was taken from there, and what has no meaning.

    Returns:
        None for a job of processes.

    Raises:
        RequestError: the options contradict each other, nothing says how many of what, or an older
            system's cluster was meant and the launcher would run all on this host.
    """
    if options.workers is None and options.servers is not None:
        raise RequestError(f"--servers {options.servers} needs --workers, as in: {HOW}")
    if options.workers is not None and options.processes is not None:
        raise RequestError(
            f"-n {options.processes} with --workers {options.workers}: -n starts processes that "
            "run the script together, --workers a script with parameter servers; give one of them"
        )
    if options.processes is not None:
        return None
    _check_env(options.env)
    address, role = options.ray_address, None
    if options.workers is not None:
        workers, servers = options.workers, 1 if options.servers is None else options.servers
    else:
        role, workers, servers = _older(environ)
    for name, number in (("--workers", workers), ("--servers", servers)):
        if number < 1:
            raise RequestError(f"{name} {number}: expected at least one")
    backend = LAUNCHERS.get(options.launcher)
    if backend is None:
        raise RequestError(
            f"--launcher {options.launcher} starts no parameter servers; use ray (ray start on "
            "every host makes the cluster), k8s (a RayJob) or local (threads of one process)"
        )
    for name, why in UNUSED.items():
        if getattr(options, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} has no use with --workers: {why}")
    if role is not None:
        address = _head(role, options.launcher, address)
        where = f", Ray's head at {address}" if address else ""
        tell(f"{workers} workers, {servers} servers{where}: from {role.source}")
        for note in role.notes:
            tell(note)
    return Servers(workers, servers, backend, address, options.gpus)


def _check_env(env: Sequence[str]) -> None:
    """Refuse ``--env`` of what the launch itself says to the script."""
    for text in env:
        name = text.partition("=")[0]
        if name in SET_BY:
            raise RequestError(f"--env {text}: the launch sets {name}; give {SET_BY[name]} instead")


def _head(role: PsRole, launcher: str, given: str | None) -> str | None:
    """Where Ray's head is.

    Raises:
        RequestError: the variables say where, and the launcher would not go there.
    """
    if launcher == "local" and role.address is not None:
        raise RequestError(
            f"{role.source} has the job's head at {role.address}, and --launcher local (the "
            "default) runs threads on this host alone; give --launcher ray for the cluster there, "
            f"or --workers {role.workers} --servers {role.servers} for threads here"
        )
    return (given or role.address) if launcher == "ray" else None


def _older(environ: Mapping[str, str]) -> tuple[PsRole, int, int]:
    """Who says it, workers and servers, in an older system's variables."""
    role = ps_role((), environ)
    if role is None:
        raise RequestError(
            "nothing says how many: give -n N (processes that run the script together), or "
            f"--workers and --servers (a script with parameter servers), as in: {HOW}"
        )
    if role.instead:
        raise RequestError(
            f"{role.source} makes this host's process the {role.role}: {role.instead}"
        )
    if role.workers is None or role.servers is None:
        what = "workers" if role.workers is None else "servers"
        raise RequestError(f"{role.source} does not say how many {what}; give --{what}")
    return role, role.workers, role.servers
