"""Why no plan fits in memory, and what would help, as text. No jax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.report.units import bytes_text, time_text
from planner.space.replicated import Whole

WHOLE_SHOWN = 6
"""Most operations without a rule to name."""
WHOLE_HELP = (
    "write them in plain JAX, which can be split, register a rule for a kernel "
    "(planner.register_rule), or declare one (jax.experimental.custom_partitioning, sharding_rule=)"
)


@dataclass(frozen=True)
class Holder:
    """Equal values that hold memory at the peak.

    Attributes:
        kind: ``parameter``, ``optimizer state``, ``input``, ``gathered copy`` or ``activation``.
        name: path of the argument, or operation, array and line.
        count: how many there are.
        nbytes: bytes per device of all of them.
    """

    kind: str
    name: str
    count: int
    nbytes: float


@dataclass(frozen=True)
class Relief:
    """A change that may reduce memory.

    Attributes:
        what: the change.
        peak_bytes: peak per device with the change.
        step_s: predicted step time with the change; infinite if unknown.
        fits: whether that peak is within the limit.
        note: how the numbers were computed, if they are less than those of a plan.
        tried: whether the change was tried; if not, there are no numbers.
    """

    what: str
    peak_bytes: float
    step_s: float
    fits: bool
    note: str = ""
    tried: bool = True


@dataclass(frozen=True)
class Shortage:
    """No plan fits.

    Attributes:
        cluster: text of the cluster.
        limit_bytes: memory per device that a plan may use.
        least_bytes: the lowest peak of all plans tried.
        lower_bytes: lower bound of the peak on the meshes that were tried; 0 if unknown.
        mesh: the mesh with the lowest peak.
        moment: the operation and line at which that peak is reached.
        holders: what holds the memory at that peak, largest first.
        reliefs: changes that may reduce memory.
        whole: operations without a sharding rule; every device holds all their operands and
            results.
        recipe: how the step was rewritten for the lowest peak; empty if it was not.
    """

    cluster: str
    limit_bytes: float
    least_bytes: float
    lower_bytes: float
    mesh: str
    moment: str
    holders: tuple[Holder, ...]
    reliefs: tuple[Relief, ...]
    whole: tuple[Whole, ...] = ()
    recipe: str = ""


def host_text(cluster: str, needs_bytes: float, has_bytes: float) -> str:
    """The message if the offloaded arrays do not fit in the memory of the hosts."""
    return (
        f"no plan fits in the memory of the hosts of {cluster}: the offloaded arrays take at least "
        f"{bytes_text(needs_bytes)} for each device, a plan may use {bytes_text(has_bytes)}; "
        "offload less, use more hosts, or say what they have with host_memory= (--host-memory)"
    )


def shortage_text(shortage: Shortage) -> str:
    """One line about the missing memory, then what holds the memory and what would help."""
    s = shortage
    under = f" with {s.recipe}" if s.recipe else ""
    over = bytes_text(s.least_bytes - s.limit_bytes)
    lines = [
        f"no plan fits in {bytes_text(s.limit_bytes)} per device on {s.cluster}: the lowest peak "
        f"tried is {bytes_text(s.least_bytes)}{under}, {over} too many; {_bound_text(s)}",
        f"  that peak is on mesh {s.mesh}, at {s.moment}, and held by",
    ]
    lines[1:1] = _whole_lines(s.whole)
    width = max((len(bytes_text(h.nbytes)) for h in s.holders), default=0)
    kinds = max((len(h.kind) for h in s.holders), default=0)
    for holder in s.holders:
        times = f" x{holder.count}" if holder.count > 1 else ""
        size = bytes_text(holder.nbytes)
        lines.append(f"    {size:>{width}}  {holder.kind:<{kinds}}  {holder.name}{times}")
    if s.reliefs:
        lines.append("  what would help")
        lines += [f"    {_relief_text(relief)}" for relief in s.reliefs]
    return "\n".join(lines)


def _whole_lines(whole: Sequence[Whole]) -> list[str]:
    """Operations without a rule, and the bytes of their whole arrays."""
    if not whole:
        return []
    lines = ["  every device holds all operands and results of operations without a sharding rule"]
    for w in whole[:WHOLE_SHOWN]:
        times = f" x{w.count}, each" if w.count > 1 else ""
        lines.append(f"    {w.name}{times}: {bytes_text(w.nbytes)}")
    if len(whole) > WHOLE_SHOWN:
        lines.append(f"    and {len(whole) - WHOLE_SHOWN} more")
    return [*lines, "    " + WHOLE_HELP]


def _bound_text(shortage: Shortage) -> str:
    """What the lower bound proves."""
    if shortage.lower_bytes <= 0:
        return "no lower bound is known"
    if shortage.least_bytes <= shortage.lower_bytes * (1 + 1e-9):
        return "no plan on the meshes searched needs less"
    under = " under this recipe" if shortage.recipe else ""
    lower = f"at least {bytes_text(shortage.lower_bytes)}{under} on the meshes searched"
    if shortage.lower_bytes > shortage.limit_bytes:
        return f"every plan needs {lower}"
    return f"every plan needs {lower}; a plan that fits may exist"


def _relief_text(relief: Relief) -> str:
    """One line: the change, whether it suffices, and its cost."""
    if not relief.tried:
        return f"{relief.what}: not tried ({relief.note})"
    verdict = "fits" if relief.fits else "does not suffice"
    known = relief.fits and math.isfinite(relief.step_s)
    step = f", step {time_text(relief.step_s)} predicted" if known else ""
    note = f" ({relief.note})" if relief.note else ""
    return f"{relief.what}: {verdict}, peak {bytes_text(relief.peak_bytes)}{step}{note}"
