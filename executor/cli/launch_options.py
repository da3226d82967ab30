"""Converts the options of ``planner launch`` to a job and its launcher."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from executor.launch.hosts.hostfile import read_hosts
from executor.launch.hosts.mpi import Mpi
from executor.launch.hosts.slurm import Slurm
from executor.launch.hosts.ssh import Ssh, Sync
from executor.launch.job import Job, Launcher
from executor.launch.kubernetes import jobset, manifests
from executor.launch.local import Local
from executor.launch.ray.actors import Ray
from executor.parameter_server.launch import rayjob
from executor.parameter_server.launch.job import Servers
from planner.errors import RequestError

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "k8s", "ray")
REFUSED = {
    "sge": "start the processes by OpenMPI inside the job (qsub -pe mpi N, then mpirun -n N python "
    "train.py): executor.initialize() reads OpenMPI's variables",
    "yarn": "YARN starts no processes that find each other; run the job under Kubernetes, Ray or "
    "ssh to the nodes, with the data where they can read it",
}
"""Schedulers that are not supported, and what to do instead."""

ONLY_FOR = {
    "hosts": ("ssh", "mpi"),
    "min_processes": ("ssh",),
    "sync_dir": ("ssh",),
    "launcher_options": ("ssh", "mpi", "slurm"),
    "gpus": ("slurm", "k8s", "ray"),
    "ray_address": ("ray",),
    "image": ("k8s",),
    "pod_cpu": ("k8s",),
    "pod_memory": ("k8s",),
    "name": ("k8s",),
    "out": ("k8s",),
    "schema": ("k8s",),
    "apply": ("k8s",),
}
"""Options that only some launchers support."""


def checked(options: argparse.Namespace) -> None:
    """Raise RequestError for options that are invalid or do not go together."""
    name = options.launcher
    if name in REFUSED:
        raise RequestError(f"--launcher {name} is not there; {REFUSED[name]}")
    for option, launchers in ONLY_FOR.items():
        if getattr(options, option) not in (None, "", False) and name not in launchers:
            flag = "--" + option.replace("_", "-")
            raise RequestError(f"{flag} is for --launcher {' or '.join(launchers)}, this is {name}")
    if options.processes < 1:
        raise RequestError(f"-n {options.processes}: expected at least one process")
    if options.devices_per_process is not None and options.devices_per_process < 1:
        raise RequestError(f"--devices-per-process {options.devices_per_process}: expected >= 1")
    if options.gpus is not None and options.gpus < 1:
        raise RequestError(f"--gpus {options.gpus}: expected at least one")
    if options.max_restarts < 0:
        raise RequestError(f"--max-restarts {options.max_restarts}: expected >= 0")
    if not options.grace >= 0:
        raise RequestError(f"--grace {options.grace}: expected seconds")
    least = options.min_processes
    if least is not None and not 1 <= least <= options.processes:
        raise RequestError(f"--min-processes {least}: expected 1 to {options.processes}")
    if name == "local" and not Path(options.script).is_file():
        raise RequestError(f"no script at {options.script}")


def job_of(options: argparse.Namespace) -> Job:
    """The job; raises RequestError for a malformed ``--env``."""
    pairs = [text.partition("=") for text in options.env]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise RequestError(f"--env {name}: expected NAME=VALUE")
    python = options.python or ("python" if options.launcher == "k8s" else sys.executable)
    return Job(
        (python, options.script, *options.arguments),
        options.processes,
        options.devices_per_process,
        {name: value for name, _, value in pairs},
        options.logs,
        stop_s=options.grace,
    )


def for_kubernetes(options: argparse.Namespace, servers: Servers | None) -> str:
    """Write a JobSet, or the RayJob of parameter servers, or apply it; returns what to print.
    Raises RequestError."""
    if options.image is None:
        raise RequestError("--launcher k8s needs --image, with the script and Python in it")
    name = options.name or _name(options.script)
    resources = (options.gpus, options.pod_cpu, options.pod_memory)
    pods = jobset.Pods(name, options.image, *resources)
    job = job_of(options)
    if servers is None:
        kind, document = jobset.KIND, jobset.manifest(job, pods, options.max_restarts)
    else:
        kind = rayjob.KIND
        document = rayjob.manifest(job, pods, servers, options.max_restarts)
    manifests.check_manifest(document, *manifests.read_schema(options.schema, kind))
    if options.out is not None:
        try:
            options.out.write_text(manifests.text_of(document), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {options.out}: {error.strerror}") from error
    if options.apply:
        return manifests.apply(document, kind)
    return manifests.text_of(document).rstrip() if options.out is None else ""


def _name(script: str) -> str:
    """A name that Kubernetes accepts, from the script's name.

    >>> _name("src/Train_GPT.py")
    'train-gpt'
    """
    return re.sub("[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-") or "job"


def launcher_of(options: argparse.Namespace, tell: Callable[[str], None]) -> Launcher:
    """The launcher that the options select; raises RequestError."""
    if options.launcher == "ssh":
        return _ssh(options, tell)
    if options.launcher == "mpi":
        hosts = () if options.hosts is None else read_hosts(options.hosts)
        return Mpi(hosts, options.python or sys.executable, _words(options))
    if options.launcher == "slurm":
        return Slurm(options.python or sys.executable, _words(options), options.gpus)
    if options.launcher == "ray":
        return Ray(options.ray_address, options.python or sys.executable, options.gpus)
    return Local()


def _words(options: argparse.Namespace) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options.launcher_options))
    except ValueError as error:
        raise RequestError(f"--launcher-options {options.launcher_options!r}: {error}") from error


def _ssh(options: argparse.Namespace, tell: Callable[[str], None]) -> Ssh:
    if options.hosts is None:
        raise RequestError("--launcher ssh needs --hosts FILE, one host a line")
    folder, sync = os.getcwd(), None
    if options.sync_dir is not None:
        sync = _sync(options.sync_dir)
        if Path(folder).is_relative_to(sync.here):
            inside = Path(folder).relative_to(sync.here)
            folder = str(Path(sync.there) / inside)
    return Ssh(
        read_hosts(options.hosts),
        folder,
        options.python or sys.executable,
        _words(options),
        options.min_processes,
        sync,
        tell,
    )


def _sync(text: str) -> Sync:
    here, _, there = text.partition(":")
    folder = Path(here).resolve()
    if not folder.is_dir():
        raise RequestError(f"--sync-dir {text}: no folder at {folder}")
    return Sync(folder, there or str(folder))
