"""Make a parameter-server job from the options of ``planner launch``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from executor.parameter_server.launch.job import Servers
from executor.parameter_server.launch.roles import PREFIX, PsRole, ps_role
from planner.errors import RequestError

LAUNCHERS = {"ray": "ray", "local": "local", "k8s": "ray"}
"""Launchers that start such a job, and the backend of its workers and servers."""
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
"""Variables of such a job, and the options that set them."""
HOW = "planner launch --launcher ray --workers 4 --servers 2 train.py"


def servers_of(
    options: argparse.Namespace, environ: Mapping[str, str], tell: Callable[[str], None]
) -> Servers | None:
    """The parameter-server job requested by options or by an older system's variables.

    Args:
        options: options of ``planner launch``.
        environ: usually ``os.environ``; used if no option gives the number of workers.
        tell: called with a message about the settings used from ``environ``, and with one about
            each setting that has no meaning here.

    Returns:
        The job; None for a job of processes (``-n``).

    Raises:
        RequestError: the options contradict each other, nothing gives the number of workers and
            servers, or an older system's variables describe a cluster and the launcher would run
            everything on this host.
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
    """Raises RequestError if ``--env`` sets a variable that the launch itself sets."""
    for text in env:
        name = text.partition("=")[0]
        if name in SET_BY:
            raise RequestError(f"--env {text}: the launch sets {name}; give {SET_BY[name]} instead")


def _head(role: PsRole, launcher: str, given: str | None) -> str | None:
    """The address of Ray's head.

    Raises:
        RequestError: the variables give an address, and the launcher would not use it.
    """
    if launcher == "local" and role.address is not None:
        raise RequestError(
            f"{role.source} has the job's head at {role.address}, and --launcher local (the "
            "default) runs threads on this host alone; give --launcher ray for the cluster there, "
            f"or --workers {role.workers} --servers {role.servers} for threads here"
        )
    return (given or role.address) if launcher == "ray" else None


def _older(environ: Mapping[str, str]) -> tuple[PsRole, int, int]:
    """The role, the number of workers and of servers, from an older system's variables."""
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
