"""XLA options: those that plans have by default, and sets that ``confirm`` tries.

*Default.* XLA:TPU fuses a softmax over two or more sequences or heads per device into one kernel
that holds whole rows (`xla_tpu_rwb_fusion`), and writes its numerators as float32. Without that,
scores stay in the dtype of their product, and what reads them computes the rest. So do plans for
steps with a softmax (``DEFAULT``): forward and backward of attention, compiled cycles and temporary
bytes over those of the default (libtpu 0.0.42.1):

===== =============================== ====== =====
chip  attention                       cycles bytes
===== =============================== ====== =====
v6e   2 x 4,096 tokens, 24 heads      0.48   0.35
v5p   2 x 4,096 tokens, 24 heads      0.85   1.21
v4    2 x 4,096 tokens, 24 heads      0.92   1.21
v5e   8 x 1,024 tokens, 16 heads      0.95   0.85
v5p   8 x 1,024 tokens, 16 heads      1.04   0.82
v6e   2 x 2,048 tokens, 16 heads      1.15   0.83
tpu7x 8 x 1,024 tokens, 16 heads      1.08   0.80
===== =============================== ====== =====

Whole steps: a vision transformer on v5e 0.85 (compute) and 0.83 (peak), an encoder and decoder 0.88
and 0.81, BERT 0.95 and 0.86; on v5p a decoder of 3B parameters 0.88 and 1.00, a mixture of experts
0.95 and 0.85; a decoder on v6e with 2,048 tokens 1.01 and 0.72. Steps without a softmax compile to
the same program.

*Tried.* The sets were chosen from scheduled modules (libtpu 0.0.42.1) of decoders under FSDP over 8
chips: the compiler's cycles, and how much of the time of collectives overlaps with them.

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

from collections.abc import Collection

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

DEFAULT: Options = (("xla_tpu_rwb_fusion", "false"),)
"""The options of plans for steps with a softmax on TPUs."""

NAMES = frozenset(name for some in (*OPTION_SETS.values(), DEFAULT) for name, _ in some)
"""Options that exist only for TPUs."""

WHAT = {
    ASYNC: "async collectives",
    OFFLOADED: "collectives on SparseCores",
    DEFAULT: "softmax apart from its product",
}
"""Descriptions of the sets."""

COUNTED = frozenset({"v5p", "v6e"})
"""Kinds of device whose overlap in the catalog is about that with `OFFLOADED`. Without it, their
collectives block."""


def with_defaults(options: Options, tpu: bool, kinds: Collection[str]) -> Options:
    """A request's options with ``DEFAULT`` where it names none of them.

    Args:
        options: those of the request.
        tpu: whether the plan is for a TPU.
        kinds: the operation kinds of the step.
    """
    if not tpu or not {"reduce_max", "exp"}.issubset(kinds):
        return options
    return tuple(sorted((dict(DEFAULT) | dict(options)).items()))


def without_defaults(options: Options) -> Options:
    """Options other than ``DEFAULT``."""
    return tuple(option for option in options if option not in DEFAULT)


def options_on(platform: str, options: Options, confirmed: bool) -> tuple[Options, tuple[str, ...]]:
    """A plan's options for the devices that it runs on, and the names of those left out that the
    user may miss. Other devices than TPUs get none that a plan has for TPUs by default, or since it
    was confirmed."""
    if platform == "tpu":
        return options, ()
    given = without_defaults(options)
    away = tuple(sorted(NAMES.intersection(dict(given)))) if confirmed else ()
    return tuple((name, value) for name, value in given if name not in away), away


def options_text(options: Options) -> str:
    """Options as the summary of a plan shows them: known sets by what they do."""
    default = tuple(option for option in options if option in DEFAULT)
    some = filter(None, (default, without_defaults(options)))
    return ", ".join(WHAT.get(x, " ".join(f"{n}={v}" for n, v in x)) for x in some)
