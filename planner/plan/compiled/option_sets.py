"""XLA options that a compiler is tried with, by kind of device.

Chosen by scheduled modules of ``benchmarks/compiled_truth.py`` (libtpu 0.0.42.1): how much of the
time of collectives lies beside compute. Work and exposed time together, without and with the set:

======================== ======== ======== =============
step                     without  with     collectives beside compute
======================== ======== ======== =============
gpt, FSDP, v5p:2x2x2     15.5 ms  14.8 ms  0.1 % -> 9 %
gpt, FSDP, v6e:2x4       17.6 ms  16.7 ms  0.1 % -> 8 %
gpt, FSDP, v5e:2x4       29.3 ms  28.0 ms  7 % -> 19 %
======================== ======== ======== =============

v5e runs gathers asynchronously by default; what gains there are reductions and all-to-alls, which
take 10 % more memory. Plans get a set only from ``confirm``, where the compiler at hand accepted it
and the step became faster.
"""

from __future__ import annotations

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
OPTION_SETS: dict[str, Options] = {"v5e": ASYNC, "v5p": ASYNC_GATHERS, "v6e": ASYNC_GATHERS}
"""By kind of device."""

NAMES = frozenset(name for options in OPTION_SETS.values() for name, _ in options)
"""Options that only TPUs know."""
