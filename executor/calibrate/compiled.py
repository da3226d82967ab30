"""Compile the probes ahead of time, with a TPU compiler's estimates in place of measurements.

Nothing runs. Every program is compiled for one device; its time is the sum of the compiler's
``estimated_cycles``, loops multiplied out, divided by the clock rate. Programs with gathers or
scatters are left out, because the compiler estimates no cycles for those.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from costmodels import Cluster
from costmodels.calibrate import Sample
from executor.calibrate.probes import probes
from executor.calibrate.sampling import Progress, Sampled, kernel_counts
from executor.verify.aot import TPU_CLOCK_HZ, compile_function, devices_of, tpu_seconds
from planner.errors import RequestError

UNTOLD = frozenset({"step_latency_s"})
"""Constants that no estimate determines."""


def compile_probes(
    cluster: Cluster,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    *,
    scale: float = 1.0,
    progress: Progress = lambda doing, share: None,
) -> Sampled:
    """Compile the probes for a TPU; no TPU is needed.

    Args:
        cluster: its kind selects the compiler, and its catalog constants size the programs.
        dtypes: dtypes of the products.
        scale: factor on the programs' intended times.
        progress: called with the current activity and the share that is done.

    Raises:
        RequestError: the cluster is not a TPU, its compiler is not installed (CompilerAbsentError),
            or the compiler refused a program.
    """
    if cluster.device.kind not in TPU_CLOCK_HZ:
        known = ", ".join(TPU_CLOCK_HZ)
        raise RequestError(
            f"--compiler: the compiler for {cluster.device.kind} estimates no times, those for "
            f"{known} do; leave --compiler out where the devices are present"
        )
    here = SingleDeviceSharding(devices_of(cluster)[0])
    all_probes = probes(cluster.device, dtypes, scale)
    samples = []
    for k, probe in enumerate(all_probes):
        progress(f"compiling {probe.kind}", k / len(all_probes))
        args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here) for s in probe.shapes]
        module = compile_function(jax.jit(probe.function), args, cluster).module
        if module.unpriced_bytes or not module.cycles:
            continue
        counts = kernel_counts(probe.function, probe.shapes, cluster.device)
        seconds = tpu_seconds(module.cycles, cluster)
        samples.append(Sample(probe.kind, probe.name, seconds, counts))
    return Sampled(tuple(samples), 0.0)
