"""Parses the request of a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from costmodels import (
    AnalyticCostModel,
    Cluster,
    ClusterError,
    CostModel,
    parse_bytes,
    parse_cluster,
)
from costmodels.model import HOST_RESERVE
from planner.errors import RequestError
from planner.modes import COMPILERS, PROPAGATION, ParallelMode, check_mode, get_parallel_mode
from planner.request.compiler_options import parse_compiler_options
from planner.request.options import Options, given_options
from planner.request.pins import check_rules
from planner.request.state import StateRequest, check_state_request
from planner.space.decisions import parsed
from planner.spec import MeshSpec, parse_mesh


@dataclass(frozen=True)
class Request:
    """The parsed request of a plan."""

    cluster: Cluster
    model: CostModel
    mode: str
    search: str
    mesh: MeshSpec | None
    limit_bytes: float
    time_limit_s: float
    effort_s: float = math.inf
    """Limit on the counted work, in seconds, of searches that take an effort: a plan must not
    depend on the load of the machine."""
    state: StateRequest = field(default_factory=StateRequest)
    sequence: str = ""
    """A mesh axis over which the batch's second dimension stays split (sequence parallelism)."""
    decided: Mapping[str, Any] = field(default_factory=lambda: parsed({}))
    """Requests for decisions besides shardings, by name."""
    tensor: str = ""
    """A mesh axis over which every parameter is split where it is read (tensor parallelism)."""
    device_bytes: float = 0.0
    """Memory of a device if the limit is that less a reserve; 0 if a limit was given."""
    shardings: Mapping[str, Any] = field(default_factory=dict)
    """Rules over argument paths."""
    dump_problem: str | Path | None = None
    """A file for the problem of the chosen mesh."""
    confirm: str = ""
    """The compiler that confirms the plan; empty for none."""
    candidates: int = 1
    """Plans of different meshes to compile."""
    confirm_limit_s: float = 90.0
    """No compilation starts after this many seconds."""
    compiler_options: tuple[tuple[str, str], ...] = ()
    """XLA options."""
    stages: int = 1
    """Pipeline stages: the size of the mesh axis ``stage``."""
    staged: bool = False
    """Whether the mode requires two or more stages, of any number."""
    placed: bool = False
    """Whether no mesh was given, so that one may come from the arguments' shardings."""
    advice: bool = True
    """Whether to search for what would help if no plan fits."""

    @property
    def spreads(self) -> bool:
        """Whether given shardings are only completed, instead of all others being searched."""
        return self.mode != "AUTO_PARALLEL" or self.search == PROPAGATION


def parse_request(cluster: str | Cluster, **options: Unpack[Options]) -> Request:
    """Check and parse the options of a plan.

    Args:
        cluster: its text or description.
        **options: all but ``logical_axis_rules``, which belong to the traced function: a caller
            that supports them applies them there.

    Raises:
        RequestError: an option does not apply here, or has an invalid value.
        TypeError: a keyword is not an option.
    """
    plan_options = Options(**given_options("make_plan", options))  # type: ignore[typeddict-item]
    if "logical_axis_rules" in plan_options:
        raise RequestError(
            "logical_axis_rules: not supported here; set them around the call with "
            "flax.linen.logical_axis_rules(...)"
        )
    mode, memory = plan_options.get("mode"), plan_options.get("memory")
    whole_below, host = plan_options.get("whole_below", 0.0) or 0.0, plan_options.get("host_memory")
    current = get_parallel_mode()
    if mode is None and current.update != "sync":
        raise RequestError(
            f"set_parallel_mode({current.mode!r}, update={current.update!r}) is in force: workers "
            "take steps of their own against parameter servers, so there is no one step of all "
            "devices to plan; call executor.parameter_server.train(loop, ...), or give mode= (or "
            "--mode) to plan a step all the same, as for the devices of one worker"
        )
    search = plan_options.get("search") or current.search
    chosen = check_mode(mode, search) if mode else dataclasses.replace(current, search=search)
    check_mode(chosen.mode, search)
    _check_short(chosen, mode or "in force", plan_options)
    zero = plan_options.get("zero")
    try:
        described = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        limit = float(parse_bytes(memory)) if isinstance(memory, str) else memory
        host = float(parse_bytes(host)) if isinstance(host, str) else host
        small = float(parse_bytes(whole_below)) if isinstance(whole_below, str) else whole_below
    except ClusterError as error:
        raise RequestError(str(error)) from error
    if limit is not None and not limit > 0:
        raise RequestError(f"memory {memory!r}: expected a positive number of bytes per device")
    if host is not None:
        if not host > 0:
            raise RequestError(f"host_memory {host!r}: expected a positive number of bytes")
        described = dataclasses.replace(described, host_memory_bytes=host / (1.0 - HOST_RESERVE))
    mesh = _parsed_mesh(plan_options.get("mesh"), chosen, mode, described)
    model = AnalyticCostModel(described)
    return Request(
        described,
        model,
        chosen.mode,
        chosen.search,
        None if mesh is None else mesh.slim(),
        float(model.memory_limit_bytes if limit is None else limit),
        plan_options.get("time_limit_s", 60.0),
        state=check_state_request(
            chosen.zero if zero is None else zero, small, plan_options.get("never_fsdp", ())
        ),
        decided=parsed(plan_options),
        shardings=check_rules(plan_options.get("shardings")),
        dump_problem=plan_options.get("dump_problem"),
        **_confirming(plan_options, described),
        compiler_options=parse_compiler_options(plan_options.get("compiler_options") or {}),
        device_bytes=float(described.device.memory_bytes) if limit is None else 0.0,
        tensor=chosen.tensor,
        staged=chosen.staged,
    )


def _parsed_mesh(
    mesh: str | Mapping[str, int] | MeshSpec | None,
    chosen: ParallelMode,
    mode: str | None,
    described: Cluster,
) -> MeshSpec | None:
    """The requested mesh, including axes of one device; raises RequestError if it does not match
    the mode or the cluster. ``mode``: the given mode, for the error message."""
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh, described.num_devices)
    elif isinstance(mesh, Mapping):
        if not mesh or not all(isinstance(n, int) for n in mesh.values()):
            raise RequestError(f"mesh {dict(mesh)!r}: expected axis names with whole sizes")
        mesh = MeshSpec(tuple(mesh), tuple(mesh.values()))
    if chosen.mode == "STAND_ALONE":
        mesh = MeshSpec(("data",), (1,))
    elif chosen.tensor and mesh is not None and chosen.tensor not in mesh.names:
        raise RequestError(
            f"the mode {mode or 'in force'} splits matrices over the mesh axis {chosen.tensor}, "
            f"and mesh ({mesh}) has none; name it so, or leave mesh= out"
        )
    elif mesh is not None and mesh.num_devices != described.num_devices:
        raise RequestError(
            f"mesh ({mesh}) needs {mesh.num_devices} devices, cluster {described.text} has "
            f"{described.num_devices}; change one of them"
        )
    return mesh


def _check_short(chosen: ParallelMode, name: str, plan_options: Options) -> None:
    """Raise RequestError if an option contradicts the name of the mode."""
    zero = plan_options.get("zero")
    if chosen.zero is not None and zero not in (None, chosen.zero):
        raise RequestError(
            f"zero={zero} contradicts the mode {name}, which is ZeRO level {chosen.zero}: leave "
            "one of them out"
        )


def _confirming(plan_options: Options, cluster: Cluster) -> dict[str, Any]:
    """Options of ``confirm``; raises RequestError."""
    confirm, count = plan_options.get("confirm"), plan_options.get("candidates")
    if confirm is None:
        for name in ("candidates", "confirm_limit_s"):
            if plan_options.get(name) is not None:
                raise RequestError(f"{name}: has a meaning with confirm= (--confirm) only; give it")
        return {}
    if confirm not in COMPILERS:
        raise RequestError(f"confirm={confirm!r}: expected one of {', '.join(COMPILERS)}")
    wanted = "tpu" if cluster.kind == "torus" else "gpu"
    if confirm != wanted or cluster.device.kind == "cpu":
        raise RequestError(
            f"confirm={confirm!r}: {cluster.text} has no {confirm.upper()}s; "
            + ("leave it out" if cluster.device.kind == "cpu" else f"write {wanted!r}")
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise RequestError(f"candidates={count!r}: expected a whole number from 1 on")
    return {
        "confirm": confirm,
        "candidates": 3 if count is None else count,
        "confirm_limit_s": plan_options.get("confirm_limit_s") or 90.0,
    }
