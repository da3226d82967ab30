"""Reads the role of this process in a job from arguments or from the environment. No jax.

Each launcher passes the role in environment variables with its own names. ``read_role`` tries, in
this order: explicit arguments, this project's launcher, OpenMPI, Slurm, indexed Kubernetes jobs,
TPU slices, and the names that older parameter-server systems used. The first one that is set
counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from planner.errors import RequestError

PORT = 8476
"""The coordinator's port if none is given (JAX's own default)."""
EPHEMERAL, APART, CHOICES = 61440, 17, 240
"""Ports that are picked by a job's number, so that jobs on one host do not collide: the first,
their spacing and their number. The spacing leaves room for a coordinator and the 16 ports after it
that ``failure_detection`` needs."""

Environment = Mapping[str, str]


class RoleError(RequestError):
    """The environment or the arguments do not define the role of this process; says what to do."""


@dataclass(frozen=True)
class Role:
    """The role of a process.

    Attributes:
        processes: number of processes.
        process: number of this process, from 0.
        coordinator: ``"host:port"`` of process 0; None if there is one process only.
        local: the process's number on its host, if known.
        job: "worker", or the job name in a parameter-server system: "chief", "server", "scheduler"
            or "evaluator".
        source: where the role was read.
    """

    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    local: int | None = None
    job: str = "worker"
    source: str = "one process"


def read_role(
    environment: Environment,
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Role:
    """The role of this process.

    Args:
        environment: the environment variables, such as ``os.environ``.
        coordinator, processes, process: explicit values; each overrides the environment.

    Raises:
        RoleError: a variable is missing or malformed, or the parts contradict each other.

    >>> read_role({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}).source
    'OpenMPI'
    """
    role = Role()
    given = (coordinator, processes, process)
    if any(x is None for x in given):
        for reader in READERS:
            read = reader(environment)
            if read is not None:
                role = read
                break
    if any(x is not None for x in given):
        role = replace(
            role,
            coordinator=role.coordinator if coordinator is None else coordinator,
            processes=role.processes if processes is None else processes,
            process=role.process if process is None else process,
            source="arguments" if role.source == Role.source else f"arguments, {role.source}",
        )
    return _checked(role)


def _checked(role: Role) -> Role:
    if role.processes < 1:
        raise RoleError(f"{role.source}: got {role.processes} processes, expected at least 1")
    if not 0 <= role.process < role.processes and role.job in ("worker", "chief"):
        raise RoleError(
            f"{role.source}: got process {role.process} of {role.processes}, expected a number "
            f"from 0 to {role.processes - 1}"
        )
    if role.processes > 1 and role.coordinator is None:
        raise RoleError(
            f"{role.source}: {role.processes} processes, but nothing says where process 0 is; pass "
            "coordinator='host:port' or set MESHWRIGHT_COORDINATOR"
        )
    if role.coordinator is not None:
        return replace(role, coordinator=_address(role.coordinator, role.source))
    return role


def _address(text: str, source: str) -> str:
    """``host:port``, with the default port if none is given; IPv6 addresses must be in brackets."""
    if text.count(":") > 1 and not text.startswith("["):
        raise RoleError(f"{source}: coordinator {text!r}: write an IPv6 address as [address]:port")
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(?::(\d+))?", text.strip())
    if match is None or not 0 < int(match[2] or PORT) < 65536:
        raise RoleError(f"{source}: coordinator {text!r}: expected host:port, as node0:{PORT}")
    return f"{match[1]}:{match[2] or PORT}"


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise RoleError(f"{name} is not set, though its companions are; set it to a whole number")
    try:
        return int(text)
    except ValueError:
        raise RoleError(f"{name}={text!r}: expected a whole number") from None


def _port_of(job: int) -> int:
    return EPHEMERAL + APART * (job % CHOICES)


def _launcher(env: Environment) -> Role | None:
    if "MESHWRIGHT_PROCESSES" not in env:
        return None
    index = "MESHWRIGHT_PROCESS" if "MESHWRIGHT_PROCESS" in env else "JOB_COMPLETION_INDEX"
    return Role(
        _number(env, "MESHWRIGHT_PROCESSES"),
        _number(env, index if index in env else "MESHWRIGHT_PROCESS"),
        env.get("MESHWRIGHT_COORDINATOR"),
        _number(env, "MESHWRIGHT_LOCAL") if "MESHWRIGHT_LOCAL" in env else None,
        source="planner launch",
    )


def _open_mpi(env: Environment) -> Role | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    head = env.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r'"?(\d+)\.\d+;tcp6?://(\[[^\]]+\]|[^,:]+)', head)
    where = f"{match[2]}:{_port_of(int(match[1]) >> 16)}" if match else None
    local = "OMPI_COMM_WORLD_LOCAL_RANK"
    return Role(
        _number(env, "OMPI_COMM_WORLD_SIZE"),
        _number(env, "OMPI_COMM_WORLD_RANK"),
        env.get("MESHWRIGHT_COORDINATOR", where),
        _number(env, local) if local in env else None,
        source="OpenMPI",
    )


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list.

    >>> first_host("gpu[003-006,9],login"), first_host("a-1,b")
    ('gpu003', 'a-1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodes)
    if match is None:
        raise RoleError(f"SLURM_STEP_NODELIST={nodes!r}: expected a list of hosts, as node[1-4]")
    return match[1] + (re.split(r"[-,]", match[2])[0] if match[2] else "")


def _slurm(env: Environment) -> Role | None:
    if "SLURM_PROCID" not in env or "SLURM_STEP_NODELIST" not in env:
        return None  # a shell inside an allocation is not a process of a job
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    host = first_host(env["SLURM_STEP_NODELIST"])
    step = _number(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
    where = f"{host}:{_port_of(_number(env, 'SLURM_JOB_ID') + step)}"
    return Role(
        _number(env, count),
        _number(env, "SLURM_PROCID"),
        env.get("MESHWRIGHT_COORDINATOR", where),
        _number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else None,
        source="Slurm",
    )


def _tpu(env: Environment) -> Role | None:
    if "TPU_WORKER_HOSTNAMES" not in env or "TPU_WORKER_ID" not in env:
        return None
    hosts = [h.strip() for h in env["TPU_WORKER_HOSTNAMES"].split(",") if h.strip()]
    if not hosts:
        raise RoleError("TPU_WORKER_HOSTNAMES is empty: expected the hosts of the slice")
    where = hosts[0] if len(hosts) > 1 else None
    return Role(len(hosts), _number(env, "TPU_WORKER_ID"), where, source="TPU slice")


def _paddle(env: Environment) -> Role | None:
    if "PADDLE_TRAINERS_NUM" in env:
        first = env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0] or None
        count, number = "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"
    elif "PADDLE_INIT_NUM_GRADIENT_SERVERS" in env:
        servers = env.get("PADDLE_INIT_PSERVERS", "").split(",")[0]
        port = env.get("PADDLE_INIT_PORT", str(PORT))
        first = f"{servers}:{port}" if servers else None
        count, number = "PADDLE_INIT_NUM_GRADIENT_SERVERS", "PADDLE_INIT_TRAINER_ID"
    else:
        return None
    training = env.get("TRAINING_ROLE", "TRAINER")
    job = {"TRAINER": "worker", "PSERVER": "server"}.get(training, "worker")
    process = _number(env, number) if job == "worker" else 0
    return Role(_number(env, count), process, first, job=job, source="PaddlePaddle")


def _dmlc(env: Environment) -> Role | None:
    if "DMLC_NUM_WORKER" not in env:
        return None
    job = env.get("DMLC_ROLE", "worker")
    if job not in ("worker", "server", "scheduler"):
        raise RoleError(f"DMLC_ROLE={job!r}: expected worker, server or scheduler")
    host = env.get("DMLC_PS_ROOT_URI")
    where = f"{host}:{env.get('DMLC_PS_ROOT_PORT', PORT)}" if host else None
    number = _number(env, "DMLC_WORKER_ID") if job == "worker" else 0
    return Role(_number(env, "DMLC_NUM_WORKER"), number, where, job=job, source="MXNet")


def _mindspore(env: Environment) -> Role | None:
    if "MS_WORKER_NUM" not in env:
        return None
    jobs = {"MS_WORKER": "worker", "MS_PSERVER": "server", "MS_SCHED": "scheduler"}
    name = env.get("MS_ROLE", "MS_WORKER")
    if name not in jobs:
        raise RoleError(f"MS_ROLE={name!r}: expected one of {', '.join(jobs)}")
    host = env.get("MS_SCHED_HOST")
    where = f"{host}:{env.get('MS_SCHED_PORT', PORT)}" if host else None
    rank = "MS_NODE_ID" if "MS_NODE_ID" in env else "RANK_ID"
    number = _number(env, rank) if jobs[name] == "worker" else 0
    return Role(_number(env, "MS_WORKER_NUM"), number, where, job=jobs[name], source="MindSpore")


def _tf_config(env: Environment) -> Role | None:
    if "TF_CONFIG" not in env:
        return None
    expected = 'expected {"cluster": {"worker": ["host:port"]}, "task": {"type": .., "index": ..}}'
    try:
        config = json.loads(env["TF_CONFIG"])
        cluster, task = config.get("cluster", {}), config.get("task", {})
        kind, index = str(task.get("type", "worker")), int(task.get("index", 0))
        lead = list(cluster.get("chief", cluster.get("master", [])))
        training = [*lead, *cluster.get("worker", [])]
    except (ValueError, TypeError, AttributeError) as error:
        raise RoleError(f"TF_CONFIG: {error}; {expected}") from error
    if not training:
        return Role(source="TF_CONFIG")
    jobs = {"chief": "chief", "master": "chief", "ps": "server", "worker": "worker"}
    job = jobs.get(kind, kind)
    if job not in ("chief", "worker", "server", "evaluator"):
        raise RoleError(f"TF_CONFIG: task type {kind!r}; expected chief, worker, ps or evaluator")
    process = {"chief": index, "worker": index + len(lead)}.get(job, 0)
    where = str(training[0]) if len(training) > 1 else None
    return Role(len(training), process, where, job=job, source="TF_CONFIG")


READERS: tuple[Callable[[Environment], Role | None], ...] = (
    _launcher,
    _open_mpi,
    _slurm,
    _tpu,
    _paddle,
    _dmlc,
    _mindspore,
    _tf_config,
)
"""Readers of each system's variables, in order; a reader returns None if they are not set."""
