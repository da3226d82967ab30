"""Sets of XLA options that ``confirm`` tries, by kind of device.

They were chosen from scheduled modules (libtpu 0.0.42.1) of decoders under FSDP over 8 chips: the
compiler's cycles, and how much of the time of collectives overlaps with them.

===== ================== ======= ====================== ====================== =======
chip  options            work    gathers, beside work   reductions, beside     peak
===== ================== ======= ====================== ====================== =======
v5p   none               194 ms  11.7 ms, 0             8.0 ms, 0              6.3 GB
v5p   fusion of gathers  194 ms  11.7 ms, 8.2           8.0 ms, 0              6.2 GB
v5p   ``OFFLOADED``      192 ms  11.7 ms, 10.6          7.7 ms, 5.5            11.2 GB
v6e   none               45 ms   4.0 ms, 0              6.0 ms, 0              3.4 GB
v6e   fusion of gathers  47 ms   4.0 ms, 2.7            6.0 ms, 0              3.9 GB
v6e   ``OFFLOADED``      44 ms   4.0 ms, 2.8            6.0 ms, 3.4            4.3 GB
v5e   none               125 ms  6.0 ms, 4.9            8.0 ms, 0              3.6 GB
===== ================== ======= ====================== ====================== =======

*Fusion of gathers* (``xla_tpu_enable_async_collective_fusion``) is only for v5e: libtpu 0.0.50
refuses it on other chips, where it may give wrong results or hang. v5e runs gathers asynchronously
by default; `ASYNC` adds reductions and all-to-alls, which take 10 % more memory (work and exposed
time of a GPT under FSDP, v5e:2x4: 29.3 ms without, 28.0 ms with). `OFFLOADED` runs collectives on
SparseCores. It is in use on v6e and tpu7x; no run on v5p is known, so it is not tried there. Only
``confirm`` gives a plan a set: if the installed compiler accepts it, and the step is faster and
fits.
"""

from __future__ import annotations

Options = tuple[tuple[str, str], ...]


def _on(*names: str) -> Options:
    return tuple((name, "true") for name in sorted(names))


ASYNC = _on(
    "xla_enable_async_all_gather",
    "xla_enable_async_all_reduce",
    "xla_tpu_enable_async_all_to_all",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
)
OFFLOADED = _on(
    "xla_tpu_enable_all_gather_offload_tracing",
    "xla_tpu_enable_all_reduce_offload_tracing",
    "xla_tpu_enable_reduce_scatter_offload_tracing",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "xla_tpu_use_tc_device_shape_on_sc",
)
OPTION_SETS: dict[str, Options] = {"v5e": ASYNC, "v6e": OFFLOADED}
"""The set to try, by kind of device."""

NAMES = frozenset(name for options in OPTION_SETS.values() for name, _ in options)
"""Options that exist only for TPUs."""

WHAT = {ASYNC: "async collectives", OFFLOADED: "collectives on SparseCores"}
"""Descriptions of the sets."""

COUNTED = frozenset({"v5p", "v6e"})
"""Kinds of device whose overlap in the catalog is about that with `OFFLOADED`. Without it, their
collectives block."""
