"""(plan, traced step, mesh) -> the sharding constraints and collectives that the executor emits.

`planner.plan.compiled.lowering.Lowering` lists the options. They do not change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from executor.run.interpret import ConstrainedStep, Decided, Kept
from executor.run.local.fronts import LANES, in_front
from executor.run.local.kernels import OnShards, kernels_on_shards
from executor.run.local.products import LOCAL, SUM, TABLE, Scatter, scattered
from executor.run.local.specs import Spec, partition_spec, spec_of
from executor.run.local.turned import Turned, multiplied, permuted, turned_products
from planner import compat
from planner.cost.reshard import collectives_of
from planner.cost.routes import route
from planner.graph.ir import Role
from planner.graph.trace import Traced
from planner.plan.behind import RESULTS, read_by_transposes
from planner.plan.contents.rows import Constraint
from planner.plan.plan import Plan
from planner.rules.kernels.regions import region_axes

Place = tuple[int, str, int]
"""Operation, slot, position."""


@dataclass(frozen=True)
class LoweredPlan:
    """The constraints and collectives of a plan on a jax mesh.

    Attributes:
        mesh: the jax mesh.
        shardings: sharding constraints by place.
        staged: whether resharding is split into one constraint per mesh axis.
        joined: jax mesh axes that change together.
        scatters: products followed by explicit reduce-scatters, by operation.
        plain_layout: operations whose results are held to the default layout.
        apart: operations that are not compiled together with those that read their results.
        kernels: user kernels that run on shards, by operation.
        turned: products that are computed without the transpose beside them, by operation.
    """

    mesh: Mesh | AbstractMesh
    shardings: Mapping[Place, NamedSharding]
    staged: bool = False
    joined: tuple[tuple[str, ...], ...] = ()
    scatters: Mapping[int, Scatter] = field(default_factory=dict)
    plain_layout: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()
    kernels: Mapping[int, OnShards] = field(default_factory=dict)
    turned: Mapping[int, Turned] = field(default_factory=dict)

    @property
    def transposes(self) -> frozenset[int]:
        """Transposes that are evaluated together with a product that is scattered."""
        return frozenset(s.transpose for s in self.scatters.values())


def lower_plan(
    plan: Plan,
    traced: Traced,
    mesh: Mesh | AbstractMesh,
    axes: Mapping[str, tuple[tuple[str, int], ...]],
) -> LoweredPlan:
    """Lower ``plan`` under ``plan.lowering``.

    Args:
        plan: the plan.
        traced: the step.
        mesh: the jax mesh.
        axes: per axis of the plan's mesh, its jax mesh axes (``executor.run.mesh.mesh_axes``).
    """
    how = plan.lowering
    known = {(c.op, c.slot, c.position): c for c in plan.constraints}
    speller = _Speller({name: tuple(x for x, _ in parts) for name, parts in axes.items()})
    tables = not how.dimensions
    scatters = _scatters(traced, known, speller, tables, dict(mesh.shape)) if how.scattered else {}
    done = {*scatters, *(s.transpose for s in scatters.values())}
    apart = frozenset(plan.apart)
    fixed = {*done, *apart, *(row.op for row in plan.decisions)}
    turned = turned_products(traced, known, fixed) if how.turned else {}
    specs = {
        place: speller.spec(c, _rank(traced, place))
        for place, c in known.items()
        if not (place[0] in done and place[1] in RESULTS)
    }
    shardings = {
        place: NamedSharding(mesh, partition_spec(spec))
        for place, spec in permuted(specs, turned).items()
    }
    joined = [tuple(x for x, _ in parts) for parts in axes.values()] if how.joined else []
    plain_layout = table_gradients(traced, plan) if how.dimensions else frozenset()
    kernels = kernels_on_shards(traced, known, speller.spec)
    return LoweredPlan(
        mesh, shardings, how.staged, tuple(joined), scatters, plain_layout, apart, kernels, turned
    )


def _rank(traced: Traced, place: Place) -> int:
    """The number of dimensions of an operand or a result."""
    op, (_, slot, position) = traced.graph.ops[place[0]], place
    values = op.outputs if slot in RESULTS else op.inputs
    return len(traced.graph.values[values[position]].shape)


@dataclass(frozen=True)
class _Speller:
    """Translates a plan's shardings to the axes of the jax mesh."""

    names: Mapping[str, tuple[str, ...]]

    def spec(self, c: Constraint, rank: int = 0) -> Spec:
        """The sharding of a constraint, for at least ``rank`` dimensions."""
        dims = tuple(tuple(x for name in dim for x in self.names[name]) for dim in c.spec.dims)
        return dims + ((),) * (rank - len(dims))


def _scatters(
    traced: Traced,
    known: Mapping[Place, Constraint],
    speller: _Speller,
    tables: bool,
    sizes: Mapping[str, int],
) -> dict[int, Scatter]:
    """Products whose partial sums the plan reduce-scatters; ``tables``: also gradients of tables.
    XLA:GPU reduces these as a whole if shards are along two mesh axes; XLA:TPU has special layouts
    for them (``table_gradients``)."""
    scatters = {}
    transposes = read_by_transposes(traced.graph)
    for op in traced.graph.ops:
        eqn = traced.eqns[op.index]
        begin = int(op.kind == TABLE)
        end = begin + 2 - int(op.kind == SUM)
        given = [known.get((op.index, "in", k)) for k in range(begin, end)]
        if op.kind not in LOCAL or eqn is None:
            continue
        if begin and not tables:
            continue
        rank = len(eqn.out_avals[0].shape)
        transpose, order = -1, tuple(range(rank))
        if not any((op.index, slot, 0) in known for slot in RESULTS):
            transpose = transposes.get(op.index, -1)
            if transpose >= 0 and traced.bodies[transpose] != traced.bodies[op.index]:
                continue
            turning = traced.eqns[transpose] if transpose >= 0 else None
            order = order if turning is None else tuple(turning.params["permutation"])
        at = op.index if transpose < 0 else transpose
        want, whole = known.get((at, "out", 0)), known.get((at, "made", 0))
        moved = (at, "after", 0) in known or (transpose >= 0 and (at, "in", 0) in known)
        if want is None or whole is None or moved:
            continue
        ins = [
            speller.spec(c, len(aval.shape))
            for c, aval in zip(given, eqn.in_avals[begin:end], strict=True)
            if c is not None
        ]
        if len(ins) < len(given):
            continue
        out, whole_spec = speller.spec(want, rank), speller.spec(whole, rank)
        local, sums = LOCAL[op.kind](eqn.params, *ins)
        scatter_spec = tuple(tuple(x for x in e if x in sums) for e in out)
        # the axes of the operands split the result, and partial sums are scattered inside that
        inside = all(e == m + s for e, m, s in zip(out, whole_spec, scatter_spec, strict=True))
        if (
            local is None
            or tuple(local[d] for d in order) != whole_spec
            or not any(scatter_spec)
            or not inside
        ):
            continue
        whole_sums = sums.difference(*scatter_spec)
        summed = tuple(x for entry in ins[0] for x in entry if x in whole_sums)
        rest: tuple[Spec, ...] = ((),) * (len(eqn.in_avals) - end)
        front: frozenset[str] = frozenset()
        if not tables:
            aval = eqn.out_avals[0]
            shape = [aval.shape[d] for d in order]
            front = in_front(shape, out, scatter_spec, aval.dtype.itemsize, sizes)
        scatters[op.index] = Scatter(
            transpose, order, (*ins, *rest), out, scatter_spec, summed, front
        )
    return scatters


def table_gradients(traced: Traced, plan: Plan) -> frozenset[int]:
    """Scatters that compute a table's gradient. XLA:TPU gives it the layout of the updates, and so
    the table and its moments: each is copied before and after the update. Tables whose rows do not
    fill tiles keep the compiler's layout; the default would pad them. So do tables of several
    replicas: XLA gathers a split array before it sets its layout."""
    graph, out = traced.graph, set()
    for c in plan.constraints:
        op = graph.ops[c.op]
        if c.slot == "out" and op.kind.startswith("scatter"):
            output, dims = graph.values[op.outputs[c.position]], c.spec.dims
            split = dims[len(output.shape) - 1] if len(dims) == len(output.shape) else ()
            row = output.shape[-1] // math.prod(map(plan.mesh.size, split))
            eqn = traced.eqns[op.index]
            batched = eqn and eqn.params["dimension_numbers"].operand_batching_dims
            if not batched and output.role is Role.GRADIENT and row % LANES == 0:
                out.add(op.index)
    return frozenset(out)


def stages(
    before: NamedSharding,
    after: NamedSharding,
    shape: Sequence[int],
    joined: Sequence[tuple[str, ...]] = (),
) -> list[Any]:
    """Intermediate shardings of a resharding, ending with ``after``; each step moves one mesh axis.

    Slices come first (they are free), then all-to-alls, then all-gathers. Where no such step exists
    (for example, shards must be permuted), the last step does the rest at once. A change that only
    permutes shards is one step.

    Args:
        before, after: shardings on one mesh.
        shape: shape of the array.
        joined: axes that move together, unless a sharding separates them.

    Source: the order of Shardy's pass sdy-reshard-to-collectives.
    """
    groups = {parts[0]: parts for parts in joined if len(parts) > 1}
    sizes = dict(before.mesh.shape)
    raw = [spec_of(s, len(shape)) for s in (before, after)]
    if groups and all(_joins(spec, groups) for spec in raw):
        raw = [_join(spec, groups) for spec in raw]
        for first, parts in groups.items():
            sizes[first] = math.prod(before.mesh.shape[x] for x in parts)
    else:
        groups = {}
    here, goal = raw
    if _permuted(here, goal, sizes):
        return [after]
    way = []
    while here != goal:
        step = _step(here, goal)
        if step is None:
            break
        here = step
        if all(n % math.prod(sizes[x] for x in e) == 0 for n, e in zip(shape, here, strict=True)):
            whole = tuple(tuple(y for x in e for y in groups.get(x, (x,))) for e in here)
            way.append(NamedSharding(before.mesh, partition_spec(whole)))
    return [*way[:-1], after] if way and here == goal else [*way, after]


def _joins(spec: Spec, groups: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the axes of each group are together and in order in one dimension, or unused."""
    for first, parts in groups.items():
        present = [e for e in spec if set(parts) & set(e)]
        if not present:
            continue
        if len(present) > 1 or first not in present[0]:
            return False
        at = present[0].index(first)
        if present[0][at : at + len(parts)] != parts:
            return False
    return True


def _join(spec: Spec, groups: Mapping[str, tuple[str, ...]]) -> Spec:
    """A sharding with each group replaced by its first axis."""
    inner = {x for parts in groups.values() for x in parts[1:]}
    return tuple(tuple(x for x in e if x not in inner) for e in spec)


def _permuted(here: Spec, goal: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether a change consists of slices and one permutation of shards only."""
    axes = tuple(sizes)
    order = {x: k for k, x in enumerate(axes)}
    if any(list(e) != sorted(e, key=order.__getitem__) for e in (*here, *goal)):
        return False
    pairs = []
    for x in axes:
        places = [[d + 1 for d, e in enumerate(spec) if x in e] for spec in (here, goal)]
        pairs.append((sum(places[0]), sum(places[1])))
    kinds = [kind for kind, _, _ in collectives_of(route(tuple(pairs)), tuple(sizes.values()))]
    return kinds == ["permute"]


def _step(here: Spec, goal: Spec) -> Spec | None:
    """The next step from ``here`` to ``goal``; None if there is none."""
    used = {x: d for d, entry in enumerate(here) for x in entry}
    for d, (have, want) in enumerate(zip(here, goal, strict=True)):
        if len(have) < len(want) and want[: len(have)] == have and want[len(have)] not in used:
            return _with(here, {d: (*have, want[len(have)])})
    for d, (have, want) in enumerate(zip(here, goal, strict=True)):
        source = used.get(want[len(have)], d) if want[: len(have)] == have != want else d
        if source != d and here[source][-1] == want[len(have)]:
            return _with(here, {source: here[source][:-1], d: (*have, want[len(have)])})
    held = {x for entry in goal for x in entry}
    for d, have in enumerate(here):
        if have and have[-1] not in held:
            return _with(here, {d: have[:-1]})
    return None


def _with(spec: Spec, entries: Mapping[int, tuple[str, ...]]) -> Spec:
    return tuple(entries.get(d, e) for d, e in enumerate(spec))


class LoweredStep(ConstrainedStep):
    """Evaluates a step under a `LoweredPlan`; create a new instance for each evaluation."""

    def __init__(
        self,
        kinds: Sequence[str],
        lowered: LoweredPlan,
        decided: Decided | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        super().__init__(kinds, lowered.shardings, decided, sources)
        self.lowered = lowered
        self.computed = lowered.transposes
        self.done = {t.transpose for t in lowered.turned.values()}
        self.turns: dict[int, tuple[Any, Any]] = {}  # results and operands of transposes

    def known_as(self, args: Sequence[Any], shardings: Sequence[Any]) -> LoweredStep:
        """Record the shardings of the arguments; returns self."""
        for x, s in zip(args, shardings, strict=True):
            if not isinstance(x, Kept):
                self.held[id(x)] = (x, s)
        return self

    def constrained(self, value: Any, sharding: NamedSharding) -> Any:
        """``value`` under ``sharding``, in stages if the plan is staged."""
        before = self.held.get(id(value)) if self.lowered.staged else None
        known = self.known.get((id(value), sharding))
        if before is None or known is not None:
            return super().constrained(value, sharding)
        staged = value
        for stage in stages(before[1], sharding, value.shape, self.lowered.joined):
            staged = super().constrained(staged, stage)
        self.known[id(value), sharding] = (value, staged)
        return staged

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Evaluate an operation; a scattered product is evaluated together with its transpose."""
        op, name = self.next, eqn.primitive.name
        if op in self.computed:  # together with the product before it
            self.step(name)
            return ins
        how = self.lowered.scatters.get(op)
        if op in self.lowered.kernels:
            return self.kernel(eqn, op, ins)
        if op in self.lowered.turned:
            return [self.turned(eqn, op, ins, self.lowered.turned[op])]
        if op in self.done:  # together with the product before it
            self.step(name)
            x = self.at(op, "in", 0, ins[0])
            return [self.at(op, "out", 0, self.at(op, "made", 0, x))]
        if how is None:
            given = self.fetched(ins)
            results = super().operation(eqn, given)
            if name == "transpose":
                self.turns[id(results[0])] = (results[0], given[0])
            if op in self.lowered.apart:
                return [jax.lax.optimization_barrier(x) for x in results]
            if op in self.lowered.plain_layout:
                return [self.plain(x) for x in results]
            return results
        self.step(name)
        ins = [self.at(op, "in", k, x) for k, x in enumerate(self.fetched(ins))]
        product = scattered(eqn, ins, how, self.lowered.mesh)
        out = NamedSharding(self.lowered.mesh, partition_spec(how.out))
        return [super().constrained(product, out)]

    def plain(self, x: Any) -> Any:
        """``x`` in the default layout, which is set for each shard. If it is set for the whole
        array, the compiler first gathers an array that is split along two dimensions."""
        sharding = self.held[id(x)][1]
        spec = sharding.spec
        laid_out = jax.shard_map(
            compat.row_major, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x)
        return super().constrained(laid_out, sharding)

    def turned(self, eqn: Any, op: int, ins: list[Any], how: Turned) -> Any:
        """The result of a product, computed without the transpose beside it."""
        self.step(eqn.primitive.name)
        ins = self.fetched(ins)
        if how.operand >= 0:
            ins[how.operand] = self.turns[id(ins[how.operand])][1]
        product = multiplied(eqn, [self.at(op, "in", k, x) for k, x in enumerate(ins)], how)
        return self.at(op, "out", 0, self.at(op, "made", 0, product))

    def on_shards(self, eqn: Any, ins: list[Any]) -> list[Any]:
        """The results of a ``shard_map``, on this mesh if it has the axes of the user's mesh."""
        shape, user_mesh = self.lowered.mesh.shape, eqn.params["mesh"]
        if all(shape.get(name) == size for name, size in region_axes(eqn).items() if size > 1):
            abstract = getattr(user_mesh, "abstract_mesh", user_mesh)
            eqn = eqn.replace(params={**eqn.params, "mesh": abstract})
        return super().on_shards(eqn, ins)

    def kernel(self, eqn: Any, op: int, ins: list[Any]) -> list[Any]:
        """The results of a kernel that runs on shards."""
        self.step(eqn.primitive.name)
        ins = [self.at(op, "in", k, x) for k, x in enumerate(self.fetched(ins))]
        results = self.lowered.kernels[op].run(eqn, ins, self.lowered.mesh)
        for slot in RESULTS:
            results = [self.at(op, slot, k, x) for k, x in enumerate(results)]
        return results
