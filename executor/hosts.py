"""Several processes as one: joining, and agreeing on a plan.

``initialize`` is ``jax.distributed.initialize`` that knows every launcher's variables (``roles``),
looks first whether the coordinator can be reached, and says what is wrong where it can't. What runs
across processes must be the same program in each: ``agree`` proves that all have the same plan.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Sequence

import jax
import numpy as np

from executor.roles import Role, read_role
from planner.errors import PlanMismatchError, RequestError
from planner.plan import Plan

log = logging.getLogger("meshwright")


class HostError(RequestError):
    """A host that can't be found, reached or bound; says which, and what to look at."""


RETRY_S = 0.25


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_s: float = 300.0,
) -> Role:
    """Join this process to its job. Call it before anything else of JAX.

    Args:
        coordinator: ``"host:port"`` of process 0; None reads the environment.
        processes: how many there are; None likewise.
        process: which one this is; None likewise.
        local_device_ids: the devices of this host that this process owns; None takes all.
        timeout_s: how long to wait for the others.

    Returns:
        Who this process is. With one process nothing is started.

    Raises:
        RoleError: the environment is missing something, or contradicts itself.
        HostError: the coordinator's name has no address, its port can't be bound by process 0, or
            it was not reached in time.
    """
    role = read_role(os.environ, coordinator=coordinator, processes=processes, process=process)
    if role.job not in ("worker", "chief"):
        raise HostError(
            f"{role.source}: this process is a {role.job}; only workers compute under a plan"
        )
    if role.processes == 1 or role.coordinator is None:
        return role
    begun = time.monotonic()
    addresses = resolve(role.coordinator)
    if role.process == 0:
        check_bindable(role.coordinator, addresses)
    else:
        wait_until_reachable(role.coordinator, addresses, timeout_s)
    check_own_name(addresses)
    left = max(1, round(timeout_s - (time.monotonic() - begun)))
    jax.distributed.initialize(
        role.coordinator,
        role.processes,
        role.process,
        local_device_ids=local_device_ids,
        initialization_timeout=left,
    )
    return role


Address = tuple[int, tuple[str, int]]
"""Address family and (address, port)."""


def resolve(coordinator: str) -> tuple[Address, ...]:
    """The addresses of ``host:port``.

    Raises:
        HostError: the name has none.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise HostError(
            f"the coordinator's name {host!r} has no address on {socket.gethostname()}: "
            f"{error.strerror}; use an address, or a name that every host resolves"
        ) from error
    return tuple((family, (str(where[0]), int(where[1]))) for family, *_, where in found)


def check_bindable(coordinator: str, addresses: Sequence[Address]) -> None:
    """Whether process 0 can listen where the others will look for it.

    Raises:
        HostError: the address is another host's, or the port is taken.
    """
    reasons: list[int] = []
    for family, where in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                return
            except OSError as error:
                reasons.append(error.errno or 0)
    here = socket.gethostname()
    if errno.EADDRINUSE in reasons:
        raise HostError(
            f"coordinator {coordinator}: the port is in use on {here}; choose another, or stop the "
            "job that has it"
        )
    raise HostError(
        f"coordinator {coordinator}: process 0 runs on {here}, which does not have that address "
        f"({os.strerror(reasons[0])}); the coordinator must be the host of process 0"
    )


def check_own_name(addresses: Sequence[Address]) -> None:
    """Warn where this host's own name means itself only, though others must reach it: JAX's CPU
    collectives listen at the address of the host's name (accelerators do not care)."""
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError:
        return
    theirs = (where[0].partition("%")[0] for _, where in addresses)
    if ipaddress.ip_address(own).is_loopback and not all(
        ipaddress.ip_address(address).is_loopback for address in theirs
    ):
        log.warning(
            "this host's name %s resolves to %s: other hosts will not reach its CPU devices; give "
            "the name the host's address in /etc/hosts",
            name,
            own,
        )


def wait_until_reachable(coordinator: str, addresses: Sequence[Address], timeout_s: float) -> None:
    """Wait until something listens at the coordinator's address.

    Raises:
        HostError: nothing did in time; says whether the connection was refused or got no answer.
    """
    deadline = time.monotonic() + timeout_s
    last: OSError | None = None
    while True:
        for family, where in addresses:
            left = deadline - time.monotonic()
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.settimeout(max(0.1, min(5.0, left)))
                    probe.connect(where)
                    return
            except OSError as error:
                last = error
        if time.monotonic() >= deadline:
            break
        time.sleep(RETRY_S)
    refused = isinstance(last, ConnectionRefusedError)
    hint = (
        "the host answers, but nothing listens there: process 0 has not started, or has ended"
        if refused
        else "no answer: a wrong address, a host that is down, or a firewall"
    )
    raise HostError(
        f"coordinator {coordinator} was not reached from {socket.gethostname()} in "
        f"{timeout_s:g} s ({last}); {hint}"
    )


def agree(plan: Plan) -> Plan:
    """Prove that all processes have the same plan; with one process that is so.

    Returns:
        The plan.

    Raises:
        PlanMismatchError: this process, or another, has a plan that differs from process 0's;
            names the processes, and here the first line that differs.
    """
    if jax.process_count() == 1:
        return plan
    from jax.experimental import multihost_utils

    mine = np.frombuffer(bytes.fromhex(plan.digest), np.uint8)
    prints = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, mine.size)
    others = [k for k in range(len(prints)) if (prints[k] != prints[0]).any()]
    if not others:
        return plan
    text = np.frombuffer(plan.to_json().encode(), np.uint8)
    length = int(np.max(multihost_utils.process_allgather(np.asarray(text.size))))
    padded = np.zeros(length, np.uint8)
    padded[: text.size] = text
    first = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).rstrip(b"\0").decode()
    raise PlanMismatchError(
        f"plans differ: process 0 has {bytes(prints[0]).hex()[:12]}, "
        + ", ".join(f"process {k} has {bytes(prints[k]).hex()[:12]}" for k in others)
        + f"; {_difference(first, plan.to_json())}; plan once, save the plan, and let every "
        "process load it (executor.compile_plan)"
    )


def _difference(first: str, mine: str) -> str:
    """The first line in which two plans differ, for people."""
    number = jax.process_index()
    for left, right in zip(first.splitlines(), mine.splitlines(), strict=False):
        if left != right:
            return (
                f"first difference: process 0 {left.strip()[:120]}, "
                f"process {number} {right.strip()[:120]}"
            )
    return f"process {number} has process 0's plan"
