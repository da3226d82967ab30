"""meshwright's executor: runs plans on real devices with ``jax.jit``."""

from executor.check import CheckReport, check
from executor.compile import CompiledStep, compile_plan
from executor.measure import measure
from executor.mesh import build_mesh, detect_cluster
from executor.parallelize import Parallelized, parallelize

__all__ = [
    "CheckReport",
    "CompiledStep",
    "Parallelized",
    "build_mesh",
    "check",
    "compile_plan",
    "detect_cluster",
    "measure",
    "parallelize",
]
