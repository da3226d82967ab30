"""Translate a process's role in a job of an older parameter-server system. Does not import jax.

Flags and variables of PaddlePaddle, MXNet, MindSpore and TensorFlow give the number of workers and
servers of a job, the address of its scheduler and the role of this process. Here one process runs
the script, Ray places workers and servers, and the scheduler is Ray's head. So only the numbers of
workers and servers and the address of the head matter. The table `SYSTEMS` maps each name to its
meaning; names without a meaning here are listed in ``PsRole.notes``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from executor.processes.roles import RoleError

Environment = Mapping[str, str]
Found = dict[str, str]
"""Settings by meaning: role, workers, servers, hosts (of servers, separated by commas), host and
port (of the scheduler, or of the first server), own_host and own_port, and the rank of a worker
(worker_rank), of a server (server_rank) or of either (rank)."""

PREFIX = "MESHWRIGHT_PS_"
"""Prefix of the variables that ``planner launch`` sets for a script: WORKERS, SERVERS, BACKEND,
ADDRESS and GPUS."""
PLACED = "Ray places workers and servers; their addresses are not given"
PYTHON = re.compile(r"(^|/)python[\d.]*$")
INTERFACE = "the interface is that of `ray start --node-ip-address`"


@dataclass(frozen=True)
class PsRole:
    """The role of a process in a parameter-server job.

    Attributes:
        role: "chief" (worker 0, or the process that starts the job), "worker", "server",
            "scheduler" or "evaluator".
        rank: rank among the workers or among the servers; None if it is not given.
        workers, servers: number of each; None if it is not given.
        address: ``"host:port"`` of the scheduler, which is Ray's head here; if a system has no
            scheduler, of its first server.
        source: the system, and the names of the settings that were read.
        port: port of the scheduler, if its host is not given.
        notes: given names that have no meaning here, each with the reason.
    """

    role: str
    rank: int | None = None
    workers: int | None = None
    servers: int | None = None
    address: str | None = None
    source: str = ""
    notes: tuple[str, ...] = ()
    port: str | None = None

    @property
    def instead(self) -> str:
        """What to run on this process's host instead; "" for the chief, which runs the script."""
        address = self.address or f"HEAD:{self.port or '6379'}"
        port = self.port or (self.address or "").rpartition(":")[2]
        join = f"`ray start --address={address}`"
        if self.role == "scheduler":
            head = "`ray start --head" + (f" --port={port}`" if port else "`")
            return f"the scheduler is Ray's head here: run {head} on this host, not the script"
        if self.role == "server":
            return f"servers are Ray actors here: run {join} on this host, not the script"
        if self.role == "evaluator":
            return (
                "an evaluator is a function here: pass it to train(..., evaluate=), and run "
                f"{join} on this host, not the script"
            )
        if self.role == "worker":
            return (
                f"workers are Ray tasks here: run {join} on this host; the script runs once, on "
                f"any host: planner launch --launcher ray --workers {self.workers or 'W'} "
                f"--servers {self.servers or 'S'} --ray-address {address} train.py"
            )
        return ""


@dataclass(frozen=True)
class System:
    """The settings of one system: the meaning of each name, or why it has no meaning here."""

    name: str
    roles: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    """First words of a command line that give the role."""
    unused: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], Found] | None = None
    """Parses the variable of a system that has a single variable for all settings."""


def _tf_config(text: str) -> Found:
    expected = (
        'expected {"cluster": {"worker": ["host:port", ..], "ps": [..]}, "task": {"type": .., '
        '"index": 0}}'
    )
    try:
        config = json.loads(text)
        cluster, task = dict(config.get("cluster", {})), dict(config.get("task", {}))
        for kind, hosts in cluster.items():
            if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
                raise TypeError(f"{kind!r} is {json.dumps(hosts)}")
        lead = cluster.get("chief") or cluster.get("master") or []
        servers = cluster.get("ps", [])
        workers = len(lead) + len(cluster.get("worker", []))
        index = int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise RoleError(f"TF_CONFIG: {error}; {expected}") from error
    settings: Found = {"hosts": ",".join(servers), "workers": str(workers)} if servers else {}
    if "type" in task:
        kind = str(task["type"])
        settings |= {"role": kind, "rank": str(index + len(lead) * (kind == "worker"))}
    return settings


SYSTEMS = (
    System(
        "PaddlePaddle",
        roles={"TRAINER": "worker", "PSERVER": "server"},
        variables={
            "TRAINING_ROLE": "role",
            "PADDLE_TRAINING_ROLE": "role",
            "PADDLE_PSERVERS_IP_PORT_LIST": "hosts",
            "PADDLE_TRAINERS_NUM": "workers",
            "PADDLE_TRAINER_ID": "worker_rank",
            "PADDLE_PORT": "own_port",
            "POD_IP": "own_host",
            "PADDLE_INIT_PSERVERS": "hosts",
            "PADDLE_INIT_PORT": "port",
            "PADDLE_INIT_NUM_GRADIENT_SERVERS": "workers",
            "PADDLE_INIT_TRAINER_ID": "worker_rank",
        },
        flags={
            "--pservers": "hosts",
            "--port": "port",
            "--num_gradient_servers": "workers",
            "--trainer_id": "worker_rank",
            "--worker_num": "workers",
            "--server_num": "servers",
        },
        words={"pserver": "PSERVER", "train": "TRAINER"},
        unused={
            "--ports_num": "a server is one actor; Ray opens its own connections",
            "--ports_num_for_sparse": "dense and row-sparse arrays share servers and connections",
            "--trainer_count": "threads of one trainer; a worker has all devices that it sees",
            "--use_gpu": "JAX_PLATFORMS says what a worker computes on",
            "--nics": INTERFACE,
            "PADDLE_INIT_PORTS_NUM": "a server is one actor; Ray opens its own connections",
            "PADDLE_INIT_PORTS_NUM_FOR_SPARSE": "dense and row-sparse arrays share connections",
            "PADDLE_INIT_TRAINER_COUNT": "threads of one trainer; a worker has all its devices",
            "PADDLE_INIT_USE_GPU": "JAX_PLATFORMS says what a worker computes on",
            "PADDLE_TRAINER_ENDPOINTS": PLACED,
            "PADDLE_CURRENT_ENDPOINT": PLACED,
        },
    ),
    System(
        "MXNet",
        roles={"worker": "worker", "server": "server", "scheduler": "scheduler"},
        variables={
            "DMLC_ROLE": "role",
            "DMLC_NUM_WORKER": "workers",
            "DMLC_NUM_SERVER": "servers",
            "DMLC_PS_ROOT_URI": "host",
            "DMLC_PS_ROOT_PORT": "port",
            "DMLC_WORKER_ID": "worker_rank",
            "DMLC_SERVER_ID": "server_rank",
        },
        flags={
            "-n": "workers",
            "--num-workers": "workers",
            "-s": "servers",
            "--num-servers": "servers",
        },
        unused={
            "-H": "hosts join by `ray start`",
            "--hostfile": "hosts join by `ray start`",
            "--launcher": "planner launch has its own",
            "--cluster": "planner launch has its own",
            "--sync-dst-dir": "Ray's runtime environment carries files",
            "DMLC_INTERFACE": INTERFACE,
            "DMLC_NODE_HOST": INTERFACE,
            "PS_HEARTBEAT_INTERVAL": "Ray notices lost processes",
            "PS_HEARTBEAT_TIMEOUT": "Ray notices lost processes; train(wait_s=) bounds each wait",
            "PS_RESEND": "pushes carry numbers and count once",
            "PS_VERBOSE": "Served.counts says what servers did",
            "MXNET_KVSTORE_BIGARRAY_BOUND": "train(split_bytes=) is that bound, in bytes",
        },
    ),
    System(
        "MindSpore",
        roles={"MS_WORKER": "worker", "MS_PSERVER": "server", "MS_SCHED": "scheduler"},
        variables={
            "MS_ROLE": "role",
            "MS_WORKER_NUM": "workers",
            "MS_SERVER_NUM": "servers",
            "MS_SCHED_HOST": "host",
            "MS_SCHED_PORT": "port",
            "MS_NODE_ID": "rank",
        },
        unused={
            "MS_INTERFACE": INTERFACE,
            "MS_TOPO_TIMEOUT": "train(wait_s=) bounds each wait",
        },
    ),
    System(
        "TensorFlow",
        roles={
            "chief": "chief",
            "master": "chief",
            "worker": "worker",
            "ps": "server",
            "evaluator": "evaluator",
        },
        variables={"TF_CONFIG": "all"},
        read=_tf_config,
    ),
)
"""Read in order; the first system whose settings mention servers is used."""


def ps_role(argv: Sequence[str], environ: Environment) -> PsRole | None:
    """The role of this process in an older system's parameter-server job.

    Args:
        argv: words such as ``pserver --port=7164 --num_gradient_servers=4``, or those of MXNet's
            ``tools/launch.py`` up to the program that it starts; or all words in one string, in
            shell syntax; may be empty.
        environ: usually ``os.environ``. Flags take precedence over variables.

    Returns:
        The role; None if nothing mentions servers, such as in a job of workers only.

    Raises:
        RoleError: a value is malformed, or the parts contradict each other.

    >>> ps_role((), {"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "2"}).role
    'server'
    """
    flags, unknown = _flags(argv)
    for system in SYSTEMS:
        role = _role_in(system, flags, unknown, environ)
        if role is not None:
            return role
    return None


def _flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Flags with their values, a first word that gives the role as "", and unknown flags."""
    flags: dict[str, str] = {}
    try:
        words = shlex.split(argv) if isinstance(argv, str) else list(argv)
    except ValueError as error:
        raise RoleError(f"{argv!r}: {error}") from error
    known = {name for system in SYSTEMS for name in (*system.flags, *system.unused, "")}
    if len(words) > 1 and PYTHON.search(words[0]) and words[1].endswith("launch.py"):
        words.pop(0)
    if words and (words[0] == "paddle" or words[0].endswith("launch.py")):
        words.pop(0)
    if words and any(words[0] in system.words for system in SYSTEMS):
        flags[""] = words.pop(0)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word[:2] in known and word[2:3] not in ("", "="):
            name, equals, value = word[:2], "=", word[2:]
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        flags[name] = value
    return flags, [name for name in flags if name not in known]


def _role_in(
    system: System, flags: Mapping[str, str], unknown: Sequence[str], environ: Environment
) -> PsRole | None:
    """The role that one system's settings give; None if they do not mention servers."""
    settings, names = _said(system, flags, environ)
    role = settings.get("role")
    if role is not None and role not in system.roles:
        name = names["role"]
        raise RoleError(f"{name}={role!r}: expected one of {', '.join(system.roles)}")
    kind = None if role is None else system.roles[role]
    hosts = [host.strip() for host in settings.get("hosts", "").split(",") if host.strip()]
    servers = _count(settings, names, "servers")
    if hosts and servers not in (None, len(hosts)):
        raise RoleError(
            f"{system.name}: {names['servers']} says {servers} servers, {names['hosts']} lists "
            f"{len(hosts)}; make them agree"
        )
    servers = len(hosts) if hosts else servers
    workers = _count(settings, names, "workers")
    notes = [
        f"{name}: no meaning here: {why}"
        for name, why in system.unused.items()
        if name in flags or (name in environ and not name.startswith("-"))
    ]
    notes += [f"{name}: not known here" for name in unknown]
    if system.name == "MXNet" and servers is None and workers is not None and flags:
        servers = workers
        notes.append("no -s: as many servers as workers, as MXNet's launch.py does")
    if not servers and kind not in ("server", "scheduler"):
        return None
    rank = _rank(settings, names, kind, hosts)
    if kind in (None, "worker") and workers == 1:
        rank = 0
    if kind is None and rank is None:  # only numbers: this process starts the job
        kind, rank = "chief", 0
    if kind in (None, "worker"):
        kind = "chief" if rank == 0 else "worker"
    _within(system.name, kind, rank, workers, servers)
    read = ", ".join(dict.fromkeys(names.values()))
    source = f"{system.name} ({read})"
    address = _address(settings, hosts)
    port = None if address else settings.get("port")
    return PsRole(kind, rank, workers, servers, address, source, tuple(notes), port)


def _said(
    system: System, flags: Mapping[str, str], environ: Environment
) -> tuple[Found, dict[str, str]]:
    """Settings by meaning, and the name of each; the first name in the table is used."""
    settings: Found = {}
    names: dict[str, str] = {}
    if "" in flags and flags[""] in system.words:
        settings["role"], names["role"] = system.words[flags[""]], flags[""]
    candidates = [(name, meaning, flags) for name, meaning in system.flags.items()]
    candidates += [(name, meaning, environ) for name, meaning in system.variables.items()]
    for name, meaning, given in candidates:
        if name in given and system.read is not None:
            settings = system.read(given[name])
            names = dict.fromkeys(settings, name)
        elif name in given and meaning not in settings:
            settings[meaning], names[meaning] = given[name], name
    return settings, names


def _count(settings: Found, names: Mapping[str, str], meaning: str) -> int | None:
    if meaning not in settings:
        return None
    try:
        number = int(settings[meaning])
    except ValueError:
        number = -1
    least = int(meaning == "workers")
    if number < least:
        raise RoleError(
            f"{names[meaning]}={settings[meaning]!r}: expected a whole number from {least} on"
        )
    return number


def _rank(
    settings: Found, names: Mapping[str, str], kind: str | None, hosts: Sequence[str]
) -> int | None:
    if kind == "scheduler":
        return None
    own_rank = "server_rank" if kind == "server" else "worker_rank"
    rank = _count(settings, names, own_rank if own_rank in settings else "rank")
    address = f"{settings.get('own_host', '')}:{settings.get('own_port', '')}"
    if kind == "server" and rank is None and address in hosts:
        return hosts.index(address)
    return rank


def _within(
    system: str, kind: str, rank: int | None, workers: int | None, servers: int | None
) -> None:
    """Raises RoleError if a rank is out of range."""
    of = {"worker": workers, "chief": workers, "server": servers}.get(kind)
    if rank is not None and of is not None and rank >= of:
        raise RoleError(f"{system}: {kind} {rank} of {of}, expected a number from 0 to {of - 1}")


def _address(settings: Found, hosts: Sequence[str]) -> str | None:
    """The address for Ray's head: the scheduler's, else the first server's."""
    place = settings.get("host") or (hosts[0] if hosts else "")
    if not place:
        return None
    if place.count(":") > 1 and "]" not in place:  # an IPv6 address
        place = f"[{place}]"
    has_port = ":" in place.rpartition("]")[2]
    return place if has_port else f"{place}:{settings.get('port', '6379')}"
