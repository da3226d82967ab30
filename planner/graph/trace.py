"""jaxpr -> Graph. Calls are flattened; loops and branches become regions.

Border operations of ours: ``loop_const`` and ``branch_in`` (a value enters a region),
``loop_xs`` (a slice per iteration), ``loop_carry`` (its first operand starts it),
``loop_back`` (closes the carry), ``loop_test`` (decides whether a while loop goes on),
``loop_ys`` (stacks a slice per iteration), ``loop_out`` (a carry leaves), ``branch_out``
(branches meet). The executor walks the same jaxpr in the same order, so an operation's
index names a place in the program for both.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from planner import compat
from planner.arguments.calls import name_of
from planner.arguments.outcome import StepOutcome
from planner.errors import MeshwrightError, ModelError
from planner.graph.ir import SCALAR, Graph, Op, Phase, Region, Value
from planner.graph.labels.label import labelled
from planner.graph.labels.phases import named_phase
from planner.graph.labels.ties import ties
from planner.rules.key import EqnKey

INLINED = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "remat checkpoint remat2 custom_lin custom_vmap_call".split()
)

FUSED = "flash_attention"
"""Start of the name of a jitted function that is one kernel (``step.kernels.fused``)."""

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(_HERE, room) + os.sep for room in ("planner", "executor"))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Where installed packages and Python's own modules lie."""
    paths = sysconfig.get_paths()  # a tenth of a second the first time
    places = {paths[name] for name in ("purelib", "platlib", "stdlib")}
    places.add(os.path.dirname(os.path.dirname(jax.__file__)))  # elsewhere in some environments
    return tuple(os.path.realpath(place) + os.sep for place in sorted(places))


@dataclass(frozen=True)
class Traced:
    """A traced step: its graph, the jaxpr, and one ``EqnKey`` per operation (None for borders)."""

    graph: Graph
    eqns: tuple[EqnKey | None, ...]
    jaxpr: Any
    in_tree: Any
    out_tree: Any
    out_shape: Any


REGIONS = frozenset("scan while cond remat remat2 checkpoint".split())
"""Equations whose bodies the executor builds anew."""


def inner_jaxpr(eqn: Any) -> Any:
    """The body of a call-like equation that the walk goes through."""
    params = eqn.params
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if key in params:
            return params[key]
    return None


def inlined(eqn: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]] | None:
    """(body, its operands) of an equation that is walked as if its body stood in its place.

    Of a ``custom_linear_solve`` only the solver runs once derivatives have been taken; its
    operands are a part of the equation's.
    """
    name = eqn.primitive.name
    if name == "custom_linear_solve":
        lengths = eqn.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        consts = operands[start : start + lengths.solve]
        return eqn.params["jaxprs"].solve, [*consts, *operands[sum(lengths) :]]
    if name not in INLINED or is_opaque_region(eqn):
        return None
    inner = inner_jaxpr(eqn)
    if inner is None or len(compat.body(inner).invars) != len(operands):
        return None
    return inner, list(operands)


def is_opaque_region(eqn: Any) -> bool:
    """Whether a region is taken as one operation: it uses references (``jax.new_ref``) of the
    program around it, and a body that is built anew could not."""
    return eqn.primitive.name in REGIONS and any(compat.is_ref(v.aval) for v in eqn.invars)


_user_code: dict[Any, bool] = {}


def user_line(eqn: Any) -> str:
    """``file.py:line`` of the innermost frame of the user's own code, or ``""``."""
    return next(_user_frames(eqn), "")


def user_lines(eqn: Any) -> list[str]:
    """``file.py:line`` of all frames of the user's own code, outermost first."""
    return list(_user_frames(eqn))[::-1]


def _user_frames(eqn: Any) -> Iterator[str]:
    """Frames of the user's own code, innermost first."""
    traceback = getattr(eqn.source_info, "traceback", None)
    if traceback is None:
        return
    codes, offsets = traceback.raw_frames()
    for code, offset in zip(codes, offsets, strict=True):
        known = _user_code.get(code)
        if known is None:
            name = code.co_filename
            real = os.path.realpath(name)
            library = real.startswith(_libraries()) or name.startswith("<")
            known = _user_code[code] = not library and not real.startswith(_OURS)
        if known:
            line = type(traceback).code_addr2line(code, offset)
            yield f"{os.path.basename(code.co_filename)}:{line}"


def _attrs(params: Mapping[str, Any]) -> str:
    """A short stable digest of an equation's parameters (none when it has none)."""
    plain = {k: v for k, v in params.items() if "jaxpr" not in k and not callable(v)}
    text = ",".join(f"{k}={plain[k]}" for k in sorted(plain) if plain[k] is not None)
    if not text or "0x" in text:
        return ""
    return text if len(text) <= 24 else hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass
class _Builder:
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    eqns: list[EqnKey | None] = field(default_factory=list)
    regions: list[Region] = field(default_factory=lambda: [Region(0, "main", -1, 1, 1.0)])
    attrs_cache: dict[int, tuple[Any, str]] = field(default_factory=dict)
    named: list[Phase | None] = field(default_factory=list)
    fused: str = ""
    calls: int = 0
    phase: Phase | None = None
    """What the name stack around the equations that are walked says."""

    def value(self, aval: Any, op: int, name: str = "") -> int:
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
    ) -> tuple[int, ...]:
        index = len(self.ops)
        outs = tuple(self.value(a, index) for a in out_avals)
        attrs = ""
        if eqn is not None and eqn.params:
            cached = self.attrs_cache.get(id(eqn.params))
            if cached is None:
                cached = self.attrs_cache[id(eqn.params)] = (eqn.params, _attrs(eqn.params))
            attrs = cached[1]
        inputs = tuple(inputs)
        self.ops.append(Op(index, kind, inputs, outs, region, attrs, source, self.fused, effect))
        self.eqns.append(eqn)
        self.named.append(self.phase)
        return outs

    def region(self, kind: str, parent: int, trips: int, weight: float, known: bool = True) -> int:
        index = len(self.regions)
        total = self.regions[parent].weight * weight
        self.regions.append(Region(index, kind, parent, trips, total, known))
        return index

    def walk(self, jaxpr: Any, args: Sequence[int], region: int, source: str = "") -> list[int]:
        """Add the equations of ``jaxpr``; returns the values of its results."""
        inner = compat.body(jaxpr)
        env: dict[Any, int] = {}
        for var in inner.constvars:
            env[var] = self.value(var.aval, -1, "const")
        env.update(zip(inner.invars, args, strict=True))
        for eqn in inner.eqns:
            ins = [SCALAR if compat.is_literal(v) else env[v] for v in eqn.invars]
            where = user_line(eqn) or source
            outer = self.phase
            self.phase = outer or named_phase(str(eqn.source_info.name_stack))
            outs = self.equation(eqn, ins, region, where)
            self.phase = outer
            env.update(zip(eqn.outvars, outs, strict=True))
        return [SCALAR if compat.is_literal(v) else env[v] for v in inner.outvars]

    def equation(self, eqn: Any, ins: list[int], region: int, source: str) -> Sequence[int]:
        name = eqn.primitive.name
        found = inlined(eqn, ins)
        if found is not None:
            outer = self.fused
            label = str(eqn.params.get("name", ""))
            if label.startswith(FUSED) and not outer:
                self.calls += 1
                self.fused = f"{label}#{self.calls}"
            results = self.walk(*found, region, source)
            self.fused = outer
            return results
        build = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if build is not None and not is_opaque_region(eqn):
            return build(eqn, ins, region, source)
        avals = tuple(v.aval for v in eqn.outvars)
        record = EqnKey(eqn.primitive, eqn.params, tuple(v.aval for v in eqn.invars), avals)
        return self.op(name, ins, avals, region, source, record, bool(eqn.effects))

    def scan(self, eqn: Any, ins: list[int], region: int, source: str) -> Sequence[int]:
        p = eqn.params
        length = int(p["length"])
        n_const, n_carry = compat.scan_counts(eqn)
        loop = self.region("scan", region, length, length)
        avals = [v.aval for v in compat.body(p["jaxpr"]).invars]
        args: list[int] = []
        for k, (value, aval) in enumerate(zip(ins, avals, strict=True)):
            kind = (
                "loop_const"
                if k < n_const
                else "loop_carry"
                if k < n_const + n_carry
                else "loop_xs"
            )
            args += self.op(kind, (value,), (aval,), region, source)
        results = self.walk(p["jaxpr"], args, loop, source)
        carries = args[n_const : n_const + n_carry]
        for result, carry in zip(results[:n_carry], carries, strict=True):
            self.op("loop_back", (result, carry), (), loop, source)
        outs: list[int] = []
        for k, var in enumerate(eqn.outvars):
            if k < n_carry:
                outs += self.op("loop_out", (carries[k],), (var.aval,), region, source)
            else:
                outs += self.op("loop_ys", (results[k],), (var.aval,), region, source)
        return outs

    def while_loop(self, eqn: Any, ins: list[int], region: int, source: str) -> Sequence[int]:
        p = eqn.params
        n_cond, n_body = int(p["cond_nconsts"]), int(p["body_nconsts"])
        loop = self.region("while", region, 1, 1, known=False)
        avals = [v.aval for v in eqn.invars]
        consts: list[int] = []
        for value, aval in zip(ins[: n_cond + n_body], avals, strict=False):
            consts += self.op("loop_const", (value,), (aval,), region, source)
        carries: list[int] = []
        for value, var in zip(ins[n_cond + n_body :], eqn.outvars, strict=True):
            carries += self.op("loop_carry", (value,), (var.aval,), region, source)
        tests = self.walk(p["cond_jaxpr"], consts[:n_cond] + carries, loop, source)
        self.op("loop_test", (tests[0], *carries), (), loop, source)
        results = self.walk(p["body_jaxpr"], consts[n_cond:] + carries, loop, source)
        for result, carry in zip(results, carries, strict=True):
            self.op("loop_back", (result, carry), (), loop, source)
        outs: list[int] = []
        for carry, var in zip(carries, eqn.outvars, strict=True):
            outs += self.op("loop_out", (carry,), (var.aval,), region, source)
        return outs

    def cond(self, eqn: Any, ins: list[int], region: int, source: str) -> Sequence[int]:
        branches = eqn.params["branches"]
        results = []
        for branch in branches:
            inner = self.region("branch", region, 1, 1.0 / len(branches))
            args: list[int] = []
            for value, var in zip(ins[1:], eqn.invars[1:], strict=True):
                args += self.op("branch_in", (value,), (var.aval,), region, source)
            results.append(self.walk(branch, args, inner, source))
        outs: list[int] = []
        for k, var in enumerate(eqn.outvars):
            outs += self.op("branch_out", [r[k] for r in results], (var.aval,), region, source)
        return outs


def abstract(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with their arrays replaced by ShapeDtypeStructs (shape, dtype, weak type).

    Where an array happens to be must not change the plan.
    """

    def one(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
        return compat.as_struct(jax.typeof(x))

    return tuple(jax.tree_util.tree_map(one, args))


def reshaped(args: Sequence[Any], shapes: Mapping[int, tuple[int, ...]]) -> tuple[Any, ...]:
    """Arguments with other shapes for some of their leaves, by position."""
    leaves, tree = jax.tree_util.tree_flatten(abstract(args))
    for k, shape in shapes.items():
        leaves[k] = jax.ShapeDtypeStruct(shape, leaves[k].dtype, weak_type=leaves[k].weak_type)
    return tuple(jax.tree_util.tree_unflatten(tree, leaves))


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """Trace ``function(*args)`` into a Graph; starts no backend, computes nothing.

    Args:
        function: a jit-able function of pytrees.
        args: arrays or ShapeDtypeStructs.

    Raises:
        ModelError: the function raised; the user's exception is the cause.
    """
    args = abstract(args)
    try:
        closed, out_shape = compat.make_jaxpr(function, args)
    except MeshwrightError:
        raise
    except Exception as error:
        name = name_of(function)
        raise ModelError(f"tracing {name} failed: {type(error).__name__}: {error}") from error
    ins, in_tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    outs, out_tree = jax.tree_util.tree_flatten_with_path(out_shape)
    updates = out_shape.updates if isinstance(out_shape, StepOutcome) else ()
    updated = len(jax.tree_util.tree_leaves(updates))
    paths = [p for p, _ in outs]
    if isinstance(out_shape, StepOutcome) and not updated:
        paths = [p[1:] for p in paths]
    graph, eqns = _graph_of(closed, [p for p, _ in ins], paths, updated)
    return Traced(graph, eqns, closed, in_tree, out_tree, out_shape)


def _graph_of(
    closed: Any,
    in_paths: list[tuple[Any, ...]],
    out_paths: list[tuple[Any, ...]],
    updated: int,
) -> tuple[Graph, tuple[EqnKey | None, ...]]:
    """``updated``: how many of the outputs, the first ones, update arguments in place."""
    builder = _Builder()
    inner = compat.body(closed)
    names = [jax.tree_util.keystr(p) for p in in_paths]
    inputs = [builder.value(v.aval, -1, n) for v, n in zip(inner.invars, names, strict=True)]
    outputs = builder.walk(closed, inputs, 0)
    found = ties(
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
        ties=found,
    )
    return labelled(graph, builder.named), tuple(builder.eqns)
