"""jaxpr -> Graph. Calls are flattened; loops and branches become regions.

Our border operations: ``loop_const`` and ``branch_in`` (a value enters a region),
``loop_xs`` (a slice per iteration), ``loop_carry`` (its first operand is its initial value),
``loop_back`` (closes the carry), ``loop_test`` (decides whether a while loop continues),
``loop_ys`` (stacks a slice per iteration), ``loop_out`` (a carry leaves), ``branch_out``
(branches meet). A barrier over several values is one operation for each.
``planner.graph.jaxpr.walk`` defines their order. The executor uses the same order, so an
operation's index names the same place in the program for both.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from planner import compat
from planner.annotate import EDGE, EDGE_MARK
from planner.graph.ir import SCALAR, Graph, Op, Phase, Region, Value
from planner.graph.jaxpr.counts import counted
from planner.graph.jaxpr.places import PlacedWalk
from planner.graph.jaxpr.walk import BARRIER, FUSED, REMAT, Body, Loop
from planner.graph.labels.label import labelled
from planner.graph.labels.phases import named_phase
from planner.graph.labels.ties import ties
from planner.rules.kernels.inside import Sends, held_inside, inside
from planner.rules.kernels.known import is_kernel, work_of
from planner.rules.kernels.pallas.grid import NAME as KERNEL
from planner.rules.kernels.pallas.text import kernel_text, program_text
from planner.rules.kernels.pallas.work import Work
from planner.rules.kernels.regions import REGION, edge_entries, is_region, region_axes
from planner.rules.kernels.registered import registered
from planner.rules.key import EqnKey


def _attrs(eqn: EqnKey) -> str:
    """A short stable digest of an equation's parameters; empty if it has none."""
    params = eqn.params
    if eqn.name == KERNEL or eqn.name == REGION:
        body = kernel_text(params) if eqn.name == KERNEL else program_text(params["jaxpr"])
        rest = {k: str(v) for k, v in params.items() if k not in ("jaxpr", "grid_mapping")}
        text = f"{body} {sorted(rest.items())} {sorted(eqn.unused)}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]
    plain = {k: v for k, v in params.items() if "jaxpr" not in k and not callable(v)}
    text = ",".join(f"{k}={plain[k]}" for k in sorted(plain) if plain[k] is not None)
    if not text or "0x" in text:
        return ""
    return text if len(text) <= 24 else hashlib.sha256(text.encode()).hexdigest()[:8]


_PASSES = {
    "HIGH": 3,
    "HIGHEST": 6,
    "BF16_BF16_F32_X3": 3,
    "BF16_BF16_F32_X6": 6,
    "BF16_BF16_F32_X9": 9,
    "F32_F32_F32": 6,
}
"""Per name in ``jax.lax.Precision`` or ``DotAlgorithmPreset``, the number of bfloat16 products in a
float32 product on a TPU (jax.lax.Precision's documentation)."""


def _passes(precision: Any) -> int:
    """``Op.passes`` of a primitive's ``precision``: None, an enum member or one per operand."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return max((_PASSES.get(getattr(p, "name", ""), 1) for p in precisions), default=1)


@dataclass(eq=False)
class Builder(PlacedWalk[int]):
    """Records what it walks through; ``current`` is the current region."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    eqns: list[EqnKey | None] = field(default_factory=list)
    regions: list[Region] = field(default_factory=lambda: [Region(0, "main", -1, 1, 1.0)])
    attrs_cache: dict[int, tuple[Any, str]] = field(default_factory=dict)
    current: int = 0
    named: list[Phase | None] = field(default_factory=list)
    fused: str = ""
    calls: int = 0
    bodies: list[tuple[int, int]] = field(default_factory=list)
    remat: int = 0
    remats: int = 0

    def value(self, aval: Any, op: int, name: str = "") -> int:
        """Add a value; returns its number."""
        index = len(self.values)
        self.values.append(
            Value(
                index,
                compat.aval_shape(aval),
                compat.dtype_name(aval),
                compat.itemsize(aval),
                op,
                name,
                compat.in_host_memory(aval),
            )
        )
        return index

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        out_avals: Sequence[Any],
        region: int,
        source: str = "",
        eqn: EqnKey | None = None,
        effect: bool = False,
        work: Work = (),
        sends: Sends = (),
        held: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[int, ...]:
        """Add an operation; returns the numbers of its results."""
        index = len(self.ops)
        outs = tuple(self.value(a, index) for a in out_avals)
        attrs = ""
        if eqn is not None and eqn.params:
            cached = self.attrs_cache.get(id(eqn.params))
            if cached is None:
                cached = self.attrs_cache[id(eqn.params)] = (eqn.params, _attrs(eqn))
            attrs = cached[1]
        rule = None if eqn is None else registered(eqn)
        if rule is not None:  # so that a process without the rule refuses the plan
            attrs = f"{attrs} rule {rule.text}".strip()
        passes = 1 if eqn is None else _passes(eqn.params.get("precision"))
        self.ops.append(
            Op(
                index,
                kind,
                tuple(inputs),
                outs,
                region,
                attrs,
                source,
                self.fused,
                effect,
                passes=passes,
                work=work,
                sends=sends,
                held=held,
            )
        )
        self.eqns.append(eqn)
        self.bodies.append((region, self.remat))
        self.named.append(named_phase(self.place.names))
        return outs

    def region(self, kind: str, parent: int, trips: int, weight: float, known: bool = True) -> int:
        """Add a region; returns its number."""
        index = len(self.regions)
        total = self.regions[parent].weight * weight
        self.regions.append(Region(index, kind, parent, trips, total, known))
        return index

    def inside(self, region: int, body: Body, args: Sequence[int]) -> list[int]:
        """Walk through the body of a region."""
        outer, self.current = self.current, region
        results = self.run(body.jaxpr, args)
        self.current = outer
        return results

    def const(self, var: Any, value: Any) -> int:
        """A constant of the jaxpr, as a value."""
        return self.value(var.aval, -1, "const")

    def literal(self, atom: Any) -> int:
        """``SCALAR``, which stands for every literal."""
        return SCALAR

    def operation(self, eqn: Any, ins: list[int]) -> Sequence[int]:
        """Add the operation of an equation; returns its results."""
        avals = tuple([v.aval for v in eqn.outvars])
        name, source, effect = eqn.primitive.name, self.place.line, bool(eqn.effects)
        if name == BARRIER:  # nothing is computed: operands pass separately
            passed: list[int] = []
            for value, aval in zip(ins, avals, strict=True):
                record = EqnKey(eqn.primitive, eqn.params, (aval,), (aval,))
                passed += self.op(name, (value,), (aval,), self.current, source, record, effect)
            return passed
        record = EqnKey(eqn.primitive, eqn.params, tuple([v.aval for v in eqn.invars]), avals)
        if is_region(eqn):
            return self.region_of_shards(eqn, ins, record)
        work = work_of(record) if is_kernel(record) else ()
        return self.op(name, ins, avals, self.current, source, record, effect, work)

    def region_of_shards(self, eqn: Any, ins: list[int], record: EqnKey) -> list[int]:
        """Add a ``shard_map`` between the marks of its operands and results."""
        source, (before, after) = self.place.line, edge_entries(eqn)

        def edge(value: int, aval: Any, entries: tuple[Any, ...]) -> int:
            mark = EqnKey(EDGE_MARK, {"entries": entries}, (aval,), (aval,))
            return self.op(EDGE, (value,), (aval,), self.current, source, mark)[0]

        entered = [
            v if compat.is_literal(atom) else edge(v, atom.aval, entries)
            for v, atom, entries in zip(ins, eqn.invars, before, strict=True)
        ]
        work, sends = inside(eqn.params["jaxpr"], region_axes(eqn))
        body = eqn.params["jaxpr"]
        held = held_inside(body), held_inside(body, masked=True)
        region, avals, effect = self.current, record.out_avals, bool(eqn.effects)
        results = self.op(REGION, entered, avals, region, source, record, effect, work, sends, held)
        return [edge(*each) for each in zip(results, avals, after, strict=True)]

    def call(self, eqn: Any, ins: list[int], body: Body) -> Sequence[int]:
        """Walk through a call; operations inside get its fused kernel and rematerialized body."""
        outer = self.fused
        label = str(eqn.params.get("name", ""))
        if label.startswith(FUSED) and not outer:
            self.calls += 1
            self.fused = f"{label}#{self.calls}"
        around = self.remat
        if eqn.primitive.name in REMAT:
            self.remats += 1
            self.remat = self.remats
        results = super().call(eqn, ins, body)
        self.fused, self.remat = outer, around
        return results

    def loop(self, eqn: Any, ins: list[int], loop: Loop) -> Sequence[int]:
        """Add the region of a loop, with the operations at its borders."""
        region, source = self.current, self.place.line
        known = counted(eqn) if loop.trips is None else loop.trips
        trips = 1 if known is None else known
        inner = self.region(loop.kind, region, trips, trips, known=known is not None)
        args: list[int] = []
        for kind, value, aval in zip(loop.entering, ins, loop.avals, strict=True):
            args += self.op(kind, (value,), (aval,), region, source)
        carries = loop.split(args)[1]
        for body in loop.bodies:
            results = self.inside(inner, body, body.args(args))
            for k, kind in enumerate(body.closing):
                read = carries if kind == "loop_test" else carries[k : k + 1]
                self.op(kind, (results[k], *read), (), inner, source)
        loop_results = [*carries, *results[loop.carries :]]
        outs: list[int] = []
        for kind, value, var in zip(loop.leaving, loop_results, eqn.outvars, strict=True):
            outs += self.op(kind, (value,), (var.aval,), region, source)
        return outs

    def cond(self, eqn: Any, ins: list[int], branches: tuple[Body, ...]) -> Sequence[int]:
        """Add a region per branch, and operations that join their results."""
        region, source = self.current, self.place.line
        results = []
        for body in branches:
            inner = self.region("branch", region, 1, 1.0 / len(branches))
            args: list[int] = []
            for kind, k in zip(body.entering, body.operands, strict=True):
                args += self.op(kind, (ins[k],), (eqn.invars[k].aval,), region, source)
            results.append(self.inside(inner, body, args))
        outs: list[int] = []
        for k, var in enumerate(eqn.outvars):
            outs += self.op("branch_out", [r[k] for r in results], (var.aval,), region, source)
        return outs


def _note_unused(builder: Builder, outputs: Sequence[int]) -> None:
    """Record which results of kernels are unused."""
    kernels = [op for op in builder.ops if op.kind == KERNEL]
    if not kernels:
        return
    read = {v for op in builder.ops for v in op.inputs}.union(outputs)
    for op in kernels:
        unused = frozenset(k for k, v in enumerate(op.outputs) if v not in read)
        eqn = builder.eqns[op.index]
        if eqn is not None and unused:
            record = builder.eqns[op.index] = dataclasses.replace(eqn, unused=unused)
            builder.ops[op.index] = dataclasses.replace(op, attrs=_attrs(record))


def graph_of(
    closed: Any,
    in_paths: list[tuple[Any, ...]],
    out_paths: list[tuple[Any, ...]],
    updated: int,
) -> tuple[Graph, Builder]:
    """The graph of a step's jaxpr, and its builder (equations, bodies and named phases)."""
    builder = Builder()
    inner = compat.body(closed)
    names = [jax.tree_util.keystr(p) for p in in_paths]
    inputs = [builder.value(v.aval, -1, n) for v, n in zip(inner.invars, names, strict=True)]
    outputs = builder.run(closed, inputs)
    _note_unused(builder, outputs)
    tie_pairs = ties(
        in_paths,
        out_paths,
        [v.aval for v in inner.invars],
        [v.aval for v in inner.outvars],
        updated,
    )
    graph = Graph(
        values=tuple(builder.values),
        ops=tuple(builder.ops),
        regions=tuple(builder.regions),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        input_paths=tuple(names),
        output_paths=tuple(jax.tree_util.keystr(p) for p in out_paths),
        ties=tie_pairs,
    )
    return labelled(graph, builder.named), builder
