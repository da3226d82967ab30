"""What was asked for, parsed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costmodels import (
    AnalyticCostModel,
    Cluster,
    ClusterError,
    CostModel,
    parse_bytes,
    parse_cluster,
)
from planner.errors import RequestError
from planner.modes import PROPAGATION, check_mode, get_parallel_mode
from planner.request.state import StateRequest, check_state_request
from planner.space.host_memory import Offload, check_offload
from planner.spec import MeshSpec, parse_mesh


@dataclass(frozen=True)
class Request:
    """What was asked for, parsed."""

    cluster: Cluster
    model: CostModel
    mode: str
    search: str
    mesh: MeshSpec | None
    limit_bytes: float
    time_limit_s: float
    effort_s: float = math.inf
    """Counted work of the searches that take an effort, in seconds: a plan must not depend on how
    busy the machine is."""
    state: StateRequest = field(default_factory=StateRequest)
    sequence: str = ""
    """A mesh axis over which the batch's second dimension stays split (sequence parallelism)."""
    offload: Offload = field(default_factory=Offload)
    """What of the state lives in host memory."""
    tensor: str = ""
    """A mesh axis over which every parameter is split where it is read (tensor parallelism)."""
    device_bytes: float = 0.0
    """Memory of a device where the limit is that less a reserve; 0 where a limit was given."""
    advice: bool = True
    """Whether to try what would help when no plan fits."""

    @property
    def spreads(self) -> bool:
        """Whether what is given is only completed, rather than all else searched."""
        return self.mode != "AUTO_PARALLEL" or self.search == PROPAGATION


def parse_request(
    cluster: str | Cluster,
    *,
    mode: str | None = None,
    search: str | None = None,
    mesh: str | Mapping[str, int] | MeshSpec | None = None,
    memory: str | float | None = None,
    time_limit_s: float = 60.0,
    zero: int | None = None,
    whole_below: str | float = 0.0,
    never_fsdp: str | Sequence[str] = (),
    offload: str | Sequence[str] = (),
) -> Request:
    """Check and parse what ``make_plan`` was asked for; raises RequestError."""
    current = get_parallel_mode()
    if mode is None and current.update != "sync":
        raise RequestError(
            f"set_parallel_mode({current.mode!r}, update={current.update!r}) is in force: workers "
            "take steps of their own against parameter servers, so there is no one step of all "
            "devices to plan; call executor.parameter_server.train(loop, ...), or give mode= (or "
            "--mode) to plan a step all the same, as for the devices of one worker"
        )
    chosen = check_mode(mode or current.mode, search or current.search)
    try:
        parsed = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        limit = float(parse_bytes(memory)) if isinstance(memory, str) else memory
        small = float(parse_bytes(whole_below)) if isinstance(whole_below, str) else whole_below
    except ClusterError as error:
        raise RequestError(str(error)) from error
    if limit is not None and not limit > 0:
        raise RequestError(f"memory {memory!r}: expected a positive number of bytes per device")
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    elif isinstance(mesh, Mapping):
        if not mesh or not all(isinstance(n, int) for n in mesh.values()):
            raise RequestError(f"mesh {dict(mesh)!r}: expected axis names with whole sizes")
        mesh = MeshSpec(tuple(mesh), tuple(mesh.values()))
    if chosen.mode == "STAND_ALONE":
        mesh = MeshSpec(("data",), (1,))
    elif mesh is not None and mesh.num_devices != parsed.num_devices:
        raise RequestError(
            f"mesh ({mesh}) needs {mesh.num_devices} devices, cluster {parsed.text} has "
            f"{parsed.num_devices}; change one of them"
        )
    model = AnalyticCostModel(parsed)
    return Request(
        parsed,
        model,
        chosen.mode,
        chosen.search,
        mesh,
        float(model.memory_limit_bytes if limit is None else limit),
        time_limit_s,
        state=check_state_request(zero, small, never_fsdp),
        offload=check_offload(offload),
        device_bytes=float(parsed.device.memory_bytes) if limit is None else 0.0,
    )
