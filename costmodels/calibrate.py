"""Fit a device kind's constants to measured programs: nonlinear least squares in log time.

A sample describes a measured program by the quantities that the cost model counts in it. The fit
yields the constants with which *the model* reproduces the measured times, whatever it leaves out.
The residual of a sample is log(predicted / measured), so a factor counts the same for short and
long programs. The loss grows less than quadratically (soft L1), so a program that the model's form
does not suit can't distort the fit to all others (Triggs et al. 2000, "Bundle adjustment - a modern
synthesis", section 3.2). A constant that the programs hardly determine stays near the catalog's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from ._describe import Description, described
from .collectives import Collective
from .compute import Array, Kernel
from .hardware import Cluster, build_cluster
from .model import AnalyticCostModel
from .schedule import StageSeconds, step_seconds

SOFT = 0.2
"""Residual (in log time) from which the loss grows linearly."""
PRIOR = 0.02
"""Weight of a constant's distance (in log) from the catalog's: a factor of e off counts as much as
a program that is 2 % off. It determines the constants that the programs do not."""
STARTS = (0.5, 0.1, 0.02)
"""Fractions of the vector rate at which fits start: a rate too high to matter has no gradient."""
LEAST, MOST = 1e-3, 1e3
"""A constant stays within these factors of where its fit starts."""
DIGITS = 4
"""Significant digits of a fitted constant."""


@dataclasses.dataclass(frozen=True)
class KernelCount:
    """Kernels of one device: flop, bytes moved, bytes of the result, number of starts."""

    kind: Kernel
    dtype: str
    flops: float
    nbytes: float
    result_bytes: float = 0.0
    kernels: float = 1.0


@dataclasses.dataclass(frozen=True)
class CollectiveCount:
    """``count`` collectives over mesh axes, each of ``payload_bytes`` (see
    `collective_coefficients`). ``combined``: a compiler may combine them."""

    kind: Collective
    mesh_shape: tuple[int, ...]
    axes: tuple[int, ...]
    payload_bytes: float
    count: float = 1.0
    combined: bool = False


@dataclasses.dataclass(frozen=True)
class CopyCount:
    """A copy of ``nbytes`` from one device to its host or back."""

    nbytes: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """A program that was run on all devices at once, and its wall seconds.

    ``kind`` is the family under which its residual is reported.
    """

    kind: str
    name: str
    seconds: float
    kernels: tuple[KernelCount, ...] = ()
    collectives: tuple[CollectiveCount, ...] = ()
    copies: tuple[CopyCount, ...] = ()


@dataclasses.dataclass(frozen=True)
class Residual:
    """How far predictions are from a family's samples: |predicted / measured - 1|, median and
    worst; ``ratio`` is the geometric mean of predicted / measured."""

    kind: str
    samples: int
    ratio: float
    median: float
    worst: float
    worst_name: str


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Fitted constants, as tables and keys of the catalog, and what they leave unexplained.

    ``kept``: constants (``table.key``) that no sample determines; they stay at the catalog's value.
    """

    constants: tuple[tuple[str, str, float], ...]
    residuals: tuple[Residual, ...]
    kept: tuple[str, ...] = ()

    def tables(self) -> dict[str, dict[str, float]]:
        """The constants as a table of tables."""
        out: dict[str, dict[str, float]] = {}
        for table, key, value in self.constants:
            out.setdefault(table, {})[key] = value
        return out


def predicted_s(cluster: Cluster, sample: Sample) -> float:
    """Seconds that the analytic cost model predicts for a sample, without any overlap."""
    model = AnalyticCostModel(cluster)
    compute = communication = 0.0
    for k in sample.kernels:
        compute += k.kernels * model.op_overhead_s
        compute += model.compute_s(k.flops, k.nbytes, k.dtype, k.kind, k.result_bytes)
    for c in sample.collectives:
        alpha, beta = model.collective_coefficients(c.kind, c.mesh_shape, c.axes)
        alpha *= model.combined_latency if c.combined else 1.0
        communication += c.count * (alpha + beta * c.payload_bytes)
    copied = sum(model.host_latency_s + model.host_s_per_byte * c.nbytes for c in sample.copies)
    stage = StageSeconds(compute, communication, wait_s=copied)
    return step_seconds((stage,), fixed_s=model.step_latency_s).step_s


def fit(
    cluster: str, samples: Sequence[Sample], untold: frozenset[str] = frozenset()
) -> Calibration:
    """The constants with which the cost model comes closest to the samples.

    Fitted rates are achieved rates: the efficiencies beside them are 1. Constants that no sample
    determines stay at the catalog's value (``Calibration.kept``): networks between nodes on a
    cluster of one node, the share of communication that hides. Rates of dtypes that were not
    measured change by the average factor of the measured ones. Device constants are fitted first,
    to the samples of kernels alone, then the others to the remaining samples.

    Args:
        cluster: the text of the cluster that was measured.
        samples: at least one without collectives; seconds are positive.
        untold: keys of device constants that these samples do not determine.

    Raises:
        ValueError: no sample without collectives, or a time that is not positive.
    """
    alone = [s for s in samples if not s.collectives and not s.copies]
    joined = [s for s in samples if s.collectives]
    copied = [s for s in samples if s.copies]
    if not alone or any(not 0 < s.seconds < math.inf for s in samples):
        raise ValueError("expected samples without collectives, all of positive seconds")
    given = described(cluster)
    known = _achieved(given)
    start = given.with_constants(known)
    fitted_names: set[_Name] = set()
    for names, part in (
        (_device_names(alone, untold), alone),
        (_link_names(start, joined), joined),
        ([("host", "bytes_per_s"), ("host", "latency_s")], copied),
    ):
        if part:
            start = start.with_constants(_fitted(start, names, part))
            fitted_names |= set(names)
    start = start.with_constants(_unmeasured_peaks(known, start, alone))
    changed = {
        (table, key): value
        for table, values in start.entry.items()
        for key, value in values.items()
        if value != given.entry[table].get(key)
    }
    constants = tuple((table, key, float(value)) for (table, key), value in changed.items())
    return Calibration(
        constants, residuals(build_cluster(start), samples), _kept(start, fitted_names)
    )


def residuals(cluster: Cluster, samples: Iterable[Sample]) -> tuple[Residual, ...]:
    """Per family, in order of first appearance, how far predictions are from the samples."""
    ratios_by_kind: dict[str, list[tuple[float, str]]] = {}
    for s in samples:
        ratios_by_kind.setdefault(s.kind, []).append((predicted_s(cluster, s) / s.seconds, s.name))
    out = []
    for kind, ratios in ratios_by_kind.items():
        errors = [(abs(ratio - 1.0), name) for ratio, name in ratios]
        mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
        middle = statistics.median(error for error, _ in errors)
        out.append(Residual(kind, len(errors), mean, middle, *max(errors)))
    return tuple(out)


_TIMED = ("device", "intra_node", "inter_node", "torus", "inter_slice", "host")
"""Tables of constants that times depend on."""


def _kept(fitted: Description, fitted_names: set[_Name]) -> tuple[str, ...]:
    """The constants that times depend on and no sample determines, as ``table.key``."""
    shares = ("convolution_efficiency", "attention_efficiency", "overlap", "combined_latency")
    return tuple(
        f"{table}.{key}"
        for table in _TIMED
        for key in fitted.entry.get(table, {})
        if (key in shares or key.startswith("overlap_") or key in (*_LINK, *_DEVICE))
        and (table, key) not in fitted_names
    )


def _achieved(given: Description) -> dict[str, dict[str, float]]:
    """The constants with every efficiency multiplied into its rate, and rates unchanged."""
    device = given.entry["device"]
    matmul = device["matmul_efficiency"]
    out: dict[str, dict[str, float]] = {
        "device": {
            "matmul_efficiency": 1.0,
            "convolution_efficiency": min(1.0, device["convolution_efficiency"] / matmul),
            "attention_efficiency": min(1.0, device["attention_efficiency"] / matmul),
            "memory_efficiency": 1.0,
            "memory_bytes_per_s": device["memory_bytes_per_s"] * device["memory_efficiency"],
        },
        "peak_flops_per_s": {
            dtype: peak * matmul for dtype, peak in given.entry["peak_flops_per_s"].items()
        },
    }
    for name in ("intra_node", "inter_node", "torus", "inter_slice", "host"):
        if name in given.entry:
            link = given.entry[name]
            out[name] = {"bytes_per_s": link["bytes_per_s"] * link["efficiency"], "efficiency": 1.0}
            if link.get("in_switch_efficiency"):
                share = link["in_switch_efficiency"] / link["efficiency"]
                out[name]["in_switch_efficiency"] = min(1.0, share)
    return out


def _unmeasured_peaks(
    known: dict[str, dict[str, float]], fitted: Description, samples: Sequence[Sample]
) -> dict[str, dict[str, float]]:
    """Rates of dtypes without a measured product, scaled by the mean factor of the measured."""
    old, new = known["peak_flops_per_s"], fitted.entry["peak_flops_per_s"]
    measured_dtypes = {k.dtype for s in samples for k in s.kernels if k.kind == "matmul"} & set(old)
    if not measured_dtypes:
        return {}
    factor = math.exp(statistics.fmean(math.log(new[d] / old[d]) for d in sorted(measured_dtypes)))
    rest = {d: _rounded(rate * factor) for d, rate in old.items() if d not in measured_dtypes}
    return {"peak_flops_per_s": rest}


_Name = tuple[str, str]


def _device_names(samples: Sequence[Sample], untold: frozenset[str]) -> list[_Name]:
    """The device constants that these samples determine."""
    counts = [k for s in samples for k in s.kernels]
    products = sorted({k.dtype for k in counts if k.kind == "matmul"})
    names = [("peak_flops_per_s", dtype) for dtype in products]
    names += [("device", "matmul_store")] if products else []
    if any(k.kind == "convolution" for k in counts):
        names.append(("device", "convolution_efficiency"))
    if any(k.kind == "attention" for k in counts):
        names.append(("device", "attention_efficiency"))
    return names + [("device", key) for key in _DEVICE if key not in untold]


def _link_names(given: Description, samples: Sequence[Sample]) -> list[_Name]:
    """The link constants that these samples determine."""
    torus = "torus" in given.entry
    names = [("torus" if torus else "intra_node", key) for key in _LINK]
    cluster = build_cluster(given)
    if cluster.num_devices > cluster.devices_per_node:
        names += [("inter_slice" if torus else "inter_node", key) for key in _LINK[:2]]
    if not torus and given.entry["intra_node"]["in_switch_efficiency"]:
        names += [("intra_node", "in_switch_efficiency"), ("intra_node", "in_switch_latency_s")]
    if any(c.combined for s in samples for c in s.collectives):
        names.append(("device", "combined_latency"))
    return names


_LINK = ("bytes_per_s", "latency_s", "startup_s")
_DEVICE = ("memory_bytes_per_s", "vector_flops_per_s", "kernel_latency_s", "step_latency_s")
_SHARES = (
    "convolution_efficiency",
    "attention_efficiency",
    "in_switch_efficiency",
    "combined_latency",
)
_FROM = {"step_latency_s": 1e-4, "startup_s": 1e-5, "latency_s": 1e-6, "kernel_latency_s": 1e-6}


def _fitted(
    given: Description, names: Sequence[_Name], samples: Sequence[Sample]
) -> dict[str, dict[str, float]]:
    """The named constants, fitted to the samples; the fit starts from the values in ``given``."""
    from scipy.optimize import least_squares

    first = np.asarray([max(given.entry[t][k], _FROM.get(k, 1e-2)) for t, k in names], float)
    top = [1.0 / x if key in _SHARES else MOST for x, (_, key) in zip(first, names, strict=True)]
    measured = np.log([s.seconds for s in samples])
    prior = np.asarray([PRIOR if given.entry[t][k] > 0 else 0.0 for t, k in names])

    def constants(logs: Array) -> dict[str, dict[str, float]]:
        out: dict[str, dict[str, float]] = {}
        for (table, key), value in zip(names, first * np.exp(logs), strict=True):
            out.setdefault(table, {})[key] = min(1.0, value) if key in _SHARES else float(value)
        return out

    def errors(logs: Array) -> Array:
        cluster = build_cluster(given.with_constants(constants(logs)))
        off = np.log([predicted_s(cluster, s) for s in samples]) - measured
        return np.concatenate([off, prior * logs])

    low, high = np.full(len(first), math.log(LEAST)), np.log(top)
    begin = np.minimum(0.0, high - 0.5)  # a start at a bound would stay there
    vector = np.asarray([key == "vector_flops_per_s" for _, key in names], float)
    tries = [
        least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=SOFT)
        for start in np.unique([begin + math.log(share) * vector for share in STARTS], axis=0)
    ]
    best = min(tries, key=lambda solution: float(solution.cost))
    return {
        table: {key: _rounded(value) for key, value in values.items()}
        for table, values in constants(best.x).items()
    }


def _rounded(value: float) -> float:
    """A constant as the profile writes it, so that a fit and its file agree."""
    return float(f"{value:.{DIGITS}g}")
