"""Lower bounds on the memory of every plan, whatever it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.annotate import Pin
from planner.choose.candidates import allowed_masks, candidate_meshes
from planner.cost.pricing import Priced, Pricer, price, unfolded
from planner.request.parsed import Request
from planner.search.problem import profile_of
from planner.space.buffer import Buffer, Port, in_pool
from planner.step.analysis import Analysis
from planner.step.classes import Quotient


@dataclass(frozen=True)
class Floor:
    """Bytes per device that every plan takes.

    Attributes:
        peak_bytes: at the moment of the peak.
        start_bytes: when the step begins: its state, its batch and other arguments. They do not
            depend on the form of the step (microbatches, rematerialization, chunks).
    """

    peak_bytes: float
    start_bytes: float


def floor_of(quotient: Quotient, pins: Sequence[Pin], request: Request) -> Floor:
    """The floor of every plan: with one mesh under the pins, with several as if everything were
    split over all devices.

    Raises:
        PinError: a pin does not hold on the single mesh.
    """
    meshes = candidate_meshes(request, pins)
    if len(meshes) > 1:
        return perfect_floor(quotient.whole, request.cluster.num_devices)
    masks = allowed_masks(quotient, pins, request, meshes[0])
    part = price(quotient.part, meshes[0], request.model, request.limit_bytes, masks)
    return mesh_floor(part if quotient.part is quotient.whole else unfolded(quotient, part))


def mesh_floor(priced: Priced) -> Floor:
    """The floor on a mesh: every value takes the least bytes that its strategies allow."""
    pricer = Pricer(priced.analysis, priced.mesh, priced.model)
    held = in_pool(priced.analysis.buffers)
    least = [float(pricer.buffer_bytes(priced.sets[b.group], b).min()) for b in held]
    return _floor(priced.analysis, held, least)


def perfect_floor(analysis: Analysis, devices: int) -> Floor:
    """The floor if every value is split over all devices, and every value that may be in host
    memory is there."""
    pool = in_pool(analysis.buffers)
    held = [b for b in pool if b.when is None and b.port is not Port.GATHERED]
    return _floor(analysis, held, [b.nbytes / devices for b in held])


def _floor(analysis: Analysis, held: Sequence[Buffer], nbytes: Sequence[float]) -> Floor:
    starts, ends = [b.start for b in held], [b.end for b in held]
    _, profile = profile_of(starts, ends, nbytes)
    first, arguments = min(starts, default=0), set(analysis.graph.inputs)
    start = sum(
        x
        for b, x in zip(held, nbytes, strict=True)
        if b.start == first and b.value in arguments and b.port is not Port.GATHERED
    )
    return Floor(float(profile.max()) + analysis.scalar_bytes, start + analysis.scalar_bytes)
