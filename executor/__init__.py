"""meshwright's executor: runs plans on real devices with ``jax.jit``."""

from typing import TYPE_CHECKING, Any

from executor.calibrate.measure import measure
from executor.data import (
    Batches,
    DataError,
    Position,
    Streams,
    agreed_steps,
    own_files,
    shard,
)
from executor.processes.bootstrap import HostError, agree, initialize, share
from executor.processes.meet import ProcessMismatchError
from executor.processes.roles import Role, RoleError, read_role
from executor.run.compile import CompiledStep, compile_plan
from executor.run.mesh import build_mesh, detect_cluster
from executor.run.parallelize import Parallelized, parallelize
from executor.train.initialized import init
from executor.train.loop import PreemptedError, Trained, mean_metrics, train
from executor.train.metrics import NotFiniteError
from executor.train.settings import train_options
from executor.verify.check import CheckReport, check

if TYPE_CHECKING:
    from executor.checkpoint import CheckpointError, Checkpoints, FencedError

__all__ = [
    "Batches",
    "CheckReport",
    "CheckpointError",
    "Checkpoints",
    "CompiledStep",
    "DataError",
    "FencedError",
    "HostError",
    "NotFiniteError",
    "Parallelized",
    "Position",
    "PreemptedError",
    "ProcessMismatchError",
    "Role",
    "RoleError",
    "Streams",
    "Trained",
    "agree",
    "agreed_steps",
    "build_mesh",
    "check",
    "compile_plan",
    "detect_cluster",
    "init",
    "initialize",
    "mean_metrics",
    "measure",
    "own_files",
    "parallelize",
    "read_role",
    "shard",
    "share",
    "train",
    "train_options",
]

_CHECKPOINT = frozenset({"CheckpointError", "Checkpoints", "FencedError"})


def __getattr__(name: str) -> Any:
    """Import the names that need Orbax on first use: that import takes longer than all others."""
    if name in _CHECKPOINT:
        from executor import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
