"""How a plan's shardings are said to the compiler: (plan, traced step, mesh) -> what is said where.

``planner.plan.lowering.Lowering`` has the choices. The numbers that are computed are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from planner import compat
from planner.graph.trace import Traced
from planner.plan.plan import Constraint, Plan

RESULTS = ("made", "after", "out")
"""The slots of a result, in the order in which they are applied."""

Place = tuple[int, str, int]
"""Operation, slot, position."""

Spec = tuple[tuple[str, ...], ...]
"""Per dimension, the axes of the jax mesh that split it, major first."""

Turned = Mapping[int, tuple[int, tuple[int, ...]]]
"""Of products, the transpose that reads them and its permutation."""


@dataclass(frozen=True)
class Scatter:
    """A product whose partial sums become shards, with the transpose that alone reads it.

    Attributes:
        transpose: that operation, -1 for none; ``order`` is its permutation.
        ins: the shardings of both operands.
        out: that of the transposed result.
        sums: per dimension of it, the axes along which partial sums are scattered.
        summed: the axes whose sums stay whole.
    """

    transpose: int
    order: tuple[int, ...]
    ins: tuple[Spec, Spec]
    out: Spec
    sums: Spec
    summed: tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """What is said where.

    Attributes:
        mesh: the jax mesh.
        shardings: where a value is held to which sharding.
        staged: whether a change is said one axis at a time.
        scatters: by operation, the products whose sums the executor scatters.
    """

    mesh: Mesh | AbstractMesh
    shardings: Mapping[Place, NamedSharding]
    staged: bool = False
    scatters: Mapping[int, Scatter] = field(default_factory=dict)

    @property
    def transposes(self) -> frozenset[int]:
        """The operations that are computed with the product before them."""
        return frozenset(s.transpose for s in self.scatters.values())


def said(
    plan: Plan,
    traced: Traced,
    mesh: Mesh | AbstractMesh,
    axes: Mapping[str, tuple[tuple[str, int], ...]],
) -> Said:
    """What is said of ``plan`` on ``mesh``; ``axes`` (``executor.run.mesh.torus_axes``) says which
    of its axes those of the plan are."""
    how = plan.lowering
    known = {(c.op, c.slot, c.position): c for c in plan.constraints}
    speller = _Speller({name: tuple(x for x, _ in parts) for name, parts in axes.items()})
    turned = _turned(traced, known) if how.behind or how.scattered else {}
    scatters = _scatters(traced, known, turned, speller) if how.scattered else {}
    specs: dict[Place, Spec] = {}
    for (op, slot, position), c in known.items():
        if op in scatters and slot in RESULTS:
            continue
        if how.behind and slot in RESULTS and op in turned:
            transpose, order = turned[op]
            spec = speller.spec(c, len(order))
            specs[transpose, slot, position] = tuple(spec[d] for d in order)
        else:
            specs[op, slot, position] = speller.spec(c)
    shardings = {place: NamedSharding(mesh, partition_spec(s)) for place, s in specs.items()}
    return Said(mesh, shardings, how.staged, scatters)


@dataclass(frozen=True)
class _Speller:
    """Writes a plan's shardings in the axes of the jax mesh."""

    names: Mapping[str, tuple[str, ...]]

    def spec(self, c: Constraint, rank: int = 0) -> Spec:
        """The sharding of a constraint, for at least ``rank`` dimensions."""
        dims = tuple(tuple(x for name in dim for x in self.names[name]) for dim in c.spec.dims)
        return dims + ((),) * (rank - len(dims))


def partition_spec(spec: Spec) -> PartitionSpec:
    """As jax writes it."""
    used = max((d + 1 for d, entry in enumerate(spec) if entry), default=0)
    return PartitionSpec(*[e if len(e) > 1 else e[0] if e else None for e in spec[:used]])


def spec_of(sharding: NamedSharding, rank: int) -> Spec:
    """The reverse, for ``rank`` dimensions."""
    entries = tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in sharding.spec
    )
    return entries + ((),) * (rank - len(entries))


def _turned(traced: Traced, known: Iterable[Place]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Products that a transpose alone reads, one that has no constraints of its own."""
    graph = traced.graph
    busy, outputs = {op for op, _, _ in known}, set(graph.outputs)
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for v in op.inputs:
            readers.setdefault(v, []).append(op.index)
    out = {}
    for op in graph.ops:
        read = readers.get(op.outputs[0], []) if op.kind == "dot_general" else []
        if len(read) != 1 or read[0] in busy or op.outputs[0] in outputs:
            continue
        eqn = traced.eqns[read[0]]
        if eqn is not None and eqn.name == "transpose":
            out[op.index] = (read[0], tuple(eqn.params["permutation"]))
    return out


def _scatters(
    traced: Traced, known: Mapping[Place, Constraint], turned: Turned, speller: _Speller
) -> dict[int, Scatter]:
    """Products whose partial sums the plan splits where they are made."""
    found = {}
    for op in traced.graph.ops:
        want, whole = known.get((op.index, "out", 0)), known.get((op.index, "made", 0))
        left, right = (known.get((op.index, "in", k)) for k in (0, 1))
        eqn = traced.eqns[op.index]
        if op.kind != "dot_general" or None in (want, whole, left, right) or eqn is None:
            continue
        if (op.index, "after", 0) in known:
            continue
        a, b = (
            speller.spec(c, len(aval.shape))  # type: ignore[arg-type]
            for c, aval in zip((left, right), eqn.in_avals, strict=True)
        )
        rank = len(eqn.out_avals[0].shape)
        out, made = speller.spec(want, rank), speller.spec(whole, rank)  # type: ignore[arg-type]
        local, sums = _product(eqn.params["dimension_numbers"], a, b)
        own = tuple(tuple(x for x in e if x in sums) for e in out)
        # what splits the operands splits the result, and partial sums are scattered inside that
        inside = all(e == m + s for e, m, s in zip(out, made, own, strict=True))
        if not any(own) or local != made or not inside:
            continue
        transpose, order = turned.get(op.index, (-1, tuple(range(rank))))
        whole_sums = sums.difference(*own)
        found[op.index] = Scatter(
            transpose,
            order,
            (a, b),
            tuple(out[d] for d in order),
            tuple(own[d] for d in order),
            tuple(x for entry in a for x in entry if x in whole_sums),
        )
    return found


def _product(numbers: Any, a: Spec, b: Spec) -> tuple[Spec | None, frozenset[str]]:
    """The sharding of a ``dot_general`` on shards, and the axes along which it is a partial sum;
    no sharding where the operands' do not go together."""
    ((a_sum, b_sum), (a_batch, b_batch)) = numbers
    pairs = (*zip(a_sum, b_sum, strict=True), *zip(a_batch, b_batch, strict=True))
    free_a = [e for d, e in enumerate(a) if d not in (*a_sum, *a_batch)]
    free_b = [e for d, e in enumerate(b) if d not in (*b_sum, *b_batch)]
    spec = (*(a[d] for d in a_batch), *free_a, *free_b)
    sums = frozenset(x for d in a_sum for x in a[d])
    used = [x for entry in spec for x in entry]
    fits = all(a[i] == b[j] for i, j in pairs)
    fits = fits and len(set(used)) == len(used) and not sums & set(used)
    return (spec if fits else None), sums


def scattered(eqn: Any, ins: Sequence[Any], how: Scatter, mesh: Any) -> Any:
    """The product of ``ins``, transposed as ``how`` says, with its partial sums scattered along one
    axis after the other, the major one first. All axes are manual: of those left to the compiler,
    it would forget the shardings at the border."""

    def local(a: Any, b: Any) -> Any:
        (x,) = compat.evaluate_equation(eqn, [a, b])
        x = jax.lax.transpose(x, how.order)
        for d, entry in enumerate(how.sums):
            for axis in entry:
                x = jax.lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True)
        return jax.lax.psum(x, how.summed) if how.summed else x

    specs = tuple(partition_spec(s) for s in how.ins)
    out = partition_spec(how.out)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return run(*ins)


def stages(before: NamedSharding, after: NamedSharding, shape: Sequence[int]) -> list[Any]:
    """The shardings on the way from one to another, the last one ``after``: splits first, which are
    free, then axes that change their dimension, then gathers; one axis at a time, of a dimension
    the last. What can't be reached so is said at once.

    Source: the order of Shardy's pass sdy-reshard-to-collectives.
    """
    sizes = dict(before.mesh.shape)
    here, goal = (spec_of(s, len(shape)) for s in (before, after))
    way = []
    while here != goal:
        step = _step(here, goal)
        if step is None:
            break
        here = step
        if all(n % math.prod(sizes[x] for x in e) == 0 for n, e in zip(shape, here, strict=True)):
            way.append(NamedSharding(before.mesh, partition_spec(here)))
    return [*way[:-1], after] if way and here == goal else [*way, after]


def _step(here: Spec, goal: Spec) -> Spec | None:
    """One step on the way, None where there is none."""
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
