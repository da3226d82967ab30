"""Extracts the contents of a Plan from a priced mesh and the chosen strategies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from costmodels.schedule import Overlap, Place, StageSeconds, step_seconds
from planner.cost.peak import scheduled_peak
from planner.cost.pricing import Priced, Pricer
from planner.cost.rates import Rates, place_of
from planner.cost.reshard import ReshardStep, pattern_of, reshard_steps
from planner.cost.routes import route
from planner.graph.fetches import fetches
from planner.graph.ir import SCALAR, Graph, Role
from planner.plan.contents.rows import Activation, CollectiveRow, DecisionRow, Leaf, Prediction
from planner.plan.plan import LITERAL
from planner.rules.kernels.regions import REGION
from planner.search.pools import pool_peaks
from planner.space.buffer import Memory, in_pool
from planner.space.decisions import DECISIONS
from planner.space.decisions.host_memory import DEVICE, HOST, OFFLOAD
from planner.space.factors import Layout
from planner.space.groups import GroupLink
from planner.spec import Sharding

ACTIVATIONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective that the plan causes, run ``count`` times per train step.

    It runs ``before`` operation ``op``, which reads its result, or after it. ``place`` determines
    how much of it overlaps with compute.
    """

    step: ReshardStep
    count: float
    value: int
    op: int
    cause: str
    before: bool
    place: Place

    @property
    def time_s(self) -> float:
        """Seconds of all its runs."""
        return self.count * self.step.time_s


@dataclass
class Extraction:
    """Derives the shardings of values from one strategy per group."""

    priced: Priced
    choice: Sequence[int]
    graph: Graph = field(init=False)
    rows: dict[str, list[tuple[int, ...]]] = field(init=False)
    """Per port ("store", "use") and group, the factor that each mesh axis splits."""
    known: dict[tuple[Any, ...], tuple[ReshardStep, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.priced.analysis.graph
        picked = list(zip(self.priced.sets, self.choice, strict=True))
        self.rows = {
            "store": [tuple(s.store[row].tolist()) for s, row in picked],
            "use": [tuple(s.use[row].tolist()) for s, row in picked],
        }

    def sharding(self, group: int, layout: Layout, port: str = "store") -> Sharding:
        """Sharding of a value with ``layout`` in ``group`` under the chosen strategy."""
        return self.from_digits(self.digits(group, layout, port), len(layout))

    def from_digits(self, digits: Sequence[int], rank: int) -> Sharding:
        """Sharding that has the given digit per mesh axis (partial counts as replicated)."""
        names = self.priced.mesh.names
        return Sharding(
            tuple(
                tuple(n for n, d in zip(names, digits, strict=True) if d == dim + 1)
                for dim in range(rank)
            )
        )

    def value_sharding(self, value: int, port: str = "store") -> Sharding:
        """Sharding of a value where it is made."""
        home = self.priced.analysis.groups.home[value]
        if home is None:
            return Sharding(((),) * len(self.graph.values[value].shape))
        return self.sharding(*home, port=port)

    def leaves(self) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
        """Inputs and outputs; an output tied to an input has the input's sharding."""
        graph, mesh = self.graph, self.priced.mesh
        source = {o: i for i, o in graph.ties}
        used = {x.value for x in self.priced.analysis.groups.links if x.a_use}
        away = fetches(graph, graph.live_ops(), self.on_host())
        inputs = []
        for index, path in zip(graph.inputs, graph.input_paths, strict=True):
            v = graph.values[index]
            spec = self.value_sharding(index)
            use = self.value_sharding(index, "use") if index in used else spec
            inputs.append(
                Leaf(
                    path,
                    v.shape,
                    v.dtype,
                    spec,
                    v.nbytes // spec.shards(mesh),
                    None if use == spec else use,
                    v.carried,
                    v.role is Role.FROZEN,
                    v.role is Role.EXAMPLES,
                    HOST if index in away else DEVICE,
                    tuple(away.get(index, ())),
                )
            )
        outputs = []
        for k, (index, path) in enumerate(zip(graph.outputs, graph.output_paths, strict=True)):
            if index == SCALAR:
                outputs.append(Leaf(path, (), LITERAL, Sharding(()), 0, None, False))
                continue
            v = graph.values[index]
            tied_input = inputs[source[k]] if k in source else None
            spec = self.value_sharding(index) if tied_input is None else tied_input.spec
            memory = DEVICE if tied_input is None else tied_input.memory
            local = v.nbytes // spec.shards(mesh)
            outputs.append(
                Leaf(path, v.shape, v.dtype, spec, local, None, k in source, memory=memory)
            )
        return tuple(inputs), tuple(outputs)

    def on_host(self) -> list[int]:
        """The inputs that are stored in host memory."""
        priced, home = self.priced, self.priced.analysis.groups.home
        return [
            v
            for v in self.graph.inputs
            if v in priced.analysis.scheduled.chosen.get(OFFLOAD, ())
            and (place := home[v]) is not None
            and priced.sets[place[0]].option(OFFLOAD)[self.choice[place[0]]]
        ]

    def decisions(self) -> tuple[DecisionRow, ...]:
        """Decisions about results of operations besides their shardings."""
        priced, graph, home = self.priced, self.graph, self.priced.analysis.groups.home
        out = []
        for name, values in priced.analysis.scheduled.chosen.items():
            for v in sorted(values):
                place, op = home[v], graph.values[v].op
                if place is None or op < 0:
                    continue
                option = int(priced.sets[place[0]].option(name)[self.choice[place[0]]])
                words = DECISIONS[name].entry(graph, v, option)
                if words is not None:
                    position = graph.ops[op].outputs.index(v)
                    out.append(DecisionRow(name, words, op, position, str(graph.values[v])))
        return tuple(out)

    def digits(
        self, group: int, layout: Layout, port: str, partial: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """Digit per mesh axis (see ``reshard``) of a value with ``layout`` in ``group``."""
        rank = len(layout)
        return tuple(
            [
                rank + 1 if f in partial else layout.index(f) + 1 if f >= 0 and f in layout else 0
                for f in self.rows[port][group]
            ]
        )

    def link_digits(self, link: GroupLink) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Digits of the value at both ends of a link."""
        groups = self.priced.analysis.groups.groups
        partial = groups[link.a].reduction if link.partial else frozenset()
        source = "use" if link.a_use or groups[link.a].kind != "input" else "store"
        return (
            self.digits(link.a, link.src, source, partial),
            self.digits(link.b, link.dst, "store"),
        )

    def steps(
        self,
        src: tuple[int, ...],
        dst: tuple[int, ...],
        rank: int,
        nbytes: float,
        combined: bool = False,
    ) -> tuple[ReshardStep, ...]:
        """``reshard_steps`` on the plan's mesh, cached."""
        key = (src, dst, rank, nbytes, combined)
        known = self.known.get(key)
        if known is None:
            sizes, model = self.priced.mesh.sizes, self.priced.model
            known = self.known[key] = reshard_steps(src, dst, rank, nbytes, sizes, model, combined)
        return known

    def _shift(self, axes: tuple[int, ...], nbytes: float) -> ReshardStep:
        """A collective permute of rows to the neighbors along some axes."""
        model = self.priced.model
        alpha, beta = model.collective_coefficients("permute", self.priced.mesh.sizes, axes)
        return ReshardStep("permute", axes, nbytes, alpha + beta * nbytes)

    def link_steps(self, link: GroupLink) -> tuple[ReshardStep, ...]:
        """The collectives of a link."""
        src, dst = self.link_digits(link)
        if src == dst:
            return ()
        return self.steps(src, dst, len(link.src), link.nbytes, link.gradient)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Per link, how often its value is sent in a step. If several addends of a sum are reduced
        in the same way, only the last one is sent."""
        out, seen = [], set()
        for link in reversed(self.priced.analysis.groups.links):
            alike = (link.sum, *self.link_digits(link))
            way = route(pattern_of(*alike[1:], len(link.src)))
            more = way.permutes or any(way.moves) or way.gathered
            reduced = link.sum >= 0 and way.reduced and not more
            out.append(0.0 if reduced and alike in seen else link.weight)
            seen.add(alike)
        return tuple(reversed(out))

    def sent(self) -> list[Sent]:
        """Every collective that the plan causes, in the order of links, reductions and inputs."""
        priced, graph = self.priced, self.graph
        groups = priced.analysis.groups
        out = []
        for link, weight in zip(groups.links, self.weights, strict=True):
            cause = "update" if link.operand == -1 else graph.ops[link.op].kind
            for s in self.link_steps(link) if weight else ():
                before = link.operand >= 0
                out.append(Sent(s, weight, link.value, link.op, cause, before, place_of(link)))
        for group in groups.groups:
            row = self.rows["use"][group.index]
            for r in priced.analysis.facts[group.index].reductions:
                src = tuple([2 if f in r.over else 0 for f in row])
                if any(src):
                    local = r.nbytes / math.prod(
                        priced.mesh.sizes[k] for k, f in enumerate(row) if f in r.kept
                    )
                    op = graph.ops[r.op]
                    if r.shifts:
                        s = self._shift(tuple(k for k, x in enumerate(src) if x), local)
                        out.append(
                            Sent(s, r.weight, op.outputs[0], r.op, op.kind, False, Place.WAITED)
                        )
                        continue
                    for s in self.steps(src, (0,) * len(row), 1, local, r.gradient):
                        place = Place.BEHIND if r.gradient else Place.WAITED
                        out.append(Sent(s, r.weight, op.outputs[0], r.op, op.kind, False, place))
            for collective in priced.analysis.facts[group.index].said:
                one = dataclasses.replace(collective, weight=1.0)
                seconds = float(Rates.of([priced.mesh.sizes], priced.model).said_s(one)[0])
                s = ReshardStep(collective.kind, collective.axes, collective.nbytes, seconds)
                outputs = graph.ops[collective.op].outputs
                out.append(
                    Sent(
                        s, collective.weight, outputs[0], collective.op, REGION, False, Place.WAITED
                    )
                )
        used = {x.value: x.op for x in reversed(groups.links) if x.a_use}
        for value, op_index in used.items():
            home, layout = groups.home[value]  # type: ignore[misc]
            ends = [self.digits(home, layout, port) for port in ("store", "use")]
            cause = f"use of {graph.values[value].name}"
            nbytes = priced.analysis.facts[home].stored[0]  # type: ignore[index]
            for s in self.steps(ends[0], ends[1], len(layout), nbytes, combined=True):
                out.append(Sent(s, 1.0, value, op_index, cause, True, Place.AHEAD))
        return out

    def collectives(self) -> tuple[CollectiveRow, ...]:
        """Every collective that the plan causes, most expensive first."""
        graph, names = self.graph, self.priced.mesh.names
        rows = [
            CollectiveRow(
                x.step.kind,
                tuple(names[k] for k in x.step.axes),
                x.count,
                x.step.payload_bytes,
                x.step.time_s,
                str(graph.values[x.value]),
                graph.ops[x.op].source if x.op >= 0 else "",
                x.cause,
            )
            for x in self.sent()
        ]
        return tuple(sorted(rows, key=lambda r: (-r.time_s * r.count, r.kind, r.value, r.source)))

    def activations(self) -> tuple[Activation, ...]:
        """The largest values between operations, one of each shape and sharding."""
        graph, mesh = self.graph, self.priced.mesh
        seen: dict[tuple[object, ...], Activation] = {}
        held = {b.value for b in in_pool(self.priced.analysis.buffers)}
        order = sorted(held, key=lambda v: (-graph.values[v].nbytes, v))
        for value in order:
            v = graph.values[value]
            if v.op < 0:
                continue
            op, spec = graph.ops[v.op], self.value_sharding(value)
            key = (v.shape, v.dtype, spec, op.source)
            if key not in seen:
                seen[key] = Activation(
                    op.kind, v.shape, v.dtype, spec, v.nbytes // spec.shards(mesh), op.source
                )
            if len(seen) >= ACTIVATIONS_SHOWN:
                break
        return tuple(seen.values())

    def host_bytes(self) -> float:
        """Most bytes per device in host memory: arrays of the state, and, if the size of host
        memory is known, values that wait there for the backward pass."""
        state = sum(x.nbytes_per_device for x in self.leaves()[0] if x.memory != DEVICE)
        peaks = pool_peaks(self.priced.problem, self.choice)
        return max(float(state), peaks.get(Memory.HOST.value, 0.0))

    def prediction(self, limit_bytes: float) -> Prediction:
        """Predicted step time and peak memory of the chosen strategies; compute includes the start
        of the step."""
        priced = self.priced
        pricer = Pricer(priced.analysis, priced.mesh, priced.model)
        compute = host = feed = 0.0
        waits = [0.0] * len(Place)
        for group, chosen, row in zip(
            priced.analysis.groups.groups, priced.sets, self.choice, strict=True
        ):
            kernels, *sent = pricer.parts_of(group, chosen, row)
            compute += kernels
            waits = [a + b for a, b in zip(waits, sent, strict=True)]
            decided = pricer.decided_s(group, chosen, row)
            host += decided.pop(OFFLOAD, 0.0)
            compute += sum(decided.values())
            feed += pricer.feed_of(group, chosen, row)
        for link, weight in zip(priced.analysis.groups.links, self.weights, strict=True):
            waits[place_of(link)] += weight * sum(s.time_s for s in self.link_steps(link))
        model = priced.model
        spent = StageSeconds(compute, waits[0], waits[1], waits[2], host)
        step = step_seconds((spent,), overlap=Overlap.of(model), fixed_s=model.step_latency_s)
        scalars = priced.analysis.scalar_bytes
        room = min(limit_bytes, model.cluster.device.memory_bytes) - scalars
        peak, holders = scheduled_peak(self, room)
        return Prediction(
            step.fixed_s + step.compute_s,
            step.communication_s,
            step.hidden_s,
            step.step_s,
            peak + scalars,
            limit_bytes,
            holders,
            step.wait_s,
            self.host_bytes(),
            feed,
        )
