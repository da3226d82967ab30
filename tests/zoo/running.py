"""Plans a program of the zoo, runs it on 8 virtual CPU devices and compares the numbers.

Programs this small run fastest on one device, and an honest price says so. To make every
program run sharded all the same, the zoo plans for ``cpu:8`` with links that are almost free: then
a split always pays, wherever the rules allow one. Both the sharded and the unsharded step are
compiled with few optimizations, which halves the time; partitioning is not among those left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from costmodels import Cluster, Link, parse_cluster
from executor import compile_plan
from planner import make_plan
from planner.plan.compiled.lowering import PLAIN_TURNED, STEP_BY_STEP, Lowering
from planner.plan.plan import Plan
from tests.zoo.program import PROGRAMS, Program

MODULES = (
    "attention control_flow convolutions decoders dense numerics optimizers rare recurrent regions "
    "state"
).split()
SEARCHES = ("dynamic_programming", "recursive_programming")
LOWERINGS = (
    PLAIN_TURNED,
    STEP_BY_STEP,
    Lowering((1, 2, 2, 2), staged=True, scattered=True),
    Lowering((1, 2, 4), staged=True, joined=True, scattered=True),
)
"""Of the CPU, of GPUs, of a torus by dimension and by axis. Each program has one of them, and with
the other search the next: what runs on CPUs alone is not what GPUs and TPUs run."""


def load() -> dict[str, Program]:
    """All programs, by name."""
    for module in MODULES:
        importlib.import_module(f"tests.zoo.{module}")
    return PROGRAMS


def cluster() -> Cluster:
    """``cpu:8`` with links of 1e15 bytes/s and 1e-12 s, a millionth of real ones."""
    return dataclasses.replace(parse_cluster("cpu:8"), link=Link(1e15, 1e-12))


@dataclass(frozen=True)
class Outcome:
    """What became of a program under one search.

    Attributes:
        program: its name.
        search: the search.
        ops: operations of the traced step, 0 if there is no plan.
        fallbacks: operations that the planner can't look into.
        split: arguments that are split, and all that are arrays.
        inside: values within the step that are held split.
        gap: the search's.
        planning_s: seconds of planning.
        error: largest relative difference from the unsharded numbers; NaN if it did not run.
        fault: empty when planned, run and equal.
    """

    program: str
    search: str
    ops: int = 0
    fallbacks: tuple[str, ...] = ()
    split: tuple[int, int] = (0, 0)
    inside: int = 0
    gap: float = math.nan
    planning_s: float = math.nan
    error: float = math.nan
    fault: str = ""


def is_split(plan: Plan) -> bool:
    """Whether a plan splits an argument or a value inside."""
    values = (*plan.inputs, *plan.constraints)
    return any(value.spec.shards(plan.mesh) > 1 for value in values)


def difference(got: Any, expected: Any) -> float:
    """Largest difference relative to the largest value of its leaf, or to 1; infinite where
    integers, booleans, random keys, shapes or dtypes differ at all."""
    if jax.tree.structure(got) != jax.tree.structure(expected):
        return math.inf
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max((_leaf_difference(a, b) for a, b in pairs), default=0.0)


def _leaf_difference(got: Any, expected: Any) -> float:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, expected = jax.random.key_data(got), jax.random.key_data(expected)
    a, b = np.asarray(got), np.asarray(expected)
    if not jax.numpy.issubdtype(a.dtype, np.inexact):
        return 0.0 if np.array_equal(a, b) else math.inf
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
    apart = np.where(same, 0.0, np.abs(a - b))
    worst = float(np.max(apart, initial=0.0)) / scale
    return math.inf if math.isnan(worst) else worst


def planned(program: Program, search: str) -> tuple[Plan, Any, tuple[Any, ...]]:
    """The plan of a program, its step and arguments."""
    step, args = program.build()
    plan = make_plan(
        step, *args, cluster=cluster(), mode="AUTO_PARALLEL", search=search, time_limit_s=5.0
    )
    return plan, step, args


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """XLA compiles with few optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@compiled_quickly()
def outcome(program: Program, search: str) -> Outcome:
    """Plan, run and compare; any failure becomes the fault of the outcome."""
    found = Outcome(program.name, search)
    try:
        plan, step, args = planned(program, search)
        found = dataclasses.replace(
            found,
            ops=len(plan.op_index),
            fallbacks=plan.fallbacks,
            split=(
                sum(leaf.spec.shards(plan.mesh) > 1 for leaf in plan.inputs),
                sum(bool(leaf.shape) for leaf in plan.inputs),
            ),
            inside=sum(c.spec.shards(plan.mesh) > 1 for c in plan.constraints),
            gap=plan.search.gap,
            planning_s=plan.planning_s,
        )
        expected = jax.jit(step)(*args)
        turn = sorted(PROGRAMS).index(program.name) if program.name in PROGRAMS else 0
        how = LOWERINGS[(turn + SEARCHES.index(search)) % len(LOWERINGS)]
        run = compile_plan(step, dataclasses.replace(plan, lowering=how))
        error = difference(run(*args), expected)
        found = dataclasses.replace(found, error=error)
        if not is_split(plan) and not program.whole:
            return dataclasses.replace(found, fault="nothing is split")
        if error > program.tolerance:
            fault = f"differs by {error:.1e}, allowed {program.tolerance:.0e}"
            return dataclasses.replace(found, fault=fault)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.name})"
        return dataclasses.replace(found, fault=text)
    return found
