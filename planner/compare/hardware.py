"""One step on several clusters, with several batches: time, throughput, utilization and dollars.

Model flop utilization (MFU; Chowdhery et al. 2022, "PaLM", section 4.1) is the time that the
products of the step as written would take at the peak of all devices, over the predicted step time.
Rematerialization that a plan adds does not count; that of the step itself does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels import Cluster, parse_cluster
from costmodels.prices import Price
from planner.advice.batch import batch_leaves
from planner.arguments.calls import bind
from planner.errors import MemoryLimitError, MeshwrightError, RequestError
from planner.graph.jaxpr.products import products_of
from planner.graph.trace import Traced, reshaped, trace
from planner.plan.contents.interval import step_range, ties
from planner.plan.plan import Plan
from planner.planning import MOST_PARTS, plan_tried
from planner.recipes import AUTO
from planner.request.axes.sequence import sequences
from planner.spec import PLAIN, REWRITINGS

HOUR_S = 3600.0
MILLION = 1e6
APART = 1.01
"""Throughputs or costs with a smaller ratio count as the same."""


@dataclass(frozen=True)
class Offer:
    """A step on a cluster with a batch.

    Attributes:
        cluster: as written.
        devices: number of devices.
        examples: number of examples of the batch; 0 if the step has no batch.
        tokens: number of tokens of the batch; 0 if its rows are not sequences.
        plan: None if there is no plan; ``refused`` says why.
        mfu: model flop utilization, 0 to 1.
        price: of a device; None if it is not known.
        pareto: whether no other offer is better in throughput or dollars per unit, by more than
            ``APART``, and as good in the other. Without a price, offers on the same kind of device
            are compared by device time instead of dollars.
    """

    cluster: str
    kind: str
    devices: int
    examples: int
    tokens: int
    plan: Plan | None
    mfu: float = 0.0
    price: Price | None = None
    refused: str = ""
    pareto: bool = False

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step; infinite without a plan."""
        return self.plan.prediction.step_s if self.plan is not None else math.inf

    @property
    def units(self) -> int:
        """Tokens of a step, or examples where there are none, or the step itself."""
        return self.tokens or self.examples or 1

    @property
    def per_second(self) -> float:
        """Units per second."""
        return self.units / self.step_s if self.step_s > 0 else 0.0

    @property
    def dollars_per_step(self) -> float:
        """What all devices cost for a step; NaN without a price."""
        if self.price is None or self.plan is None:
            return math.nan
        return self.price.dollars_per_hour * self.devices * self.step_s / HOUR_S

    @property
    def dollars_per_million(self) -> float:
        """What a million units cost; NaN without a price."""
        return MILLION * self.dollars_per_step / self.units


@dataclass(frozen=True)
class Offers:
    """All offers, in the order of clusters and then batches; ``unit``: tokens, examples or
    steps."""

    unit: str
    offers: tuple[Offer, ...]

    @property
    def fastest(self) -> Offer | None:
        """The one with the most units per second; None where no plan fits."""
        planned = [o for o in self.offers if o.plan is not None]
        return max(planned, key=lambda o: o.per_second, default=None)

    @property
    def tied_fastest(self) -> tuple[Offer, ...]:
        """Those that tie with the fastest in units per second."""
        return _tied(self.offers, self.fastest, lambda o: o.step_s / o.units)

    @property
    def cheapest(self) -> Offer | None:
        """The one with the fewest dollars per unit; None where no price is known."""
        priced = [o for o in self.offers if not math.isnan(o.dollars_per_million)]
        return min(priced, key=lambda o: o.dollars_per_million, default=None)

    @property
    def tied_cheapest(self) -> tuple[Offer, ...]:
        """Those that tie with the cheapest in dollars per unit."""
        return _tied(self.offers, self.cheapest, lambda o: o.dollars_per_million)


def compare_hardware(
    function: Callable[..., Any],
    *args: Any,
    clusters: Sequence[str | Cluster],
    batches: Sequence[int] = (),
    prices: Mapping[str, Price] | None = None,
    progress: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> Offers:
    """Plan a step on several clusters, with several batches.

    Args:
        function: the step.
        *args: its arguments, arrays or ShapeDtypeStructs.
        clusters: as for ``make_plan``.
        batches: numbers of examples; empty: that of the arguments. The step is traced again with
            the first dimension of the batch's arguments changed.
        prices: by kind of device (``costmodels.prices.load_prices``).
        progress: called with what is planned next.
        **options: of ``make_plan``.

    Raises:
        RequestError: the step has no batch to change, a batch is no positive number, or the
            request can't be met on any cluster. Offers that do not fit are part of the result.
        ModelError: the step can't be traced as it is.
    """
    bound = bind(
        function,
        args,
        static_argnums=options.pop("static_argnums", ()),
        static_argnames=options.pop("static_argnames", ()),
    )
    function, args = bound.function, bound.args
    described = [parse_cluster(c) if isinstance(c, str) else c for c in clusters]
    steps = _steps(function, args, batches)
    offers = []
    for cluster in described:
        smaller: list[Offer] = []
        for step in sorted(steps, key=lambda s: s.examples):
            progress(f"{cluster.text}, batch {step.examples}" if batches else cluster.text)
            like = next((o for o in reversed(smaller) if o.plan is not None), None)
            smaller.append(offer(function, step, cluster, prices or {}, options, like))
        by_size = {o.examples: o for o in smaller}
        offers += [by_size[step.examples] for step in steps]
    tokens = any(step.tokens for step in steps)
    unit = "tokens" if tokens else "examples" if any(s.examples for s in steps) else "steps"
    return Offers(unit, tuple(_marked(offers)))


@dataclass(frozen=True)
class Step:
    """The step with a batch.

    Attributes:
        args: its arguments, with these shapes.
        examples, tokens: see ``Offer``.
        flop: of its products, by dtype.
        batch: the shapes of the batch's arguments, by position.
        nbytes: bytes of all arguments.
        refused: why it can't be traced with this batch.
        made: a cache that its plans share.
    """

    args: tuple[Any, ...]
    examples: int
    tokens: int
    flop: Mapping[str, float]
    batch: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    nbytes: float = 0.0
    refused: str = ""
    made: dict[str, Any] = field(default_factory=dict)

    def ideal_s(self, cluster: Cluster) -> float:
        """Seconds of its products at the peak of all devices."""
        rate = cluster.device.matmul_flops_per_s
        return sum(flop / (rate(d) * cluster.num_devices) for d, flop in self.flop.items())


def _steps(
    function: Callable[..., Any], args: tuple[Any, ...], batches: Sequence[int]
) -> list[Step]:
    given = trace(function, args)
    if not batches:
        return [step_of(given, args)]
    leaves = batch_leaves(given.graph)
    if not leaves:
        raise RequestError(
            "batch: no argument of the step is a batch: each comes back as a result or is a number"
        )
    if wrong := [b for b in batches if isinstance(b, bool) or not isinstance(b, int) or b < 1]:
        raise RequestError(f"batch {wrong[0]!r}: expected a whole number of examples from 1 on")
    graph = given.graph
    shapes = {k: graph.values[graph.inputs[k]].shape for k in leaves}
    out = []
    for size in dict.fromkeys(batches):
        changed = reshaped(args, {k: (size, *shape[1:]) for k, shape in shapes.items()})
        try:
            out.append(step_of(trace(function, changed), changed))
        except MeshwrightError as error:
            why = f"the step can't be traced with {size} examples: {_line(error)}"
            out.append(Step(changed, size, 0, {}, refused=why))
    return out


def step_of(traced: Traced, args: tuple[Any, ...]) -> Step:
    """Batch, products and bytes of a traced step."""
    graph = traced.graph
    leaves = batch_leaves(graph)
    examples = graph.values[graph.inputs[leaves[0]]].shape[0] if leaves else 0
    rows = [graph.values[v].shape for v in sequences(graph)]
    tokens = max((math.prod(shape[:2]) for shape in rows if shape[0] == examples), default=0)
    shapes = {k: graph.values[graph.inputs[k]].shape for k in leaves}
    nbytes = float(sum(graph.values[v].nbytes for v in graph.inputs))
    return Step(args, examples, tokens, products_of(traced.jaxpr), shapes, nbytes)


def offer(
    function: Callable[..., Any],
    step: Step,
    cluster: Cluster,
    prices: Mapping[str, Price],
    options: Mapping[str, Any],
    like: Offer | None = None,
) -> Offer:
    """The plan of a step on a cluster, or why there is none.

    Args:
        function, step, cluster, prices, options: what to plan.
        like: an offer with a smaller batch on the same cluster. If that needed microbatches or
            rematerialization to fit, the larger batch gets more microbatches of the same size,
            and no other recipe is tried: equal microbatches have the same plan.
    """
    devices, kind = cluster.num_devices, cluster.device.kind
    price = prices.get(kind)
    place = (cluster.text, kind, devices, step.examples, step.tokens)
    if step.refused:
        return Offer(*place, None, 0.0, price, step.refused)
    try:
        plan = _as_before(function, step, cluster, options, like)
        if plan is None:
            plan = plan_tried(function, *step.args, cluster=cluster, made=step.made, **options).plan
    except MemoryLimitError as error:
        return Offer(*place, None, 0.0, price, _line(error))
    ideal_s = step.ideal_s(cluster)
    step_s = plan.prediction.step_s
    return Offer(*place, plan, ideal_s / step_s if step_s > 0 else 0.0, price)


def _as_before(
    function: Callable[..., Any],
    step: Step,
    cluster: Cluster,
    options: Mapping[str, Any],
    like: Offer | None,
) -> Plan | None:
    """The plan with ``like``'s number of microbatches times the ratio of the batches; None if
    ``like`` needed no recipe, has stages, or can't be scaled."""
    if like is None or like.plan is None or like.plan.recipe == PLAIN:
        return None
    if any(options.get(name) not in (None, AUTO) for name in REWRITINGS):
        return None
    recipe, times = like.plan.recipe, step.examples // like.examples
    count = recipe.microbatches * times
    if step.examples % like.examples or recipe.stages > 1 or count > MOST_PARTS:
        return None
    given: dict[str, Any] = {
        "microbatches": count,
        "replicas": recipe.replicas,
        "remat": recipe.remat,
        "chunks": recipe.chunks,
        "stages": 1,
        "mesh": like.plan.mesh,
    }
    try:
        planned = plan_tried(
            function, *step.args, cluster=cluster, made=step.made, **{**options, **given}
        )
    except RequestError:
        return None
    note = f"mesh and remat as for batch {like.examples}, with {times} times its microbatches"
    return dataclasses.replace(planned.plan, notes=(*planned.plan.notes, note))


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _marked(offers: Sequence[Offer]) -> list[Offer]:
    """The offers, with ``pareto`` set for those that no other beats in throughput and dollars."""

    def beaten(one: Offer) -> bool:
        rivals = [o for o in offers if o.plan is not None and o is not one]
        if one.price is None:  # device time instead of dollars
            rivals = [o for o in rivals if o.kind == one.kind]
            return any(
                _better(o, one, o.devices / o.per_second, one.devices / one.per_second)
                for o in rivals
            )
        return any(
            _better(o, one, o.dollars_per_million, one.dollars_per_million)
            for o in rivals
            if o.price is not None
        )

    return [dataclasses.replace(o, pareto=o.plan is not None and not beaten(o)) for o in offers]


def _tied(
    offers: Sequence[Offer], best: Offer | None, cost: Callable[[Offer], float]
) -> tuple[Offer, ...]:
    """Offers whose cost, which is proportional to the step time, ties with that of the best: on the
    same cluster by its ratio, on different ones if the likely ranges overlap."""

    def likely(one: Offer) -> tuple[float, float]:
        time_range = None if one.plan is None else step_range(one.plan)
        if time_range is None:
            return math.inf, -math.inf
        return time_range.interval.low * cost(one), time_range.interval.high * cost(one)

    def close(one: Offer, best: Offer) -> bool:
        if one.cluster == best.cluster and best.plan is not None:
            return ties(best.plan, cost(one), cost(best))
        (low, high), (least, most) = likely(one), likely(best)
        return low <= most and least <= high

    rivals = [o for o in offers if o is not best and o.plan is not None]
    return tuple(o for o in rivals if best is not None and close(o, best))


def _better(a: Offer, b: Offer, cost_a: float, cost_b: float) -> bool:
    """Whether a is as good as b in throughput and cost, and better in one of them by more than
    predictions can resolve."""
    good = a.per_second >= b.per_second and cost_a <= cost_b
    return good and (a.per_second > APART * b.per_second or APART * cost_a < cost_b)
