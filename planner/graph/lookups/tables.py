"""Finds the parameters that are only looked up by rows, and their indices.

A table is served by rows when every use of it is a lookup of whole rows (``table[ids]``,
``jnp.take(table, ids, axis=0)``, ``nn.Embed``) whose indices depend on the batch alone. The walk
goes through the jaxpr of ``function(params, *batch)``: values that depend on a parameter are
*unknown*, all others are computed, including the indices. ``lookups.rows`` evaluates the same
function on the requested rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.annotate import MARKS
from planner.errors import MeshwrightError, ModelError
from planner.graph.jaxpr.places import PlacedWalk
from planner.graph.jaxpr.walk import CUSTOM, Body, Loop
from planner.graph.trace import abstract

PROMISE, CLIP, FILL = "promise_in_bounds", "clip", "fill"
"""What a lookup reads for an index outside the table: undefined, as the caller promised that there
is none; the nearest row; or a row of the fill value (which has no gradient)."""

SAME = frozenset("convert_element_type copy copy_p stop_gradient name reduce_precision".split())
"""Elementwise operations that a table may pass before its lookup."""

MOST_ROWS = 2**31 - 2
"""Maximum number of rows: row numbers are int32, including the one after the last."""


@dataclass(frozen=True)
class LookupTable:
    """A parameter that is read by rows.

    Attributes:
        leaf: its number among the arrays of the parameters.
        path: its place in them, as ``jax.tree_util.keystr`` writes it.
        rows: number of rows.
        width: shape of one row.
        dtype: name of its dtype.
        itemsize: bytes of one element.
        looked_up: how many rows one call looks up, repeated ones included.
        bounds: per lookup, how it handles an index outside (``PROMISE``, ``CLIP``, ``FILL``).
        sources: per lookup, the user's line.
    """

    leaf: int
    path: str
    rows: int
    width: tuple[int, ...]
    dtype: str
    itemsize: int
    looked_up: int
    bounds: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.width) * self.itemsize


@dataclass(frozen=True, eq=False)
class LookUps:
    """Result of ``find_lookups``.

    Attributes:
        tables: the parameters that can be served by rows.
        refused: why others can't, by path.
        unused: those of the refused that the function does not read at all: if they are served, no
            row of them is requested.
        mixed: paths of the refused that are looked up as well.
        jaxpr: of the function.
        out_tree: tree structure of its results.
        indices: batch -> for each table, an int32 array [size of the lookup] for each of its
            lookups; -1 and ``rows`` stand for indices outside. Traceable.
    """

    tables: tuple[LookupTable, ...]
    refused: Mapping[str, str]
    unused: tuple[LookupTable, ...]
    mixed: tuple[str, ...]
    jaxpr: Any
    out_tree: Any
    indices: Callable[..., list[list[jax.Array]]]


def find_lookups(
    function: Callable[..., Any],
    params: Any,
    batch: Sequence[Any],
    leaves: frozenset[int] | None = None,
) -> LookUps:
    """Find the parameters of ``function(params, *batch)`` that are only looked up by rows.

    Args:
        function: traceable; not run.
        params: pytree of arrays or ShapeDtypeStructs.
        batch: the other arguments.
        leaves: numbers of the arrays of ``params`` to check; None takes all.

    Raises:
        ModelError: the function failed while traced.
    """
    shapes = abstract((params, *batch))
    try:
        closed, out_shape = compat.make_jaxpr(function, shapes)
    except MeshwrightError:
        raise
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise ModelError(f"tracing {name} failed: {type(error).__name__}: {error}") from error
    named, _ = jax.tree_util.tree_flatten_with_path(shapes[0])
    paths = [jax.tree_util.keystr(path) for path, _ in named]
    wanted = frozenset(range(len(named))) if leaves is None else leaves
    refused: dict[int, str] = {}
    seen: list[_Found] = []

    def indices(*batch: Any) -> Any:
        walk = _Search(refused=refused)
        given: list[Any] = [
            _Whole(k, compat.aval_shape(x)) if k in wanted else UNKNOWN
            for k, (_, x) in enumerate(named)
        ]
        rest = jax.tree_util.tree_leaves(batch)
        for out in walk.run(closed, [*given, *rest]):
            if isinstance(out, _Whole):
                walk.refuse(out, "it is a result of the function")
        seen[:], flat = walk.found, walk.indices
        return flat

    sizes = [x.size for x in jax.eval_shape(indices, *shapes[1:])]
    every = list(zip(seen, sizes, strict=True))
    tables, unused = list[LookupTable](), list[LookupTable]()
    for leaf in sorted(wanted):
        leaf_lookups = [(lookup, size) for lookup, size in every if lookup.leaf == leaf]
        aval = named[leaf][1]
        if leaf_lookups and not jnp.issubdtype(aval.dtype, jnp.floating):
            refused.setdefault(leaf, f"it is of {aval.dtype}, which has no gradient")
        if leaf not in refused and aval.shape:
            (tables if leaf_lookups else unused).append(
                LookupTable(
                    leaf,
                    paths[leaf],
                    int(aval.shape[0]),
                    tuple(map(int, aval.shape[1:])),
                    compat.dtype_name(aval),
                    compat.itemsize(aval),
                    sum(size for _, size in leaf_lookups),
                    tuple(lookup.bounds for lookup, _ in leaf_lookups),
                    tuple(lookup.source for lookup, _ in leaf_lookups),
                )
            )
        if not leaf_lookups:
            refused.setdefault(leaf, "the function does not look up rows of it")

    def by_table(*batch: Any) -> list[list[jax.Array]]:
        flat = indices(*batch)
        return [
            [x for (lookup, _), x in zip(every, flat, strict=True) if lookup.leaf == t.leaf]
            for t in tables
        ]

    why = {paths[leaf]: reason for leaf, reason in sorted(refused.items())}
    mixed = tuple(paths[leaf] for leaf in sorted(refused) if leaf in {f.leaf for f in seen})
    out_tree = jax.tree_util.tree_structure(out_shape)
    return LookUps(tuple(tables), why, tuple(unused), mixed, closed, out_tree, by_table)


def row_column(eqn: Any, shape: tuple[int, ...]) -> int | None:
    """The column of the indices (``gather``), or the operand after the first (``dynamic_slice``),
    that selects the row, if an equation looks up whole rows of its first operand, an array of
    ``shape``; else None."""
    params = eqn.params
    if eqn.primitive.name not in ("gather", "dynamic_slice"):
        return None
    if tuple(params["slice_sizes"]) != (1, *shape[1:]):
        return None
    if eqn.primitive.name == "dynamic_slice":
        return 0
    numbers = params["dimension_numbers"]
    if tuple(numbers.operand_batching_dims) or 0 not in numbers.start_index_map:
        return None
    return int(tuple(numbers.start_index_map).index(0))


def bounds_of(eqn: Any) -> str:
    """How a lookup handles an index outside the table."""
    if eqn.primitive.name == "dynamic_slice":
        return CLIP
    return {
        jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS: PROMISE,
        jax.lax.GatherScatterMode.CLIP: CLIP,
    }.get(eqn.params["mode"], FILL)


def looked_up(eqn: Any, column: int, operands: Sequence[Any], rows: int) -> jax.Array:
    """int32 row numbers of a lookup, in the order of its indices; -1 and ``rows`` are outside.

    Args:
        eqn: the lookup.
        column: as ``row_column`` says.
        operands: of the equation, without the table.
        rows: of the table.
    """
    is_slice = eqn.primitive.name == "dynamic_slice"
    index = jnp.asarray(operands[column]) if is_slice else operands[0][..., column]
    kind = jnp.iinfo(index.dtype)
    least = 0 if bounds_of(eqn) == CLIP else -1
    most = rows - 1 if bounds_of(eqn) == CLIP else rows
    lower, upper = max(int(kind.min), least), min(int(kind.max), most)
    return jnp.clip(index, index.dtype.type(lower), index.dtype.type(upper)).astype(jnp.int32)


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""A value that depends on parameters."""


@dataclass(frozen=True)
class _Whole:
    """A whole table as a value in the function."""

    leaf: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Found:
    """One lookup."""

    leaf: int
    bounds: str
    source: str


@dataclass(eq=False)
class _Search(PlacedWalk[Any]):
    """Computes known values and collects lookups; for tables that are used otherwise, the reason.

    A value is an array, a table or ``UNKNOWN``.
    """

    refused: dict[int, str] = field(default_factory=dict)
    found: list[_Found] = field(default_factory=list)
    indices: list[Any] = field(default_factory=list)
    taken: bool = True
    """Whether the code being walked is certain to run."""

    def refuse(self, table: _Whole, reason: str) -> None:
        """Record why a table can't be served by rows; only the first reason counts."""
        self.refused.setdefault(table.leaf, reason)

    @property
    def at(self) -> str:
        """The current line, for the middle of a sentence."""
        return f" at {self.place.line}" if self.place.line else ""

    def equation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if any(x is UNKNOWN or isinstance(x, _Whole) for x in ins):
            return super().equation(eqn, ins)
        return [UNKNOWN] * len(eqn.outvars) if eqn.effects else compat.evaluate_equation(eqn, ins)

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        name, none = eqn.primitive.name, [UNKNOWN] * len(eqn.outvars)
        tables = [x for x in ins if isinstance(x, _Whole)]
        if tables and ins[0] is tables[0] and len(tables) == 1:
            if name in SAME | MARKS:
                return [tables[0]]
            column = row_column(eqn, tables[0].shape)
            if column is not None:
                self.look_up(eqn, column, ins)
                return none
        for table in tables:
            self.refuse(table, _other_use(name, self.at))
        return none

    def call(self, eqn: Any, ins: list[Any], body: Body) -> Sequence[Any]:
        """Walk through a call, unless a table enters a function with a custom derivative."""
        if eqn.primitive.name in CUSTOM and any(isinstance(x, _Whole) for x in ins):
            return self.operation(eqn, ins)
        return super().call(eqn, ins, body)

    def look_up(self, eqn: Any, column: int, ins: list[Any]) -> None:
        """Record the indices of a lookup, or why its table can't be served by rows."""
        table, rows = ins[0], ins[0].shape[0]
        if any(x is UNKNOWN for x in ins[1:]):
            self.refuse(
                table,
                f"the indices of its rows{self.at} can't be computed from the batch alone: they "
                "depend on parameters",
            )
        elif rows > MOST_ROWS:
            self.refuse(table, f"it has {rows} rows, more than {MOST_ROWS}")
        else:
            index = looked_up(eqn, column, ins[1:], rows).reshape(-1)
            bounds = bounds_of(eqn)
            if bounds == PROMISE and not self.taken:
                bounds = CLIP  # the promise excludes branches that are not taken
                index = jnp.clip(index, 0, rows - 1)
            self.found.append(_Found(table.leaf, bounds, self.place.line))
            self.indices.append(index)

    def cond(self, eqn: Any, ins: list[Any], branches: tuple[Body, ...]) -> Sequence[Any]:
        """Collect the lookups of all branches: more rows than needed are no error."""
        taken, self.taken = self.taken, False
        for body in branches:
            for out in self.run(body.jaxpr, body.args(ins)):
                if isinstance(out, _Whole):
                    self.refuse(out, f"a branch{self.at} returns it")
        self.taken = taken
        return [UNKNOWN] * len(eqn.outvars)

    def loop(self, eqn: Any, ins: list[Any], loop: Loop) -> Sequence[Any]:
        """Scan the known values; each lookup gives one array of indices per iteration."""
        if loop.trips is None:
            return self.operation(eqn, ins)
        for x in ins[loop.consts :]:
            if isinstance(x, _Whole):
                self.refuse(x, f"a loop{self.at} carries it or goes over it, row by row")
        consts, *others = loop.split(ins)
        start, over = ([UNKNOWN if isinstance(x, _Whole) else x for x in part] for part in others)
        known = [x is not UNKNOWN for x in start]
        seen, known_outs = list[_Found](), list[bool]()  # its lookups; which results are known

        def body(carry: list[Any], xs: list[Any]) -> Any:
            walk = _Search(self.place, self.refused, taken=self.taken)
            carried, sliced = iter(carry), iter(xs)
            args = [next(carried) if k else UNKNOWN for k in known]
            args += [UNKNOWN if x is UNKNOWN else next(sliced) for x in over]
            outs = walk.run(loop.bodies[0].jaxpr, [*consts, *args])
            for x in outs:
                if isinstance(x, _Whole):
                    self.refuse(x, f"a loop{self.at} returns it")
            outs = [UNKNOWN if isinstance(x, _Whole) else x for x in outs]
            seen[:], known_outs[:] = walk.found, [x is not UNKNOWN for x in outs]
            next_carry = [x for x, k in zip(outs, known, strict=False) if k]
            left = [c if x is UNKNOWN else x for x, c in zip(next_carry, carry, strict=True)]
            ys = [x for x in outs[loop.carries :] if x is not UNKNOWN]
            return left, (ys, walk.indices)

        def whole() -> Any:
            begin = [x for x, k in zip(start, known, strict=True) if k]
            xs = [x for x in over if x is not UNKNOWN]
            reverse = eqn.params["reverse"]
            return jax.lax.scan(body, begin, xs, length=loop.trips, reverse=reverse)

        while True:
            jax.eval_shape(whole)
            still = [k and t for k, t in zip(known, known_outs, strict=False)]
            if still == known:
                break
            known = still
        carry, (ys, indices) = whole()
        self.found += seen
        self.indices += [index.reshape(-1) for index in indices]
        last, stacked = iter(carry), iter(ys)
        results = [next(last) if k else UNKNOWN for k in known]
        return results + [next(stacked) if t else UNKNOWN for t in known_outs[loop.carries :]]


def _other_use(name: str, at: str) -> str:
    if name == "while":
        return f"a loop of unknown length (while{at}) reads it; a scan may"
    if name.startswith("custom_"):
        return f"a function with a derivative of its own ({name}{at}) reads it"
    if name in ("gather", "slice", "dynamic_slice"):
        return f"{name}{at} reads something else of it than whole rows by index"
    return f"{name}{at} reads all of it"
