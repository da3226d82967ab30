"""A step that computes with more examples than its batch has, with the same results.

The batch is padded with copies of its last example. Shapes are those of the padded batch; numbers
are those of the step as written, so a mean still divides by the number of real examples. Every sum
over examples leaves the copies out, and their rows are cut off results with one row per example.
`planner.microbatch.classes` proves that examples are not combined in any other way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.errors import ModelError, RequestError
from planner.graph.flat import Call, FlatJaxpr, Run, again, execute, flatten, looped
from planner.graph.jaxpr.places import raised, user_line
from planner.graph.jaxpr.walk import REMAT, called, stays_whole
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, abstract, reshaped, trace
from planner.microbatch.bodies.merged import merged_jaxpr
from planner.microbatch.bodies.onto_state import added_apart
from planner.microbatch.classes import classify
from planner.microbatch.errors import CoupledError, NotExactError
from planner.microbatch.pairs import bodies_in, pair
from planner.microbatch.rewrite import batch_size, example_places, with_examples

SUMMED = {
    "reduce_sum": (0,),
    "dot_general": (0, 1),
    "conv_general_dilated": (0, 1),
    "scatter-add": (2,),
    "scatter_add": (2,),
}
"""Operations that sum over examples, and the operands one of which is masked."""


def padded(
    function: Callable[..., Any], args: Sequence[Any], rows: int, whole: Traced | None = None
) -> Callable[..., Any]:
    """A function of the same arguments and results that computes with ``rows`` examples; for
    arguments of other shapes it runs the step as it was.

    Args:
        function: a train step.
        args: its arguments, arrays or shapes; the batch and some state hold examples.
        rows: number of examples, at least that of the batch.
        whole: the step's trace for ``args``, if available.

    Raises:
        NotExactError: the results would not be equal, or equality could not be proved.
        RequestError: no argument is a batch, or the batch has more than ``rows`` examples.
    """
    whole = trace(function, abstract(args)) if whole is None else whole
    try:
        return _padded(function, args, rows, whole)
    except NotExactError as error:
        other = added_apart(function, whole, example_places(whole).keys())
        if other is None:
            raise error from None
    return _padded(other, args, rows, trace(other, abstract(args)))


def _padded(
    function: Callable[..., Any], args: Sequence[Any], rows: int, whole: Traced
) -> Callable[..., Any]:
    places = example_places(whole)
    batch, examples = sorted(places), batch_size(whole)
    if rows < examples:
        raise RequestError(f"a batch of {examples} examples can't be padded to {rows}")
    if rows == examples:
        return function
    more = reshaped(abstract(args), with_examples(whole.graph, places, rows))
    try:
        long = trace(function, more)
    except ModelError as error:
        cause = raised(error.__cause__ or error)
        raise NotExactError(f"this step can't be padded: {cause}") from error
    if long.out_tree != whole.out_tree or long.in_tree != whole.in_tree:
        raise NotExactError("this step can't be padded: its results have another structure")
    try:
        classes = classify(pair(whole.jaxpr, long.jaxpr), batch, whole.jaxpr)
        merged = merged_jaxpr(whole.jaxpr, long.jaxpr)
    except NotExactError as error:
        error = error.without_own() if isinstance(error, CoupledError) else error
        raise NotExactError(_of_padding(str(error))) from None
    if classes.inside:
        raise _drawn_inside(whole.jaxpr, classes.inside)
    program = _masked(whole.jaxpr, merged)
    shorter = [compat.aval_shape(v.aval) for v in compat.body(whole.jaxpr).outvars]

    def run(*given: Any) -> Any:
        leaves = jax.tree_util.tree_leaves(given)
        for k, d in places.items():
            leaves[k] = filled(leaves[k], rows, d)
        out = [_cut(x, shape) for x, shape in zip(execute(program, leaves), shorter, strict=True)]
        return jax.tree_util.tree_unflatten(whole.out_tree, out)

    return by_shapes(function, args, run, lambda _: function)


def _of_padding(text: str) -> str:
    """A message about microbatches, reworded for a padded batch."""
    for microbatches, padding in (
        ("cut into microbatches", "padded"),
        ("leave microbatches= out", "leave pad_batch= out"),
        ("in a microbatch", "in the padded batch"),
        ("for a microbatch", "for the padded batch"),
    ):
        text = text.replace(microbatches, padding)
    return text


def _drawn_inside(jaxpr: Any, inside: Set[int]) -> NotExactError:
    """The error for values that a body makes for the whole batch."""
    line, name = next(_named(jaxpr, inside), ("", "it"))
    where = f"{line}: {name}" if line else name
    return NotExactError(
        f"this step can't be padded: {where} draws random numbers or counts positions for the "
        "batch inside a loop or a recomputed block; do that in front of it"
    )


def _named(jaxpr: Any, wanted: Set[int], around: str = "") -> Iterator[tuple[str, str]]:
    """The lines and names of some equations; the default line is that of the enclosing equation."""
    for eqn in compat.body(jaxpr).eqns:
        line = user_line(eqn) or around
        if id(eqn) in wanted:
            yield line, eqn.primitive.name
        for inner in bodies_in(eqn.params):
            yield from _named(inner, wanted, line)


def filled(x: Any, rows: int, d: int = 0) -> Any:
    """[..., examples, ...] -> [..., rows, ...] along dimension ``d``: adds copies of the last
    example."""
    places = jnp.minimum(jnp.arange(rows), x.shape[d] - 1)
    return x.at[(slice(None),) * d + (places,)].get(mode="promise_in_bounds")


def _cut(x: Any, shape: Sequence[int]) -> Any:
    """The array, cut to a shape."""
    return x if jnp.shape(x) == tuple(shape) else jax.lax.slice(x, (0,) * x.ndim, tuple(shape))


def _masked(whole: Any, long: Any) -> FlatJaxpr:
    """The padded program, with the copies left out of sums over examples."""
    flat, twin = flatten(whole), flatten(long)
    calls = [_call(a, b) or b for a, b in zip(flat.calls, twin.calls, strict=True)]
    return dataclasses.replace(twin, calls=tuple(calls))


def _call(short: Call, long: Call) -> Call | None:
    """The replacement of a call of the padded program; None if the call can stay."""
    ins, outs = (_lengths(a, b) for a, b in _ends(short.eqn, long.eqn))
    if not any(x is not None for x in (*ins, *outs)):
        return None
    bodies = _bodies(short.eqn, long.eqn)
    if bodies is not None:
        return _with_body(long, *bodies)
    kernel, twin = (called(c.eqn) if stays_whole(c.eqn) else None for c in (short, long))
    if kernel is not None and twin is not None:  # a user's kernel, which is not rewritten
        if any(call.made for call in _masked(kernel.jaxpr, twin.jaxpr).calls):
            raise _refused(long, "adds examples up inside a kernel")
        return None
    if not any(x is not None for x in ins):
        return None if long.kind == "broadcast_in_dim" else long.running(_longer(short, outs, long))
    if any(x is not None for x in outs):
        if long.kind == "cond" and any(x is None for x in outs):
            raise _refused(long, "may add examples up in a branch")
        return None
    where = SUMMED.get(long.kind, ())
    some = [k for k in where if k < len(ins) and ins[k] is not None]
    if not some:
        raise _refused(long, "adds examples up in a way that can't leave any out")
    at = min(some, key=lambda k: math.prod(compat.aval_shape(long.eqn.invars[k].aval)))
    lengths = ins[at]
    assert lengths is not None

    def run(values: Sequence[Any]) -> list[Any]:
        given = list(values)
        given[at] = _zeroed(given[at], lengths)
        return list(long.run(given))

    return long.running(run)


def _refused(call: Call, why: str) -> NotExactError:
    line = user_line(call.origin.line)
    return NotExactError(f"this step can't be padded: {line}: {call.kind} {why}")


def _ends(short: Any, long: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (short.invars, long.invars), (short.outvars, long.outvars)


def _lengths(short: Sequence[Any], long: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """Per value, its shape in the original program if that differs."""
    out: list[tuple[int, ...] | None] = []
    for a, b in zip(short, long, strict=True):
        shapes = compat.aval_shape(a.aval), compat.aval_shape(b.aval)
        out.append(None if shapes[0] == shapes[1] else shapes[0])
    return out


def _bodies(short: Any, long: Any) -> tuple[Any, Any] | None:
    """The bodies of a scan or a rematerialized block."""
    if long.primitive.name == "scan":
        return short.params["jaxpr"], long.params["jaxpr"]
    if long.primitive.name in REMAT:
        body, twin = called(short), called(long)
        assert body is not None and twin is not None
        return body.jaxpr, twin.jaxpr
    return None


def _with_body(long: Call, short_body: Any, long_body: Any) -> Call | None:
    program = _masked(short_body, long_body)
    if not any(call.made for call in program.calls):
        return None

    def inner(values: Sequence[Any]) -> list[Any]:
        return execute(program, list(values))

    how = looped if long.kind == "scan" else again
    return long.running(how(long.eqn, inner))


def _zeroed(x: Any, lengths: Sequence[int]) -> Any:
    """The array with zeros after the first ``lengths`` of each dimension."""
    for d, (size, length) in enumerate(zip(x.shape, lengths, strict=True)):
        if size != length:
            shape = [1] * x.ndim
            shape[d] = size
            mask = (jnp.arange(size) < length).reshape(shape)
            x = jnp.where(mask, x, jnp.zeros((), x.dtype))
    return x


def _longer(short: Call, outs: Sequence[tuple[int, ...] | None], long: Call) -> Run:
    """Makes values for the original batch and repeats their last row."""
    shapes = [compat.aval_shape(v.aval) for v in long.eqn.outvars]

    def run(values: Sequence[Any]) -> list[Any]:
        arrays = list(short.run(values))
        for k, (lengths, shape) in enumerate(zip(outs, shapes, strict=True)):
            for d, (a, b) in enumerate(zip(lengths or shape, shape, strict=True)):
                arrays[k] = arrays[k] if a == b else filled(arrays[k], b, d)
        return arrays

    return run
