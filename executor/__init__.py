"""meshwright's executor: runs plans on real devices with ``jax.jit``."""

from executor.check import CheckReport, check
from executor.compile import CompiledStep, compile_plan
from executor.hosts import HostError, agree, initialize
from executor.measure import measure
from executor.mesh import build_mesh, detect_cluster
from executor.parallelize import Parallelized, parallelize
from executor.roles import Role, RoleError, read_role

__all__ = [
    "CheckReport",
    "CompiledStep",
    "HostError",
    "Parallelized",
    "Role",
    "RoleError",
    "agree",
    "build_mesh",
    "check",
    "compile_plan",
    "detect_cluster",
    "initialize",
    "measure",
    "parallelize",
    "read_role",
]
