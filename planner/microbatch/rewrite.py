"""Rewrites a step into a loop over microbatches that accumulates, then the rest of the step.

Example ``i * parts + j`` goes into microbatch j. Each device then slices its own shard; contiguous
microbatches would make XLA gather the batch. Sums are accumulated at least in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.errors import ModelError, RequestError
from planner.graph.ir import Graph, Role
from planner.graph.jaxpr.places import raised
from planner.graph.labels.examples import example_dims
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, abstract, reshaped, trace
from planner.microbatch.bodies.figures import in_two_parts
from planner.microbatch.bodies.groups import example_axes
from planner.microbatch.bodies.onto_state import added_apart
from planner.microbatch.bodies.single import of_one
from planner.microbatch.classes import Classes, classify
from planner.microbatch.cut import Cut
from planner.microbatch.errors import CoupledError, NotExactError
from planner.microbatch.pairs import Pair, pair
from planner.microbatch.refusals import taken_for_batch
from planner.microbatch.shares import Shares
from planner.microbatch.statistics.own import own_statistics
from planner.spec import WHOLE

ONE = (
    "a microbatch holds one example here, which JAX traces in another way: fewer microbatches may "
    "do"
)
MOST_NAMED = 3
"""Most arrays of the state that an error message names."""


def microbatched(
    function: Callable[..., Any],
    args: Sequence[Any],
    parts: int,
    whole: Traced | None = None,
    *,
    apart: bool = False,
    replicas: int = 1,
    statistics: str = WHOLE,
) -> Callable[..., Any]:
    """A step that computes what ``function`` does, in ``parts`` consecutive microbatches.

    Args:
        function: a step of pytrees of arrays.
        args: its arguments, or ShapeDtypeStructs.
        parts: number of microbatches, 1 or more.
        whole: the step's trace for ``args``, if available.
        apart: whether sums are only combined after the loop and the loop has no barriers, so that
            its parts can be separated (``planner.stages``).
        replicas: number of groups of examples that are accumulated separately until the loop ends.
            If each group has its own devices, gradients are reduced once instead of in every
            microbatch; with one microbatch, once instead of in every iteration of the step's loops.
        statistics: with ``PER_MICROBATCH``, each microbatch has its own statistics if examples
            depend on each other, see ``planner.microbatch.statistics.own``; otherwise such a step
            is refused.

    Returns:
        A function of the same arguments, which is rewritten again for other shapes. Its attribute
        ``coupled`` lists the lines of the user's code where examples depend on each other.

    Raises:
        NotExactError: the results would not be equal, or equality could not be proved.
        RequestError: no argument is a batch, or ``parts`` does not divide it.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise RequestError(f"microbatches={parts!r}: expected a whole number from 1 on")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise RequestError(f"replicas={replicas!r}: expected a whole number from 1 on")
    if parts == 1 and replicas == 1:
        return function
    exact = statistics == WHOLE
    if not exact and (apart or replicas > 1):
        raise RequestError(
            f"statistics={statistics!r} goes with microbatches alone; leave "
            + ("stages" if apart else f"replicas={replicas}")
            + " out"
        )
    shares = Shares(parts, replicas)

    def cut(args: Sequence[Any], whole: Traced | None = None) -> Cut:
        whole = trace(function, args) if whole is None else whole
        places = example_places(whole)
        try:
            return _rewritten(function, args, shares, apart, exact, whole, places)
        except (NotExactError, RequestError) as error:
            with contextlib.suppress(NotExactError, RequestError):
                if any(places.values()):
                    first = dict.fromkeys(places, 0)
                    return _rewritten(function, args, shares, apart, exact, whole, first)
            other = added_apart(function, whole, places.keys())
            if other is None:
                raise error from None
            return _rewritten(other, args, shares, apart, exact, trace(other, args), places)

    first = cut(abstract(args), whole)
    step = by_shapes(function, args, first, cut)
    step.coupled = first.coupled  # type: ignore[attr-defined]
    return step


def _rewritten(
    function: Callable[..., Any],
    args: Sequence[Any],
    shares: Shares,
    apart: bool,
    exact: bool,
    whole: Traced,
    places: Mapping[int, int],
) -> Cut:
    """``places``: the example dimension of each input that holds examples, by position."""
    size = _examples(whole, places)
    if size % shares.count:
        times = f" times replicas={shares.replicas}" if shares.replicas > 1 else ""
        raise RequestError(
            f"microbatches={shares.turns}{times} does not divide the batch: "
            f"{whole.graph.input_paths[min(places)]} holds {size} examples; choose a divisor of "
            f"{size}"
        )
    batch, graph = sorted(places), whole.graph
    less = with_examples(graph, places, size // shares.count)
    try:
        small = trace(function, reshaped(args, less))
    except ModelError as error:
        keyed = keys_of_examples(whole, size)
        if keyed and not places.keys() >= set(keyed):
            places = {**places, **dict.fromkeys(keyed, 0)}
            return _rewritten(function, args, shares, apart, exact, whole, places)
        raise NotExactError(
            "this step can't be cut into microbatches: it can't be traced with "
            f"{size // shares.count} examples in place of {size}, as if that number "
            f"were written in it{_in_state(graph, size)}: "
            f"{raised(error.__cause__ or error)}"
        ) from error
    if small.out_tree != whole.out_tree or small.in_tree != whole.in_tree:
        raise NotExactError("the results of a microbatch have another structure")
    one = small.jaxpr
    try:
        step = pair(whole.jaxpr, one)
    except NotExactError as error:
        if size != shares.count:
            raise
        try:
            double = trace(function, reshaped(args, with_examples(graph, places, 2 * size))).jaxpr
            one = of_one(whole.jaxpr, double, size)
            step = pair(whole.jaxpr, one)
        except (ModelError, NotExactError):
            raise NotExactError(f"{error}; {ONE}") from None
    try:
        step, classes = _classified(step, batch, whole, exact=exact, figures=exact and not apart)
    except CoupledError as error:
        alone = shares.replicas == 1 and not apart
        own = alone and _takes_own(whole, step, batch, shares)
        arguments = taken_for_batch(step, set(batch), error.operands)
        paths = [graph.input_paths[k] for k in arguments]
        if paths and len({graph.input_paths[k].partition("]")[0] for k in batch}) > 1:
            what = f"return {' and '.join(paths)} with the state if it holds no examples"
            raise error.with_help(what, own) from None
        raise (error if own else error.without_own()) from None
    except NotExactError as error:
        if size != shares.count:
            raise
        raise NotExactError(f"{error}; {ONE}") from None
    axes = example_axes(whole.jaxpr, one) if shares.replicas > 1 else frozenset()
    if classes.coupled and one is not small.jaxpr:
        raise NotExactError(
            "this step can't be cut into microbatches of one example with statistics of their own "
            f"({classes.coupled[0]}): take fewer microbatches"
        )
    own_stats = own_statistics(step, classes, graph, shares.count) if classes.coupled else None
    if own_stats is not None:
        step, classes = own_stats.step, own_stats.found
    elif not exact:  # nothing couples examples
        classes = classify(step, batch, whole.jaxpr)
    return Cut.of(whole, step, classes, batch, shares, apart, axes, own_stats)


def _classified(
    step: Pair, batch: Sequence[int], whole: Traced, *, exact: bool, figures: bool
) -> tuple[Pair, Classes]:
    """The step and its classes. What trains nothing may depend on all examples at once
    (``figures``), where that is enough to cut the step; its errors are those without."""
    if figures:
        with contextlib.suppress(NotExactError):
            parted = in_two_parts(step)
            classes = classify(parted, batch, whole.jaxpr, figures=True)
            if {step.outputs[o] for _, o in whole.graph.ties}.isdisjoint(classes.figures):
                return parted, classes
    return step, classify(step, batch, whole.jaxpr, exact=exact)


def with_examples(graph: Graph, places: Mapping[int, int], size: int) -> dict[int, tuple[int, ...]]:
    """Shapes of arguments, by position, with another number of examples; ``places``: see
    ``example_places``."""
    shapes = {k: graph.values[graph.inputs[k]].shape for k in places}
    return {k: (*shapes[k][:d], size, *shapes[k][d + 1 :]) for k, d in places.items()}


def _takes_own(whole: Traced, step: Pair, batch: Sequence[int], shares: Shares) -> bool:
    """Whether a step that couples examples can run with per-microbatch statistics."""
    try:
        classes = classify(step, batch, whole.jaxpr, exact=False)
        own_stats = own_statistics(step, classes, whole.graph, shares.count)
        Cut.of(whole, own_stats.step, own_stats.found, batch, shares, False, frozenset(), own_stats)
    except NotExactError:
        return False
    return True


def _in_state(graph: Graph, size: int) -> str:
    """Text that names arrays of the state with one row per example; empty if there are none."""
    rows = [graph.values[v] for v in graph.state]
    names = [v.name for v in rows if v.shape[:1] == (size,)][:MOST_NAMED]
    if not names:
        return ""
    return (
        f" (or as rows of the state: {', '.join(names)}; what a result has the place, shape and "
        "dtype of counts as state: put such a result elsewhere if it is none)"
    )


def example_places(whole: Traced) -> dict[int, int]:
    """The example dimension of each argument with a row per example, by position. These are the
    fed arguments, and state with examples. Raises RequestError if nothing is fed."""
    graph = whole.graph
    fed = [k for k, v in enumerate(graph.inputs) if graph.values[v].role is Role.BATCH]
    fed = [k for k in fed if graph.values[graph.inputs[k]].shape]
    read = {v for op in graph.ops for v in op.inputs} | set(graph.outputs)
    fed = [k for k in fed if graph.inputs[k] in read] or fed
    if not fed:
        why = "no argument of the step is a batch: each comes back as a result or is a number"
        if any(graph.values[v].role is Role.ARGUMENT for v in graph.inputs):
            why = "nothing in this step, which trains nothing, distinguishes examples from weights"
        raise RequestError(
            f"{why}; pass the examples as an argument of their own, or leave out microbatches=, "
            "replicas= and pad_batch="
        )
    rows = [k for k, v in enumerate(graph.inputs) if graph.values[v].role is Role.EXAMPLES]
    inner = example_dims(graph, whole.rules)
    return {k: inner.get(graph.inputs[k], 0) for k in sorted({*fed, *rows})}


def batch_size(whole: Traced) -> int:
    """Number of examples of a step; raises RequestError if no argument holds examples, or if the
    arguments differ."""
    return _examples(whole, example_places(whole))


def _examples(whole: Traced, places: Mapping[int, int]) -> int:
    """Number of examples of the arguments; raises RequestError if they differ."""
    graph = whole.graph
    sizes = {
        graph.input_paths[k]: graph.values[graph.inputs[k]].shape[d] for k, d in places.items()
    }
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{path} has {n}" for path, n in sizes.items())
        raise RequestError(
            f"microbatches: the arguments hold different numbers of examples: {text}; put what "
            "belongs to one example in the same row of all of them, and what is no batch into the "
            "state or out of the arguments"
        )
    return next(iter(sizes.values()))


def keys_of_examples(whole: Traced, examples: int) -> list[int]:
    """The positions of arguments that hold one random key per example."""
    graph = whole.graph
    values = [graph.values[v] for v in graph.inputs]
    return [
        k
        for k, v in enumerate(values)
        if v.role is Role.KEY
        and v.shape[:1] == (examples,)
        and len(v.shape) > v.dtype.startswith("uint")  # a raw key is a row of numbers
        and graph.inputs[k] not in graph.next_values
    ]
