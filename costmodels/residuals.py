"""How far predicted step times are from those of published training runs.

``residuals.toml`` holds quantiles of measured over predicted step time, by device kind and kind of
plan, and of the error of the ratio of two plans' times. ``benchmarks/published.py --residuals``
writes it.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal, get_args

from ._catalog import ClusterError, Table, catalog_entry, known_kinds, shown

PlanKind = Literal["data", "model", "stages"]
"""``data``: data parallel, FSDP, ZeRO. ``model``: also tensor, sequence or context parallelism.
``stages``: pipelines."""
PLAN_KINDS: tuple[PlanKind, ...] = get_args(PlanKind)
LEAST_ROWS = 8
"""Smallest number of runs whose quantiles are used: the 10th percentile of fewer is their
minimum."""
_ALL, _ORDER = "all", "order"
_FAMILIES = {"gpu": "GPUs", "tpu": "TPUs"}
_RUNS: Mapping[PlanKind, str] = {
    "data": "data parallel runs",
    "model": "model parallel runs",
    "stages": "pipeline runs",
}


@dataclass(frozen=True)
class Quantiles:
    """Measured over predicted step time of runs.

    Attributes:
        rows: how many runs.
        low: 10th percentile.
        high: 90th percentile.
    """

    rows: int
    low: float
    high: float


@dataclass(frozen=True)
class Residuals:
    """Contents of the file.

    Attributes:
        of: quantiles by device kind, family ("gpu", "tpu") or "all", and kind of plan.
        pairs: pairs of plans of one model on one machine.
        within: 80th percentile of the error of the ratio of their times.
    """

    of: Mapping[str, Mapping[PlanKind, Quantiles]]
    pairs: int
    within: float


@dataclass(frozen=True)
class Interval:
    """Interval that contains the measured times of 80 % of runs.

    Attributes:
        low: factor of the predicted time, 10th percentile of the runs.
        high: factor of the predicted time, 90th percentile.
        rows: how many runs.
        of: which runs, as in ``"59 published data parallel runs on h100"``.
    """

    low: float
    high: float
    rows: int
    of: str


def interval_of(kind: str, plan_kind: PlanKind) -> Interval | None:
    """The interval of predictions for a device kind.

    It comes from the runs of the kind if there are at least ``LEAST_ROWS``, else from the runs of
    its family (GPUs or TPUs), else from all runs.

    Args:
        kind: device kind, as the catalog names it.
        plan_kind: kind of the plan.

    Returns:
        None for CPUs, for kinds that the catalog lacks, and for families without any run.
    """
    family, table = _family(kind), published().of
    if not table.get(family):
        return None
    places = {kind: kind, family: _FAMILIES[family], _ALL: " and ".join(_FAMILIES.values())}
    for name, where in places.items():
        quantiles = table.get(name, {}).get(plan_kind)
        if quantiles is not None and quantiles.rows >= LEAST_ROWS:
            of = f"{quantiles.rows} published {_RUNS[plan_kind]} on {where}"
            return Interval(quantiles.low, quantiles.high, quantiles.rows, of)
    return None


def tied(a_s: float, b_s: float) -> bool:
    """Whether two predicted times of plans of one step on one cluster are too close to order them:
    the longer is less than ``Residuals.within`` above the shorter."""
    short, long = sorted((a_s, b_s))
    if not (short >= 0 and math.isfinite(long)):
        return False
    return short == long or long < short * (1.0 + published().within)


@functools.cache
def published() -> Residuals:
    """The residuals in the package's file."""
    text = resources.files("costmodels").joinpath("residuals.toml").read_text(encoding="utf-8")
    return read_residuals(text, "residuals.toml")


def read_residuals(text: str, where: str) -> Residuals:
    """Parse the text of a residuals file; ``where`` is its name in errors.

    Raises:
        ClusterError: one line that names the table and the key that is wrong.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{where}: {error}") from error
    order = _table(content.pop(_ORDER, None), ("pairs", "within"), f"{where}: [{_ORDER}]")
    pairs = _count(order, "pairs", f"{where}: [{_ORDER}]")
    within = _factor(order, "within", f"{where}: [{_ORDER}]")
    if within >= 1:
        raise ClusterError(f"{where}: [{_ORDER}] within must be below 1, got {within!r}")
    of: dict[str, Mapping[PlanKind, Quantiles]] = {}
    for name, tables in content.items():
        if name not in (_ALL, *_FAMILIES, *known_kinds()):
            raise ClusterError(
                f"{where}: unknown table [{shown(name)[1:-1]}]; expected {_ORDER}, {_ALL}, "
                f"{', '.join(_FAMILIES)} or a device kind"
            )
        if not isinstance(tables, dict):
            raise ClusterError(f"{where}: {name} must be a table, got {shown(tables)}")
        if extra := sorted(set(tables).difference(PLAN_KINDS)):
            raise ClusterError(
                f"{where}: unknown table [{name}.{shown(extra[0])[1:-1]}]; expected one of: "
                f"{', '.join(PLAN_KINDS)}"
            )
        of[name] = {
            kind: _quantiles(tables[kind], f"{where}: [{name}.{kind}]")
            for kind in PLAN_KINDS
            if kind in tables
        }
    return Residuals(of, pairs, within)


def _family(kind: str) -> str:
    """``"gpu"`` for nodes of devices, ``"tpu"`` for a torus, empty for CPUs and unknown kinds."""
    if kind not in known_kinds():
        return ""
    entry = catalog_entry(kind)
    if entry["device"]["shared_cores"]:
        return ""
    return "tpu" if "torus" in entry else "gpu"


def _quantiles(value: object, where: str) -> Quantiles:
    table = _table(value, ("rows", "low", "high"), where)
    rows = _count(table, "rows", where)
    low, high = _factor(table, "low", where), _factor(table, "high", where)
    if low > high:
        raise ClusterError(f"{where} low must be at most high, got {low!r} and {high!r}")
    return Quantiles(rows, low, high)


def _table(value: object, keys: tuple[str, ...], where: str) -> Table:
    """A table with exactly these keys."""
    if not isinstance(value, dict):
        got = "nothing" if value is None else shown(value)
        raise ClusterError(f"{where} must be a table with {', '.join(keys)}; got {got}")
    if extra := sorted(set(value).difference(keys)):
        raise ClusterError(f"{where} has an unknown key {shown(extra[0])}")
    if missing := [key for key in keys if key not in value]:
        raise ClusterError(f"{where} has no {missing[0]}")
    return value


def _count(table: Table, key: str, where: str) -> int:
    value = table[key]
    if type(value) is not int or value < 1:
        raise ClusterError(f"{where} {key} must be a whole number from 1 on, got {shown(value)}")
    return value


def _factor(table: Table, key: str, where: str) -> float:
    value = table[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ClusterError(f"{where} {key} must be a number above 0, got {shown(value)}")
    return float(value)
