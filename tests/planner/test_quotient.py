"""The quotient: what is found on it holds for the whole step, number by number."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import AnalyticCostModel, parse_cluster
from costmodels.collectives import _counted_per_node, _members_per_node
from planner.annotate import Pin
from planner.cost.batched import price_family
from planner.cost.pricing import price, unfolded
from planner.graph.trace import trace
from planner.plan.contents.rows import MeshVerdict
from planner.plan.plan import Plan
from planner.planning import make_plan
from planner.search import SEARCHES, evaluate, lower_bound
from planner.search.folding.folding import fold
from planner.search.relax.family import Family, node_bound, relax
from planner.space.decisions.host_memory import Hosted
from planner.space.groups import Group, GroupLink, build_groups
from planner.spec import enumerate_meshes, parse_mesh
from planner.step.analysis import Analysis, analyse
from planner.step.classes import Quotient, fold_analysis
from planner.step.facts import Facts, Reduction
from planner.step.feeding import Fed
from planner.step.kernels.costs import Work
from planner.step.peak_moments import worst_moments

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("mlp", "gpt", "gpt_linen_scan", "moe", "lstm", "resnet", "llama")


@cache
def step_of(name: str) -> tuple[Any, Any]:
    for room in ("examples", "benchmarks"):
        if str(ROOT / room) not in sys.path:
            sys.path.insert(0, str(ROOT / room))
    if name == "llama":
        import decoders

        small = decoders.Llama(layers=5, dim=256, heads=8, kv_heads=4, ffn=512, vocab=512, seq=64)
        return decoders.build(small)
    module = __import__(name)
    return module.train_step, module.example_args()


@cache
def quotient_of(name: str) -> Quotient:
    function, args = step_of(name)
    traced = trace(function, args)
    rules = traced.rules
    carried = {i for i, _ in traced.graph.ties}
    donated = [k in carried for k in range(len(traced.graph.inputs))]
    analysis: Analysis = analyse(traced.graph, rules, build_groups(traced.graph, rules), donated)
    return fold_analysis(analysis, (), inputs_differ=False)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=8", "data=2,model=4", "data=2,fsdp=2,model=2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_choice_costs_the_same_and_peaks_alike(name: str, mesh: str) -> None:
    quotient, model = quotient_of(name), AnalyticCostModel(parse_cluster("h100:8"))
    part = price(quotient.part, parse_mesh(mesh), model, 8e10)
    whole = price(quotient.whole, parse_mesh(mesh), model, 8e10)
    same = unfolded(quotient, part)
    assert all(
        np.array_equal(a, b) for a, b in zip(same.problem.cost_s, whole.problem.cost_s, strict=True)
    )
    random = np.random.default_rng(0)
    for k in range(6):
        choice = [int(random.integers(c.size)) if k else 0 for c in part.problem.cost_s]
        cost, peak, moment = evaluate(part.problem, choice)
        full = evaluate(whole.problem, quotient.unfold_choice(choice))
        assert cost == pytest.approx(full[0], rel=1e-12)
        assert peak == pytest.approx(full[1], rel=1e-12)
        held = [u for u in whole.problem.usages if u.start <= quotient.moment(moment) < u.end]
        at = sum(u.bytes[quotient.unfold_choice(choice)[u.node]] for u in held)
        assert at == pytest.approx(full[1], rel=1e-12)


@pytest.mark.parametrize("name", ["gpt", "gpt_linen_scan", "llama"])
def test_the_folding_of_prices_finds_hardly_more(name: str) -> None:
    """In repeated layers structure tells apart what prices tell apart, but for accidents."""
    quotient, model = quotient_of(name), AnalyticCostModel(parse_cluster("h100:8"))
    whole = price(quotient.whole, parse_mesh("data=2,model=4"), model, 8e10)
    by_price = fold(whole.problem)
    assert len(quotient.part.groups.groups) <= 1.2 * len(by_price.problem.cost_s) + 2


@pytest.mark.long
def test_layers_do_not_count() -> None:
    import decoders

    def size(layers: int) -> tuple[int, int, int]:
        small = decoders.Llama(
            layers=layers, dim=256, heads=8, kv_heads=4, ffn=512, vocab=512, seq=64
        )
        function, args = decoders.build(small)
        traced = trace(function, args)
        rules = traced.rules
        donated = [True] * len(traced.graph.inputs)
        found = analyse(traced.graph, rules, build_groups(traced.graph, rules), donated)
        part = fold_analysis(found, (), inputs_differ=False).part
        return len(part.groups.groups), len(part.groups.links), len(part.buffers)

    step_of("llama")
    assert size(8) == size(12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "moe", "lstm", "llama"])
def test_bounds_of_the_quotient_hold_for_the_whole(name: str) -> None:
    quotient, model = quotient_of(name), AnalyticCostModel(parse_cluster("h100:4"))
    for mesh in ("data=4", "data=2,model=2"):
        part = price(quotient.part, parse_mesh(mesh), model, math.inf)
        found = SEARCHES["dynamic_programming"](
            dataclasses.replace(unfolded(quotient, part).problem, levels=None), time_limit_s=5.0
        )
        assert lower_bound(part.problem, sweeps=12) <= found.cost_s * (1 + 1e-9)


CLUSTERS = ("h100:4x2", "cpu:12", "v5p:2x2x2")
QUICK = {
    *[("mlp", "h100:4x2"), ("moe", "cpu:12"), ("llama", "h100:4x2")],
    ("gpt_linen_scan", "v5p:2x2x2"),
}
"""Every program on one cluster: the others are left to ``make test-all``."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(("mlp", "moe", "llama", "gpt_linen_scan"), CLUSTERS)
    ],
)
def test_families_price_and_bound_every_mesh_as_it_is_alone(name: str, cluster: str) -> None:
    quotient, model = quotient_of(name), AnalyticCostModel(parse_cluster(cluster))
    every = enumerate_meshes(model.cluster.num_devices)
    for axes in (1, 2, 3):
        meshes = [m for m in every if len(m.sizes) == axes]
        family = price_family(quotient.part, meshes, model, [{}] * len(meshes))
        least = node_bound(Family(family.unary, ()))
        found = relax(family.problems(), 2)
        peaks = family.peaks(found.choice, math.inf)
        for k, mesh in enumerate(meshes):
            alone = price(quotient.part, mesh, model, math.inf)
            mine = family.own(k, math.inf)
            for one, other in zip(alone.sets, mine.sets, strict=True):
                assert np.array_equal(one.store, other.store)
                assert np.array_equal(one.use, other.use)
            cost, peak, _ = evaluate(alone.problem, family.own_choice(k, found.choice[k]))
            assert found.cost_s[k] == pytest.approx(cost, rel=1e-9)
            scalars = quotient.part.scalar_bytes
            assert peaks[k] == pytest.approx(peak + scalars, rel=1e-9)
            best = SEARCHES["recursive_programming"](alone.problem)
            upper = min(best.cost_s, cost) * (1 + 1e-9)
            assert least[k] <= upper and found.bound_s[k] <= upper
            assert least[k] <= found.bound_s[k] * (1 + 1e-9) or found.bound_s[k] <= upper


@pytest.mark.long
def test_no_mesh_that_was_pruned_holds_a_better_plan() -> None:
    function, args = step_of("lstm")
    plan = make_plan(function, *args, cluster="h100:8x8", search="recursive_programming")
    pruned = [row.mesh for row in plan.meshes if row.verdict is MeshVerdict.PRUNED]
    assert pruned and len(plan.meshes) == len(enumerate_meshes(64))
    for row in pruned[:6]:
        mesh = dict(zip("abc", map(int, row.split("x")), strict=False))
        one = make_plan(
            function, *args, cluster="h100:8x8", mesh=mesh, search="recursive_programming"
        )
        assert plan.search.cost_s <= 1.03 * one.search.cost_s * (1 + 1e-9)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(2, 12), st.randoms(use_true_random=False))
def test_worst_moments_hold_the_peak(kinds: int, layers: int, random) -> None:  # type: ignore[no-untyped-def]
    layer = [
        (random.randrange(kinds), random.randrange(12), random.randrange(1, 30)) for _ in range(5)
    ]
    rows = [(k, 12 * n + at, 12 * n + at + long) for n in range(layers) for k, at, long in layer]
    rows += [(random.randrange(kinds), s, s + random.randrange(1, 90)) for s in (0, 7, 40)]
    worst = worst_moments(*zip(*rows, strict=True))
    for _ in range(5):
        nbytes = [random.randrange(10) for _ in range(kinds)]
        end = max(r[2] for r in rows)
        whole = [sum(nbytes[k] for k, s, e in rows if s <= t < e) for t in range(end)]
        kept = [0] * len(worst.kept)
        for kind, first, stop, count in worst.runs:
            for t in range(first, stop):
                kept[t] += count * nbytes[kind]
        assert kept == [whole[t] for t in worst.kept]
        assert max(kept) == max(whole)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
    st.integers(1, 15),
)
def test_members_per_node_are_those_counted(node: int, shape: list[int], mask: int) -> None:
    axes = tuple(k for k in range(len(shape)) if mask >> k & 1) or (0,)
    assert _members_per_node(node, tuple(shape), axes) == _counted_per_node(
        node, tuple(shape), axes
    )


def test_classes_taken_apart_are_counted() -> None:
    quotient = quotient_of("gpt")
    choice = list(quotient.unfold_choice([0] * len(quotient.part.groups.groups)))
    assert quotient.apart(choice) == 0
    several = next(c for c in quotient.color if quotient.color.count(c) > 1)
    first = quotient.color.index(several)
    choice[first] = 1
    assert quotient.apart(choice) == 1


# ---- facts: what differs is not folded ---------------------------------------------------


def two_layers(p: Any, x: jax.Array) -> Any:
    """Two equal layers, side by side, and two equal arrays that only pass through."""

    def loss(w: Any) -> jax.Array:
        return jnp.mean(jnp.max(x @ w["a"], 0) ** 2) + jnp.mean(jnp.max(x @ w["b"], 0) ** 2)

    value, grads = jax.value_and_grad(loss)(p["w"])
    return {"w": jax.tree.map(lambda p, g: p - 0.1 * g, p["w"], grads), "s": p["s"]}, value


def two_layers_analysis() -> Analysis:
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    pair = {"a": square, "b": square}
    traced = trace(two_layers, ({"w": pair, "s": pair}, jax.ShapeDtypeStruct((32, 64), "float32")))
    rules = traced.rules
    donated = [True] * len(traced.graph.inputs)
    return analyse(traced.graph, rules, build_groups(traced.graph, rules), donated)


def classes(analysis: Analysis, pins: Sequence[Pin] = ()) -> int:
    return len(fold_analysis(analysis, pins, inputs_differ=False).part.groups.groups)


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"other {value}"
    if isinstance(value, tuple):
        return tuple(map(changed, value)) if value else (1,)
    if isinstance(value, frozenset):
        return value ^ {0}
    raise NotImplementedError(f"a field of type {type(value).__name__}: say how to change it")


def swapped(items: Sequence[Any], at: int, **fields: Any) -> tuple[Any, ...]:
    new = dataclasses.replace(items[at], **fields)
    return (*items[:at], new, *items[at + 1 :])


def fields_of(kind: type, names_only: set[str]) -> list[str]:
    """The fields but those that only name the thing, which must exist."""
    every = [f.name for f in dataclasses.fields(kind)]
    assert names_only <= set(every)
    return [name for name in every if name not in names_only]


FACTS = [f.name for f in dataclasses.fields(Facts)]
LINK_FACTS = fields_of(GroupLink, {"a", "b", "value", "op", "operand", "sum"})
REDUCTION_FACTS = fields_of(Reduction, {"op"})
PIN_FACTS = fields_of(Pin, {"value", "origin", "rule"})


def with_facts(found: Analysis, at: int, **fields: Any) -> Analysis:
    return dataclasses.replace(found, facts=swapped(found.facts, at, **fields))


@pytest.mark.parametrize("name", FACTS)
def test_groups_that_differ_in_a_fact_are_not_folded(name: str) -> None:
    found = two_layers_analysis()
    home = found.groups.home[found.graph.inputs[0]]  # passes through: no neighbor differs
    assert home is not None
    others = {
        "work": (Work((), 1.0, (), "float32", "vector", 1.0),),
        "reductions": (Reduction(frozenset({0}), frozenset(), 4.0, 1.0, 0),),
        "stored": (4.0, (0, 1)),
        "decided": (("offload", (Hosted(4.0, frozenset(), 1.0),)),),
        "decisions": (("offload", 2),),
        "fed": (Fed(0.5, frozenset()),),
    }
    own = getattr(found.facts[home[0]], name)
    value = others[name] if name in others else changed(own)
    assert value != own
    assert classes(with_facts(found, home[0], **{name: value})) > classes(found)


def test_the_facts_of_a_group_hold_all_that_a_group_decides() -> None:
    own = {f.name for f in dataclasses.fields(Group)} - {"index", "ops", "name"}
    assert own <= set(FACTS)
    found = two_layers_analysis()
    for group, facts in zip(found.groups.groups, found.facts, strict=True):
        assert all(getattr(group, name) == getattr(facts, name) for name in own)


@pytest.mark.parametrize("name", LINK_FACTS)
def test_links_that_differ_in_a_fact_are_not_folded(name: str) -> None:
    found = two_layers_analysis()
    at = next(k for k, x in enumerate(found.groups.links) if x.a_use)
    value = changed(getattr(found.groups.links[at], name))
    links = swapped(found.groups.links, at, **{name: value})
    other = dataclasses.replace(found, groups=dataclasses.replace(found.groups, links=links))
    assert classes(other) > classes(found)


@pytest.mark.parametrize("name", REDUCTION_FACTS)
def test_reductions_that_differ_in_a_fact_are_not_folded(name: str) -> None:
    found = two_layers_analysis()
    at = next(k for k, x in enumerate(found.facts) if x.reductions)
    (first, *_) = found.facts[at].reductions
    mine = swapped(found.facts[at].reductions, 0, **{name: changed(getattr(first, name))})
    assert classes(with_facts(found, at, reductions=mine)) > classes(found)


@pytest.mark.parametrize("name", PIN_FACTS)
def test_pins_that_differ_in_a_fact_are_not_folded(name: str) -> None:
    found = two_layers_analysis()
    pins = [Pin(v, ("data",), "here") for v in found.graph.inputs[:2]]
    other = swapped(pins, 0, **{name: changed(getattr(pins[0], name))})
    assert classes(found, other) > classes(found, pins)


def test_each_of_two_equal_arrays_can_be_offloaded() -> None:
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    for name in "ab":
        plan = make_plan(
            lambda p, x: (p, jnp.mean(x)),
            {"a": square, "b": square},
            jax.ShapeDtypeStruct((256, 1024), jnp.float32),
            cluster="h100:8",
            offload=f"'{name}'",
        )
        away = [leaf.path for leaf in plan.inputs if leaf.memory == "pinned_host"]
        assert away == [f"[0]['{name}']"]


def test_whole_below_tells_arrays_of_one_shape_by_their_bytes() -> None:
    state = {n: jax.ShapeDtypeStruct((64, 64), t) for n, t in (("a", "float32"), ("b", "int8"))}
    plan = make_plan(
        lambda p, x: (p, jnp.mean(x)),
        state,
        jax.ShapeDtypeStruct((256, 64), jnp.float32),
        cluster="h100:8",
        zero=3,
        whole_below=10_000,
    )
    assert [bool(leaf.spec.axes) for leaf in plan.inputs[:2]] == [True, False]


@pytest.mark.long
def test_equal_layers_differ_where_memory_asks_for_it() -> None:
    """Neither weight fits whole beside the other; the plan may not be called the best before one
    of them was tried whole."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return sum((jnp.square(x @ w).sum() for w in weights), jnp.zeros(()))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    arguments = [jnp.ones((256, 256)) for _ in range(2)], jnp.ones((8, 256))

    def planned(**options: Any) -> Plan:
        return make_plan(step, *arguments, cluster="h100:8", mesh="data=8", **options)

    memory = 0.97 * planned().prediction.peak_bytes
    exact = planned(memory=memory, search="ilp").search
    fast = planned(memory=memory, search="recursive_programming").search
    assert fast.cost_s > exact.cost_s >= fast.lower_bound_s
    assert planned(memory=memory).search.cost_s == exact.cost_s
