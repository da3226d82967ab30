"""Compile candidate plans ahead of time and choose the best as compiled.

Compilers change layouts, keep values in two dtypes and replace collectives, so a cost model can't
rank close candidates. The search's plan is compiled under every lowering, then the best plans of
other meshes under the lowering that was best for the first. The best of all is compiled once more,
with the options of its kind of device (``planner.plan.compiled.option_sets``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from costmodels import Cluster
from costmodels.files import write_whole
from executor.verify.aot import (
    TPU_CLOCK_HZ,
    Compiled,
    CompilerAbsentError,
    compile_step,
    link_seconds,
    tpu_seconds,
)
from executor.verify.compiled import carried_argnums
from planner.errors import RequestError
from planner.graph.trace import Traced
from planner.plan.compiled.confirmed import CompiledRow, Confirmation
from planner.plan.compiled.lowering import lowerings
from planner.plan.compiled.option_sets import OPTION_SETS, WHAT, without_defaults
from planner.plan.plan import Plan
from planner.rules.kernels.regions import REGION

ENOUGH = 0.01
"""Relative gain in step time that justifies another candidate than the first."""
MOST_AT_ONCE = 4
"""Maximum of concurrent compilations; each uses one core and 1 to 2 GB."""
CACHE = "MESHWRIGHT_CACHE"
"""Environment variable: cache directory for compilation results; empty disables the cache."""

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # these also affect a compilation
_PACKAGES = {"torus": "libtpu", "hierarchy": "jax-cuda12-pjrt"}


def confirm(
    plans: Sequence[Plan],
    traced: Traced,
    cluster: Cluster,
    *,
    donate_argnums: int | Sequence[int] | None = None,
    seconds: float,
) -> tuple[int, Plan]:
    """Compile ``plans`` for ``cluster`` and choose the fastest that fits.

    Args:
        plans: plans for the same step, the search's choice first.
        traced: the step.
        cluster: the target; its compiler is used.
        donate_argnums: as for ``jax.jit``; None donates the arguments that come back as results.
        seconds: no compilation starts after this time.

    Returns:
        Index into ``plans``, and that plan with ``confirmed`` and ``lowering`` set. It is the first
        plan, with a note, if the compiler is missing or rejects all candidates.
    """
    begun, first = time.perf_counter(), plans[0]
    package = _PACKAGES.get(cluster.kind, "")
    try:
        compiler = f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        compiler = package
    donated = carried_argnums(first) if donate_argnums is None else donate_argnums

    wide = bool(jax.config.read("jax_enable_x64"))

    def compiled(candidate: tuple[int, Plan]) -> Tried | None:
        number, plan = candidate
        late = time.perf_counter() - begun > seconds
        first_try = (
            plan.lowering == first.lowering and plan.compiler_options == first.compiler_options
        )
        if late and (number or not first_try):
            return None
        with jax.enable_x64(wide):  # configuration of the calling thread
            return number, plan, _row(plan, traced, cluster, donated, compiler)

    named = any(op.kind == REGION for op in traced.graph.ops)
    ways = dict.fromkeys((first.lowering, *lowerings(cluster, named)))
    said = [(0, dataclasses.replace(first, lowering=how)) for how in ways]
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        try:
            tried = [x for x in pool.map(compiled, said) if x is not None]
            best = min(tried, key=_rank)[1].lowering
            others = [
                (number, dataclasses.replace(plan, lowering=best))
                for number, plan in enumerate(plans[1:], 1)
            ]
            tried += [x for x in pool.map(compiled, others) if x is not None]
            tuned = _tuned(min(tried, key=_rank), cluster)
            tried += [x for x in map(compiled, tuned) if x is not None]
        except CompilerAbsentError as error:
            return 0, dataclasses.replace(first, confirmed=Confirmation("", note=_line(error)))
    left = len(said) + len(others) + len(tuned) - len(tried)
    note = f"{left} candidates were not compiled: {seconds:g} s had passed" if left else ""
    return _chosen(tried, first, Confirmation(compiler, note=note))


Tried = tuple[int, Plan, CompiledRow]
"""Index of the plan, the plan with its lowering, the result."""


def _rank(tried: Tried) -> tuple[bool, bool, float]:
    """Sort key: candidates that compile first, then those that fit, then the fastest."""
    row = tried[2]
    return row.step_s == 0.0, bool(row.verdict), row.step_s


def _tuned(best: Tried, cluster: Cluster) -> list[tuple[int, Plan]]:
    """The best candidate with the options of its kind of device, where the user gave none."""
    number, plan, row = best
    options = OPTION_SETS.get(cluster.device.kind)
    if options is None or without_defaults(plan.compiler_options) or row.verdict:
        return []
    both = tuple(sorted((*plan.compiler_options, *options)))
    return [(number, dataclasses.replace(plan, compiler_options=both))]


def _line(error: Exception) -> str:
    """An error as one line of printable text."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(error).split()))


def _chosen(tried: Sequence[Tried], first: Plan, said: Confirmation) -> tuple[int, Plan]:
    """The fastest plan that fits; earlier candidates win within ``ENOUGH``."""
    fitting = [x for x in tried if not x[2].verdict]
    if not fitting:
        rows = tuple(row for _, _, row in tried)
        note = f"not confirmed: {rows[0].verdict}"
        return 0, dataclasses.replace(first, confirmed=Confirmation(said.compiler, rows, note))
    least = min(row.step_s for _, _, row in fitting)
    number, plan, best = next(x for x in fitting if x[2].step_s <= least * (1.0 + ENOUGH))
    rows = tuple(
        row
        if row.verdict
        else dataclasses.replace(row, verdict="chosen" if row is best else "slower")
        for _, _, row in tried
    )
    return number, dataclasses.replace(plan, confirmed=dataclasses.replace(said, rows=rows))


def _row(
    plan: Plan, traced: Traced, cluster: Cluster, donated: int | Sequence[int], compiler: str
) -> CompiledRow:
    """Compile one candidate, or read its result from the cache."""
    plain = dataclasses.replace(plan, confirmed=None)
    flags = [os.environ.get(name, "") for name in _FLAGS]
    cache_path = _kept(
        plain, cluster, f"{_own_version()}, {compiler}, jax {jax.__version__}, {donated}, {flags}"
    )
    known = _read(cache_path)
    if known is not None:
        return known
    how = str(plan.lowering)
    options = without_defaults(plan.compiler_options)
    if options == OPTION_SETS.get(cluster.device.kind):
        how += f", {WHAT[options]}"
    predicted = plan.prediction.step_s
    blank = CompiledRow(str(plan.mesh), how, predicted, 0.0, 0.0, 0.0, 0.0, 0.0, "")
    try:
        compiled = compile_step(traced, plain, cluster, donate_argnums=donated)
    except CompilerAbsentError:
        raise
    except (RequestError, RuntimeError, ValueError, TypeError) as error:
        short = "out of memory" if "RESOURCE_EXHAUSTED" in str(error) else _line(error)
        return dataclasses.replace(blank, verdict=f"not compiled: {short[:200]}")
    compute, wire = seconds_of(compiled, plan, cluster)
    fits = compiled.peak_bytes <= plan.prediction.limit_bytes
    row = dataclasses.replace(
        blank,
        step_s=compute + wire,
        compute_s=compute,
        wire_s=wire,
        sent_bytes=compiled.module.wire_bytes,
        peak_bytes=float(compiled.peak_bytes),
        verdict="" if fits else "does not fit",
    )
    _write(cache_path, row)
    return row


def seconds_of(compiled: Compiled, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Seconds of compute and exposed seconds of collectives.

    TPU: the compiler's cycle estimates, plus HBM time for gathers and scatters (no estimates). For
    collectives, the mean of a lower bound (all bytes over all links of a chip) and an upper bound
    (each collective over the links of its dimensions, one after the other, minus the compute that
    is scheduled beside it). GPU: compilers give no times; compute is the plan's prediction.
    """
    if cluster.device.kind in TPU_CLOCK_HZ:
        moved = compiled.module.unpriced_bytes / cluster.device.memory_bytes_per_s
        compute = tpu_seconds(compiled.module.cycles, cluster) + moved
        links = 2 * sum(length > 1 for length in cluster.shape)
        least = compiled.module.wire_bytes / (max(1, links) * cluster.link.bytes_per_s)
        return compute, (least + link_seconds(compiled.module, cluster, exposed=True)) / 2.0
    inside = cluster.shape[0]
    wire = 0.0
    for c in compiled.module.collectives:
        crosses = any(len(set((np.asarray(g) // inside).tolist())) > 1 for g in c.groups)
        link = (cluster.network or cluster.link) if crosses else cluster.link
        wire += c.count * c.wire_bytes / link.bytes_per_s
    return plan.prediction.compute_s, wire


# ---- cache -----------------------------------------------------------------------------------


def _kept(plan: Plan, cluster: Cluster, compiler: str) -> Path | None:
    folder = os.environ.get(CACHE)
    if folder == "":
        return None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    except RuntimeError:  # no home directory
        return None
    named = Path(folder) if folder else Path(home) / "meshwright"
    key = hashlib.sha256(f"{plan.digest} {cluster} {compiler}".encode()).hexdigest()
    return named / "compiled" / f"{key}.json"


def _own_version() -> str:
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:  # a checkout
        return ""


def _read(path: Path | None) -> CompiledRow | None:
    """A cached result; None if the file is missing or unreadable."""
    if path is None:
        return None
    try:
        return CompiledRow(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path | None, row: CompiledRow) -> None:
    """Write atomically; an unwritable directory is ignored."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(row)))
    except OSError:
        return
