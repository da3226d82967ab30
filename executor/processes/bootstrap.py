"""Several processes as one job: joining, and agreeing on a plan.

``initialize`` wraps ``jax.distributed.initialize``: it reads every launcher's variables
(``roles``), first connects all processes, reports why it can't, and monitors them
(``failure_detection``). What runs across processes must be the same program in each: ``agree``
checks that all have the same plan, ``share`` sends the plan of process 0 to all.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Sequence

import jax
import numpy as np

from executor.processes import preemption
from executor.processes.agreement.alike import compare_settings
from executor.processes.failure_detection import Watch, unseen_error, watch
from executor.processes.hello import SECRET, forget_secret, read_secret
from executor.processes.roles import Role, read_role
from executor.processes.sockets import HostError as HostError
from executor.processes.sockets import listen
from planner import compat
from planner.errors import PlanMismatchError
from planner.plan.plan import Plan, plan_from_json

log = logging.getLogger("meshwright")


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_s: float = 300.0,
    deadline_s: float = 60.0,
) -> Role:
    """Join this process to its job. Call it before any other use of JAX.

    Args:
        coordinator: ``"host:port"`` of process 0; None reads the environment.
        processes: number of processes; None reads the environment.
        process: number of this process; None reads the environment.
        local_device_ids: the devices of this host that this process owns; None takes all.
        timeout_s: how long to wait for the others.
        deadline_s: seconds without an answer after which a host or a process counts as lost. The
            end of a process is noticed at once. A process that notices a loss names the lost
            process and ends with code 75 (``failure_detection.AGAIN``), which launchers take as
            "start again". Code that holds Python's interpreter lock for longer than this needs a
            larger value.

    Returns:
        The role of this process. With one process, nothing is started.

    Raises:
        RoleError: the environment is missing something, or contradicts itself.
        HostError: the coordinator's name has no address, process 0 can't use its port, or it was
            not reached in time; some processes, listed by number, did not join in time; or this
            process gives another number of processes, or a process number that is already taken.
    """
    role = read_role(os.environ, coordinator=coordinator, processes=processes, process=process)
    if role.job not in ("worker", "chief"):
        raise HostError(
            f"{role.source}: this process is a {role.job}; only workers compute under a plan"
        )
    if role.processes == 1 or role.coordinator is None:
        return role
    begun = time.monotonic()
    addresses = addresses_of(role.coordinator)
    if role.process == 0:
        check_here(role.coordinator, addresses)
    here = bind_address(role.coordinator, addresses)
    port = int(role.coordinator.rpartition(":")[2])
    if role.process == 0:
        check_free(role.coordinator, here)
    check_own_name(role.coordinator)
    secret = read_secret(os.environ)
    where = role.coordinator.rpartition(":")[0].strip("[]")
    if not secret and role.process == 0 and not is_loopback(where):
        log.warning("no %s: whoever reaches port %s of %s can join", SECRET, port + 1, where)
    watching = watch(role, deadline_s, timeout_s, secret=secret, address=here)
    preemption.join(watching)
    _watching.append(watching)
    atexit.register(_settle_at_exit)
    # its SIGTERM handler would swallow the signal in programs that do not query it
    jax.config.update("jax_enable_preemption_service", False)
    left = max(1, round(timeout_s - (time.monotonic() - begun)))
    jax.distributed.initialize(
        role.coordinator,
        role.processes,
        role.process,
        local_device_ids=local_device_ids,
        coordinator_bind_address=_joined(here, port) if here and role.process == 0 else None,
        initialization_timeout=left,
        heartbeat_timeout_seconds=max(10, round(2 * deadline_s)),
    )
    forget_secret(os.environ)
    return role


_watching: list[Watch] = []


def finalize() -> None:
    """Leave the job that ``initialize`` joined, once all processes call this, which JAX wants
    within five minutes. Nothing of JAX may run over several processes after it. A process that ends
    leaves by itself."""
    if _watching:
        with contextlib.ExitStack() as then:
            then.callback(lambda: _watching.pop().leave())
            then.callback(jax.distributed.shutdown)
            settle()


def _settle_at_exit() -> None:
    if unseen_error() is None:
        settle()


def settle() -> None:
    """Wait for pending work of this process, before it leaves the others.

    Fetching a result waits for one device only. On other devices the program may still be about to
    enter its first collective, which finds its peers through the coordinator. Once all processes
    have left, it never does, and JAX waits for it as the process ends.

    Waits for all live arrays, and for programs whose results were dropped: JAX runs programs over
    several devices of a process one after another, so a last one ends after all others. It does not
    cover work that another thread started on one device and whose results were dropped.
    """
    if not _watching or not compat.knows_devices():
        return
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted, or its computation failed
            array.block_until_ready()
    here = jax.sharding.Mesh(np.array(jax.local_devices()), ("device",))
    each = jax.sharding.NamedSharding(here, jax.sharding.PartitionSpec("device"))
    try:
        with jax.set_mesh(here), jax.transfer_guard("allow"):
            last = jax.device_put(np.zeros(here.size, np.float32), each)
            jax.block_until_ready(jax.jit(jax.numpy.negative, out_shardings=each)(last))
    except RuntimeError as error:
        log.warning("parting without waiting for what is under way: %s", error)


def is_joined() -> bool:
    """Whether this process has joined a job by ``initialize``."""
    return bool(_watching)


Address = tuple[int, tuple[str, int]]
"""Address family and (address, port)."""


def addresses_of(coordinator: str) -> tuple[Address, ...]:
    """The addresses of ``host:port``.

    Raises:
        HostError: the name has no address.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise HostError(
            f"the coordinator's name {host!r} has no address on {socket.gethostname()}: "
            f"{error.strerror}; use an address, or a name that every host resolves"
        ) from error
    return tuple((family, (str(where[0]), int(where[1]))) for family, *_, where in infos)


def bind_address(coordinator: str, addresses: Sequence[Address]) -> str:
    """The address of this host at which process 0 listens: that of the coordinator's name, IPv4
    first. Empty, which means every address, if the name has no address of this host (something
    forwards it), or only a loopback address though it is not written as one, as in some
    /etc/hosts."""
    written = is_loopback(coordinator.rpartition(":")[0].strip("[]"))
    for family, (address, _) in sorted(addresses, key=lambda a: a[0] != socket.AF_INET):
        if not written and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((address, 0))
            return address
    return ""


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def check_free(coordinator: str, address: str = "") -> None:
    """Check that process 0 can listen at the coordinator's port, at an address of this host.

    Raises:
        HostError: the port can't be used.
    """
    try:
        listen(address, int(coordinator.rpartition(":")[2])).close()
    except OSError as error:
        raise HostError(
            f"coordinator {coordinator}: the port can't be used on {socket.gethostname()} "
            f"({error.strerror}); choose another, or stop the job that has it"
        ) from error


def check_here(coordinator: str, addresses: Sequence[Address]) -> None:
    """Warn process 0 if the coordinator's address does not belong to its host: the order of hosts
    is wrong, unless something forwards the address here."""
    for family, where in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((where[0], 0))
            return
    log.warning(
        "coordinator %s: process 0 runs on %s, which does not have that address; unless it is "
        "forwarded here, the coordinator must be the host of process 0",
        coordinator,
        socket.gethostname(),
    )


def check_own_name(coordinator: str) -> None:
    """Warn if this host's name resolves to a loopback address though others must reach it: JAX's
    CPU collectives listen at the address of the host's name (accelerators are not affected)."""
    host, name = coordinator.rpartition(":")[0].strip("[]"), socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return
    if ipaddress.ip_address(address).is_loopback and not is_loopback(host):
        log.warning(
            "this host's name %s resolves to %s: other hosts will not reach its CPU devices; give "
            "the name the host's address in /etc/hosts",
            name,
            address,
        )


def is_loopback(host: str) -> bool:
    """Whether a host is written as a loopback name or address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("node1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def agree(plan: Plan) -> Plan:
    """Check that all processes have the same plan; trivially true with one process.

    Returns:
        The plan.

    Raises:
        PlanMismatchError: this process, or another, has a plan that differs from process 0's; names
            the processes, and the first line that differs here.
    """
    if jax.process_count() == 1:
        return plan
    from jax.experimental import multihost_utils

    compare_settings()
    digest = np.frombuffer(bytes.fromhex(plan.digest), np.uint8)
    prints = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1, digest.size)
    others = [k for k in range(len(prints)) if (prints[k] != prints[0]).any()]
    if not others:
        return plan
    first = _broadcast(plan.to_json())
    raise PlanMismatchError(
        f"plans differ: process 0 has {bytes(prints[0]).hex()[:12]}, "
        + ", ".join(f"process {k} has {bytes(prints[k]).hex()[:12]}" for k in others)
        + f"; {_difference(first, plan.to_json())}; plan once, save the plan, and let every "
        "process load it (compile_plan), or give all of them the plan of process 0 (share)"
    )


def share(plan: Plan | None) -> Plan:
    """The plan of process 0, in every process.

    Args:
        plan: the plan in process 0; ignored in the other processes.

    Raises:
        PlanMismatchError: process 0 has no plan.
    """
    local_text = "" if plan is None or jax.process_index() else plan.to_json()
    text = local_text if jax.process_count() == 1 else _broadcast(local_text)
    if not text:
        raise PlanMismatchError("share: process 0 has no plan; make or load one there")
    return plan_from_json(text, "the plan of process 0")


def _broadcast(text: str) -> str:
    """A text of process 0, in every process."""
    from jax.experimental import multihost_utils

    encoded = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.asarray(encoded.size)))
    padded = np.zeros(length, np.uint8)
    if jax.process_index() == 0:
        padded[:] = encoded
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def _difference(first: str, local_text: str) -> str:
    """The first line in which two plans differ, as text."""
    number = jax.process_index()
    for left, right in zip(first.splitlines(), local_text.splitlines(), strict=False):
        if left != right:
            return (
                f"first difference: process 0 {left.strip()[:120]}, "
                f"process {number} {right.strip()[:120]}"
            )
    return f"process {number} has process 0's plan"
