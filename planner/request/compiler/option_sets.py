"""XLA options that plans have by default, and those that a compiler is tried with, by kind of
device.

Chosen by scheduled modules (libtpu 0.0.42.1) of decoders, FSDP over 8 chips: the compiler's cycles,
and how much of the time of collectives lies beside them.

===== ===================== ======= ====================== ====================== ======
chip  options               work    gathers, beside work   reductions, beside     peak
===== ===================== ======= ====================== ====================== ======
v5p   none                  194 ms  11.7 ms, 0             8.0 ms, 0              6.3 GB
v5p   ``ASYNC_GATHERS``     194 ms  11.7 ms, 8.2           8.0 ms, 0              6.2 GB
v5p   ``OFFLOADED``         192 ms  11.7 ms, 10.6          7.7 ms, 5.5            11.2 GB
v6e   none                  45 ms   4.0 ms, 0              6.0 ms, 0              3.4 GB
v6e   ``ASYNC_GATHERS``     47 ms   4.0 ms, 2.7            6.0 ms, 0              3.9 GB
v6e   ``OFFLOADED``         44 ms   4.0 ms, 2.8            6.0 ms, 3.4            4.3 GB
v5e   none                  125 ms  6.0 ms, 4.9            8.0 ms, 0              3.6 GB
===== ===================== ======= ====================== ====================== ======

So v5p has `ASYNC_GATHERS` by default where the memory leaves `ROOM` for what is in flight; v6e has
none, as there they cost what they gain; v5e runs gathers asynchronously anyway. `OFFLOADED` runs
collectives on SparseCores: it gains most and takes most memory, so plans get it only from
``confirm``, where the compiler at hand accepted it, the step became faster and fits. On v5e, which
has no SparseCores, `ASYNC` is tried.
"""

from __future__ import annotations

import dataclasses

from costmodels import Cluster

Options = tuple[tuple[str, str], ...]


def _on(*names: str) -> Options:
    return tuple((name, "true") for name in sorted(names))


_GATHERS = (
    "xla_enable_async_all_gather",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
)
ASYNC_GATHERS = _on(*_GATHERS)
ASYNC = _on(
    *_GATHERS,
    "xla_enable_async_all_reduce",
    "xla_tpu_enable_async_all_to_all",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
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
DEFAULTS: dict[str, Options] = {"v5p": ASYNC_GATHERS}
"""What plans have unless other options are given, by kind of device."""

OPTION_SETS: dict[str, Options] = {"v5e": ASYNC, "v5p": OFFLOADED, "v6e": OFFLOADED}
"""What ``confirm`` tries, by kind of device."""

NAMES = frozenset(name for options in (ASYNC, ASYNC_GATHERS, OFFLOADED) for name, _ in options)
"""Options that only TPUs know, and that a plan may have without having been asked for them."""


ROOM = 0.85
"""Share of the memory that a plan may be predicted to take and still have the default options:
asynchronous gathers keep more in flight (mixture of experts, v5p:2x2x4: 18.5 GB without, 20.4
with)."""


def where_room(given: Options, cluster: Cluster, peak: float, limit: float) -> tuple[Options, str]:
    """The options of a plan by its memory in bytes, and a note if the defaults are left out."""
    usual = DEFAULTS.get(cluster.device.kind, ())
    if not usual or given != usual or peak <= ROOM * limit:
        return given, ""
    note = (
        f"compiled without {_WHAT[usual]}, which keep more in memory than there is room for; the "
        "step is longer than predicted by what they hide"
    )
    return (), note


_WHAT = {
    ASYNC: "asynchronous collectives",
    ASYNC_GATHERS: "asynchronous gathers",
    OFFLOADED: "collectives on SparseCores",
}


def options_text(options: Options) -> str:
    """What options are for, in a few words."""
    what = _WHAT.get(options)
    count = f"{len(options)} of XLA, in the plan"
    return f"{what} ({count})" if what else count


def options_line(options: Options, cluster: str, confirmed: bool) -> str:
    """The options of a plan for a reader; empty if there is nothing to say.

    Args:
        options: of the plan.
        cluster: its text; the kind of device stands before the colon.
        confirmed: whether a compiler confirmed the plan.
    """
    said = [options_text(options)] if options else []
    if not confirmed and OPTION_SETS.get(cluster.partition(":")[0]) is OFFLOADED:
        said.append(
            "the step time is that of the options which --confirm tries, and longer without"
        )
    return "; ".join(said)


def with_defaults(given: Options | None, cluster: Cluster) -> tuple[Options, Cluster]:
    """The options of a plan, and the cluster as programs compiled with them use it.

    Args:
        given: by the user, in front of the defaults of the kind of device; None: none at all.
        cluster: its overlap holds with the defaults. Where one of these is missing or changed,
            nothing overlaps.
    """
    usual = dict(DEFAULTS.get(cluster.device.kind, ()))
    options = {} if given is None else {**usual, **dict(given)}
    if any(options.get(name) != value for name, value in usual.items()):
        blocking = dataclasses.replace(
            cluster.device, overlap=0.0, overlap_ahead=0.0, overlap_behind=0.0
        )
        cluster = dataclasses.replace(cluster, device=blocking)
    return tuple(sorted(options.items())), cluster
