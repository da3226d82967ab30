"""The number of workers and servers of a job, and what they run on: from the call, the launcher or
the variables of older systems."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from executor.launch.ray.actors import look_for
from executor.parameter_server.launch.roles import PREFIX, ps_role
from executor.parameter_server.server.clock import is_integer
from executor.parameter_server.transport.wire import MEMORY_ENV
from planner.errors import RequestError
from planner.modes import get_parallel_mode

CPU = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class JobRequest:
    """What a job runs on.

    Attributes:
        workers, servers: number of each.
        backend: "ray" or "local".
        address: address of a Ray cluster; None starts one on this host.
        gpus: GPUs per worker; with 0, workers compute on CPUs.
    """

    workers: int = 1
    servers: int = 1
    backend: str = "ray"
    address: str | None = None
    gpus: int = 0


def job_request(environment: Mapping[str, str], **given: Any) -> JobRequest:
    """Complete the arguments of the call from the environment.

    Args:
        environment: usually ``os.environ``: the variables of ``planner launch``, else those of
            older systems (``ps_role``).
        given: the fields of ``JobRequest``; None for fields that the call does not set.

    Raises:
        RequestError: the call and the environment contradict each other, a value is malformed, an
            older system would run something else in this process, or no cluster answers.
    """
    for name in ("workers", "servers", "gpus"):
        value = given.get(name)
        if value is None:
            continue
        if not is_integer(value):
            raise RequestError(f"{name}={value!r}: got {_kind(value)}, expected a whole number")
        given[name] = int(value)  # Ray and JSON do not accept NumPy integers
    address = given.get("address")
    if not isinstance(address, str | None):
        raise RequestError(
            f"address={address!r}: got {_kind(address)}, expected text such as 'head:6379'"
        )
    env_fields, source = _told(environment)
    for name, value in given.items():
        if value is not None and env_fields.get(name) not in (None, value):
            raise RequestError(
                f"train({name}={value!r}), but {source} says {name}={env_fields[name]!r}; leave "
                f"{name} out of the script, or make them agree"
            )
    words = {name: value for name, value in {**env_fields, **given}.items() if value is not None}
    words |= {name: value for name, value in env_fields.items() if value is not None}
    request = JobRequest(**words)
    for name in ("workers", "servers"):
        if getattr(request, name) < 1:
            raise RequestError(f"{name}={getattr(request, name)}: expected at least 1")
    if request.backend not in ("ray", "local"):
        raise RequestError(f"backend {request.backend!r}: expected 'ray' or 'local'")
    if request.gpus < 0 or (request.gpus and request.backend == "local"):
        raise RequestError(
            f"gpus={request.gpus} with backend {request.backend!r}: expected a number from 0 on, "
            "with 'ray' only; threads share what their process has"
        )
    if request.backend == "ray" and request.address is not None:
        look_for(request.address)
    return request


def _kind(x: object) -> str:
    return type(x).__name__


def _told(environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The fields that the environment sets, and a description of the source."""
    env_fields: dict[str, Any] = {}
    for name in (field.name for field in fields(JobRequest)):
        text = environment.get(PREFIX + name.upper())
        if text is not None and name in ("workers", "servers", "gpus"):
            if not text.isdecimal():
                raise RequestError(f"{PREFIX}{name.upper()}={text!r}: expected a whole number")
            env_fields[name] = int(text)
        elif text is not None:
            env_fields[name] = text
    source = (
        f"planner launch ({', '.join(PREFIX + name.upper() for name in env_fields)})"
        if env_fields
        else ""
    )
    role = None if {"workers", "servers"} <= env_fields.keys() else ps_role((), environment)
    if role is None:
        return env_fields, source
    if role.instead:
        who = role.role if role.rank is None else f"{role.role} {role.rank}"
        raise RequestError(f"{role.source} makes this process the {who}: {role.instead}")
    older = {"workers": role.workers, "servers": role.servers, "address": role.address}
    taken = [name for name, value in older.items() if value is not None and name not in env_fields]
    log.warning("%s: as %s says", " and ".join(taken), role.source)
    for note in role.notes:
        log.warning("%s", note)
    return {**older, **env_fields}, f"{source} with {role.source}" if env_fields else role.source


def gpus_of(ray: Any, job: JobRequest) -> dict[str, Any]:
    """Ray options for each worker: the number of GPUs, or an environment for computing on CPUs.

    Raises:
        RequestError: the cluster has too few GPUs; Ray itself would wait for more silently.
    """
    if not job.gpus:
        return {"runtime_env": {"env_vars": {**CPU["env_vars"], **MEMORY_ENV}}}
    there = ray.cluster_resources().get("GPU", 0)
    if there < job.gpus * job.workers:
        raise RequestError(
            f"{job.workers} workers with gpus={job.gpus} each need {job.gpus * job.workers} GPUs, "
            f"the Ray cluster has {there:g}; use fewer workers, or a larger cluster"
        )
    return {"num_gpus": job.gpus}


def rule_of(mode: str | None, staleness: int | None) -> tuple[str, int]:
    """Mode and staleness. A mode of None is taken from ``set_parallel_mode``. So is a staleness of
    None if the mode is the one that was set there; otherwise it is 0."""
    current = get_parallel_mode()
    if staleness is None:
        staleness = current.staleness if mode in (None, current.update) else 0
    return current.update if mode is None else mode, staleness
