"""The smallest cluster of each kind of device that a step fits on, and its batch there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels import Cluster, parse_cluster, usual_sizes
from costmodels.prices import Price
from planner.arguments.calls import bind
from planner.compare.hardware import Offer, Step, offer, step_of
from planner.errors import MemoryLimitError, MeshwrightError
from planner.graph.trace import reshaped, trace
from planner.planning import plan_tried

KINDS = ("h100", "h200", "b200", "v5e", "v5p", "v6e")
"""Kinds of device that are tried if none is named."""
DOUBLED = 6
"""How often a batch is doubled, or halved, at most."""


@dataclass(frozen=True)
class Fit:
    """The smallest usual cluster of a kind of device.

    Attributes:
        kind: of the device.
        offer: the step on that cluster; None if it fits on none, and ``refused`` says why.
        at_once: examples of the largest batch that fits without microbatches, among the step's
            batch, its halves and its doubles; 0 if none fits, or the step has no batch.
    """

    kind: str
    offer: Offer | None
    at_once: int = 0
    refused: str = ""


def fit(
    function: Callable[..., Any],
    *args: Any,
    kinds: Sequence[str] = KINDS,
    prices: Mapping[str, Price] | None = None,
    progress: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> tuple[Fit, ...]:
    """Find the smallest cluster of each kind that a step fits on.

    Clusters are tried in the sizes that they are rented in (``costmodels.usual_sizes``), from the
    first that could hold the step's state and batch split over all devices.

    Args:
        function: the step.
        *args: its arguments, arrays or ShapeDtypeStructs.
        kinds: the kinds of device.
        prices: by kind (``costmodels.prices.load_prices``).
        progress: called with the name of what is planned next.
        **options: of ``make_plan``.

    Raises:
        RequestError, ModelError: as ``make_plan``, except for memory.
        ClusterError: a device or its usual sizes are unknown.
    """
    bound = bind(
        function,
        args,
        static_argnums=options.pop("static_argnums", ()),
        static_argnames=options.pop("static_argnames", ()),
    )
    function = bound.function
    clusters = {kind: [parse_cluster(text) for text in usual_sizes(kind)] for kind in kinds}
    step = step_of(trace(function, bound.args), bound.args)
    return tuple(
        _smallest(function, step, kind, sizes, prices or {}, progress, options)
        for kind, sizes in clusters.items()
    )


def _smallest(
    function: Callable[..., Any],
    step: Step,
    kind: str,
    clusters: Sequence[Cluster],
    prices: Mapping[str, Price],
    progress: Callable[[str], None],
    options: Mapping[str, Any],
) -> Fit:
    why = "the step's state and batch are larger than all its sizes"
    for cluster in clusters:
        if step.nbytes > cluster.num_devices * cluster.device.usable_bytes:
            continue
        progress(cluster.text)
        candidate = offer(function, step, cluster, prices, options)
        if candidate.plan is not None:
            progress(f"{cluster.text}, the largest batch")
            recipe = {
                "microbatches": 1,
                "remat": candidate.plan.remat,
                "chunks": candidate.plan.chunks,
            }
            return Fit(kind, candidate, _at_once(function, step, cluster, {**options, **recipe}))
        why = candidate.refused
    return Fit(kind, None, 0, why)


def _at_once(
    function: Callable[..., Any], step: Step, cluster: Cluster, options: Mapping[str, Any]
) -> int:
    """The largest batch that fits without microbatches."""

    def fits(examples: int) -> bool:
        changed = reshaped(
            step.args, {k: (examples, *shape[1:]) for k, shape in step.batch.items()}
        )
        try:
            plan_tried(function, *changed, cluster=cluster, **options)
        except MemoryLimitError:
            return False
        except MeshwrightError:  # such as a batch size that the step's code fixes
            return examples == step.examples
        return True

    if not step.examples:
        return 0
    if not fits(step.examples):
        return next((n for n in _halved(step.examples) if fits(n)), 0)
    best = step.examples
    for k in range(1, DOUBLED + 1):
        if not fits(step.examples << k):
            break
        best = step.examples << k
    return best


def _halved(examples: int) -> Iterator[int]:
    for k in range(1, DOUBLED + 1):
        if examples % (1 << k) == 0:
            yield examples >> k
