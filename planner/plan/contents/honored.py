"""Describes how a plan honors every pin: how an argument is stored, and how it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.annotate import Pin
from planner.plan.contents.rows import PinRow
from planner.plan.extract import Extraction
from planner.request.axes.uses import ArgumentReader, Use, Uses
from planner.spec import Sharding

SHOWN = 3


def honored(
    extraction: Extraction, pins: Sequence[Pin], uses: Uses, batch: Sequence[str] = ()
) -> tuple[PinRow, ...]:
    """One row per rule and description of how it is honored, in the order of the pins.

    Args:
        extraction: the plan's choice.
        pins: all pins of the plan.
        uses: where the pinned arguments are read.
        batch: axes over which the mode splits the batch.
    """
    teller = _Teller(extraction, uses, batch)
    read = {id(use.pin): use for use in uses.uses}
    paths = dict(zip(extraction.graph.inputs, extraction.graph.input_paths, strict=True))
    rows: dict[tuple[str, str, str], list[str]] = {}
    for pin in pins:
        use = read.get(id(pin))
        if pin.value not in paths:
            text = "held where it stands"
        elif use is None:
            text = "stored so; optimizer state"
        else:
            text = teller.argument(use)
        where = paths.get(pin.value, pin.origin)
        rows.setdefault((pin.rule or pin.origin, pin.text, text), []).append(where)
    return tuple(PinRow(*key, len(where), where[0]) for key, where in rows.items())


@dataclass(frozen=True)
class _Teller:
    """Describes a plan's choice; the fields are those of ``honored``."""

    extraction: Extraction
    uses: Uses
    batch: Sequence[str]

    def argument(self, use: Use) -> str:
        """How an argument is stored and used."""
        stored = self.extraction.value_sharding(use.pin.value)
        readers: dict[Sharding, list[ArgumentReader]] = {}
        for reader in use.readers:
            used = self.used_as(reader)
            finer = all(set(a) <= set(b) for a, b in zip(stored.dims, used.dims, strict=True))
            readers.setdefault(stored if finer and stored.axes else used, []).append(reader)
        if not readers:
            return f"stored as {stored}; no product reads it"
        if list(readers) == [stored]:
            return f"stored and used as {stored}"
        parts = []
        for used, those in readers.items():
            at = "" if len(readers) == 1 else f" by {self.places(those)}"
            why = self.reason(use, those, used)
            how = "gathered for use" if not used.axes else f"used as {used}"
            parts.append(f"{how}{at}{f': {why}' if why else ''}")
        return f"stored as {stored}, " + "; ".join(parts)

    def used_as(self, reader: ArgumentReader) -> Sharding:
        """The sharding of an argument at one of its readers."""
        digits = self.extraction.digits(reader.group, reader.factors, "use")
        return self.extraction.from_digits(digits, len(reader.factors))

    def places(self, readers: Sequence[ArgumentReader]) -> str:
        """Up to ``SHOWN`` of the operations, with their lines."""
        ops = [self.extraction.graph.ops[r.op] for r in readers]
        texts = list(dict.fromkeys(f"{op.kind} ({op.source or 'no line'})" for op in ops))
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        return ", ".join(texts[:SHOWN]) + more

    def reason(self, use: Use, readers: Sequence[ArgumentReader], used: Sharding) -> str:
        """Why some readers do not use the pinned axes; empty for an argument of the batch."""
        graph, mesh = self.extraction.graph, self.extraction.priced.mesh
        if graph.state and not graph.values[use.pin.value].carried and not use.pin.storage:
            return ""
        missing = [
            (d, axis)
            for d, axes in enumerate(Sharding.of(use.pin.fixed).dims)
            for axis in axes
            if axis not in used.dims[d] and mesh.size(axis) > 1
        ]
        return ", ".join(dict.fromkeys(self.why(use, readers, d, axis) for d, axis in missing))

    def why(self, use: Use, readers: Sequence[ArgumentReader], dim: int, axis: str) -> str:
        """Why some readers do not use one pinned axis."""
        if text := self.uses.storage(use.pin, axis):
            return text
        if axis in self.batch:
            return f"the mode splits the batch over {axis}"
        groups = self.extraction.priced.analysis.groups.groups
        factors = [(r.group, r.factors[dim]) for r in readers]
        if any(f < 0 or not groups[g].shardable[f] for g, f in factors):
            return f"{self.places(readers)} needs dimension {dim} whole"
        return f"other pins leave no room for {axis} there"
