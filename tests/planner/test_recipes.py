"""Which recipe is chosen: against all of them, on grids of known costs and on real steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodels import parse_cluster
from executor import parallelize
from planner import make_plan
from planner.errors import MemoryLimitError, RequestError
from planner.planning.open_recipes import best_planned
from planner.recipes import CLOSE, PLAIN, Outcome, Recipe, search_recipes

COUNTS = (1, 2, 4, 8, 16)
POLICIES = ("none", "64", "512", "4096", "full")


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layered(params: Any, x: Any) -> Any:
    """A scan of wide layers, by plain gradient descent."""

    def loss(p: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, p)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


LAYERS = ((struct(8, 256, 1024), struct(8, 1024, 256)), struct(65536, 256))


def grid(draw: random.Random) -> tuple[dict[Recipe, float], dict[Recipe, bool]]:
    """Seconds that grow along both ways, and memory that shrinks along both."""
    cut = [0.0, *itertools.accumulate(draw.uniform(0.0, 1.0) for _ in COUNTS[1:])]
    again = [0.0, *itertools.accumulate(draw.uniform(0.1, 3.0) for _ in POLICIES[1:])]
    limit = draw.uniform(0.0, 8.0)
    costs, fits = {}, {}
    for (i, m), (j, p) in itertools.product(enumerate(COUNTS), enumerate(POLICIES)):
        costs[Recipe(m, p)] = 10.0 + cut[i] + again[j]
        fits[Recipe(m, p)] = 8.0 - 1.1 * i - 1.3 * j <= limit
    return costs, fits


@pytest.mark.parametrize("seed", range(200))
def test_the_walk_finds_the_best_of_all(seed: int) -> None:
    """Looks that are not needed are saved; what is found is as good as all looks would find."""
    costs, fits = grid(random.Random(seed))
    looks: list[Recipe] = []

    def look(recipe: Recipe, known_s: float) -> Outcome[None]:
        looks.append(recipe)
        cost = costs[recipe] if fits[recipe] and costs[recipe] < known_s else math.inf
        return Outcome(cost, fits[recipe], None)

    best, seen = search_recipes(COUNTS, [(1, POLICIES)], look)
    least = min((c for r, c in costs.items() if fits[r]), default=math.inf)
    assert len(looks) == len(set(looks)) == len(seen)
    if math.isinf(least):
        assert best is None
        return
    assert best is not None and fits[best]
    assert costs[best] <= 1.01 * least or slower_twice_in_a_row(costs, fits, best, least)
    assert len(looks) <= 14


@pytest.mark.parametrize("seed", range(200))
def test_what_recipes_take_at_least_saves_looks_and_loses_nothing(seed: int) -> None:
    """Bounds of recipes that were planned, bounds without a memory limit, and memory floors of the
    same recipe in fewer microbatches."""
    costs, fits = grid(random.Random(seed))
    draw = random.Random(seed + 1000)

    def walk(known: bool) -> tuple[float, int]:
        def look(recipe: Recipe, known_s: float) -> Outcome[None]:
            bound_s = costs[recipe] * draw.uniform(0.95, 1.0) if known else 0.0
            floor = draw.uniform(0.5, 1.0) + (0.0 if fits[recipe] else 1.0)
            if not fits[recipe]:
                return Outcome(math.inf, False, None, math.inf, 1.0 + 0.1 * (floor - 1.0))
            cost = costs[recipe] if costs[recipe] < known_s else math.inf
            return Outcome(cost, True, None, bound_s if cost < math.inf else math.inf, floor)

        least_of = costs.__getitem__ if known else lambda _: 0.0
        best, seen = search_recipes(COUNTS, [(1, POLICIES)], look, PLAIN, least_of)
        return math.inf if best is None else costs[best], len(seen)

    (with_s, few), (without_s, many) = walk(True), walk(False)
    assert few <= many and with_s <= 1.0101 * without_s


@pytest.mark.parametrize("seed", range(100))
def test_the_walk_ends_close_to_what_every_recipe_takes(seed: int) -> None:
    costs, fits = grid(random.Random(seed))
    least_s = min(costs.values())

    def walk(least_s: float) -> tuple[float, int]:
        def look(recipe: Recipe, known_s: float) -> Outcome[None]:
            cost = costs[recipe] if fits[recipe] and costs[recipe] < known_s else math.inf
            return Outcome(cost, fits[recipe], None)

        best, seen = search_recipes(
            COUNTS, [(1, POLICIES), (8, POLICIES)], look, PLAIN, lambda _: least_s
        )
        return math.inf if best is None else costs[best], len(seen)

    costs |= {Recipe(r.microbatches, r.remat, chunks=8): c + 1 for r, c in costs.items()}
    fits |= {Recipe(r.microbatches, r.remat, chunks=8): f for r, f in fits.items()}
    (near_s, few), (far_s, many) = walk(least_s), walk(0.0)
    assert few <= many and (near_s == far_s or near_s <= CLOSE * least_s)
    if far_s <= CLOSE * least_s:
        assert near_s <= CLOSE * least_s and few < many


@pytest.mark.parametrize("seed", range(50))
def test_where_storing_takes_time_both_sides_of_the_best_are_tried(seed: int) -> None:
    """What loops store takes time, what is recomputed too: the best policy lies anywhere, with a
    slope on either side, and less rematerialization than what fits is no bound."""
    draw = random.Random(seed)
    bottom, border = draw.randrange(len(POLICIES)), draw.randrange(len(POLICIES))
    slope = [draw.uniform(0.5, 2.0) for _ in POLICIES]
    costs = {p: 10.0 + sum(slope[min(j, bottom) : max(j, bottom)]) for j, p in enumerate(POLICIES)}

    def look(recipe: Recipe, known_s: float) -> Outcome[None]:
        fits = POLICIES.index(recipe.remat) >= border
        cost = costs[recipe.remat]
        slow = cost >= known_s
        return Outcome(math.inf if slow or not fits else cost, fits, None, cost)

    best, _ = search_recipes((1,), [(1, POLICIES)], look, stores=True)
    assert best is not None and best.remat == POLICIES[max(border, bottom)]


@pytest.mark.parametrize("seed", range(50))
def test_of_what_waits_on_the_host_the_best_is_found(seed: int) -> None:
    """What is kept costs the time of the link, what is not is done again: the best lies between,
    in the fewest microbatches that fit. A plan that is known already is kept if it is faster."""
    draw = random.Random(seed)
    names = ("offload:32", "offload:256", "offload:4096", "offload")
    bottom, fewest = draw.randrange(4), draw.choice(COUNTS)
    costs = {
        Recipe(m, p): 10.0 + m + abs(j - bottom) * draw.uniform(0.5, 2.0)
        for m, (j, p) in itertools.product(COUNTS, enumerate(names))
    }

    def look(recipe: Recipe, known_s: float) -> Outcome[None]:
        fits = recipe.microbatches >= fewest
        return Outcome(costs[recipe] if fits and costs[recipe] < known_s else math.inf, fits, None)

    known = Recipe(1, "full")
    known_s = draw.uniform(9.0, 30.0)
    before = {known: Outcome(known_s, True, None)}
    best, seen = search_recipes(COUNTS, [(1, names)], look, known=(known, before))
    least = min(cost for r, cost in costs.items() if r.microbatches == fewest)
    assert best is not None and known in seen
    found_s = known_s if best == known else costs[best]
    assert found_s <= 1.0101 * min(least, known_s)
    assert len(seen) <= 1 + len(COUNTS) + len(names)


@pytest.mark.slow
def test_what_waits_on_the_host_is_chosen_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scanned decoder in one microbatch that memory slows down: with room on the host its output
    of attention waits there, without, more is computed again. Where microbatches are chosen, too,
    the fastest plan does not use the host: room there must not hide it."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    import llama

    sizes = {"layers": 8, "batch": 8, "seq": 4096, "vocab": 4096, "width": 1024, "hidden": 4096}
    config = dataclasses.replace(llama.SIZES["1b"], **sizes, heads=16, kv_heads=8)
    make_state, step, batch = llama.build(config)
    args = jax.eval_shape(make_state), batch
    asked: dict[str, Any] = {"cluster": "v6e:2x4", "donate_argnums": 0}
    one: dict[str, Any] = {**asked, "memory": "0.65GB", "microbatches": 1}
    plan = make_plan(step, *args, **one)
    assert plan.remat.startswith("offload:") and plan.chunks > 1
    assert plan.prediction.host_bytes > 0 and plan.prediction.peak_bytes <= 0.65e9
    other = make_plan(step, *args, **one, host_memory="1MB")
    assert not other.remat.startswith("offload") and other.prediction.host_bytes == 0
    assert plan.prediction.step_s < 0.98 * other.prediction.step_s
    tight = make_plan(step, *args, **asked, memory="0.7GB")
    without = make_plan(step, *args, **asked, memory="0.7GB", host_memory="1MB")
    assert tight.prediction.step_s < 1.01 * without.prediction.step_s


def slower_twice_in_a_row(
    costs: dict[Recipe, float], fits: dict[Recipe, bool], best: Recipe, least: float
) -> bool:
    """Whether the walk gave up by design: it looks past one slower recipe, not past two."""
    found = min((r for r in costs if fits[r]), key=lambda r: costs[r])
    away = POLICIES.index(best.remat) - POLICIES.index(found.remat)
    return away >= 3 and found.microbatches > best.microbatches and costs[best] <= 1.1 * least


def test_a_step_that_fits_is_left_as_it_is() -> None:
    plan = make_plan(layered, *LAYERS, cluster="h100:8")
    assert plan.recipe == PLAIN and not plan.recomputed


@pytest.mark.long
def test_a_step_that_does_not_fit_is_rewritten_and_the_plan_says_so() -> None:
    plain = make_plan(layered, *LAYERS, cluster="h100:8", mesh="data=8")
    limit = 0.4 * plain.prediction.peak_bytes
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8", "memory": limit}
    plan = make_plan(layered, *LAYERS, **options)
    assert plan.recipe != PLAIN and plan.prediction.peak_bytes <= limit
    assert any("the step does not fit as written" in note for note in plan.notes)
    costs = {}
    for count, policy in itertools.product((1, 2, 4, 8), ("none", "32", "64", "full")):
        try:
            costs[count, policy] = make_plan(
                layered, *LAYERS, microbatches=count, remat=policy, **options
            ).prediction.step_s
        except MemoryLimitError:
            continue
    assert plan.prediction.step_s <= 1.02 * min(costs.values())
    with pytest.raises(MemoryLimitError):
        make_plan(layered, *LAYERS, microbatches=1, remat="none", **options)


SLOW = parse_cluster("h100:4x2")
SLOW = dataclasses.replace(
    SLOW, network=dataclasses.replace(SLOW.network, bytes_per_s=SLOW.network.bytes_per_s / 16)
)
WIDE = (struct(16, 4096, 16384), struct(16, 16384, 4096))


@pytest.mark.long
def test_a_step_that_memory_makes_slow_is_compared_with_recipes() -> None:
    options: dict[str, Any] = {"cluster": SLOW, "memory": "12GB", "stages": 1}
    plan = make_plan(layered, WIDE, struct(16384, 4096), **options)
    plain = make_plan(
        layered, WIDE, struct(16384, 4096), **options, microbatches=1, remat="none", chunks=1
    )
    assert plan.recipe != PLAIN and plain.recipe == PLAIN  # it fits, too
    # by how much depends on what JAX keeps for the backward pass of a tanh
    assert plan.prediction.step_s < 0.8 * plain.prediction.step_s
    assert any("for lack of memory the step as written takes up to" in n for n in plan.notes)


@pytest.mark.long
def test_what_is_given_is_kept_and_the_rest_searched() -> None:
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8", "memory": 60e6}
    assert make_plan(layered, *LAYERS, microbatches=16, **options).microbatches == 16
    plan = make_plan(layered, *LAYERS, remat="full", **options)
    assert plan.remat == "full" and plan.microbatches > 1


@pytest.mark.long
def test_auto_looks_also_where_the_step_fits() -> None:
    plain = make_plan(layered, *LAYERS, cluster="h100:8")
    plan = make_plan(layered, *LAYERS, cluster="h100:8", microbatches="auto", remat="auto")
    assert "recipes planned" in plan.notes[-1]
    assert plan.prediction.step_s <= plain.prediction.step_s
    if plan.recipe != PLAIN:
        assert plan.prediction.step_s <= plain.prediction.step_s / 1.01


@pytest.mark.long
def test_when_nothing_fits_the_error_says_what_was_tried() -> None:
    said = (
        r"lowest peak tried is .* with 64 microbatches, remat \w+, (?s:.*)also tried: .* "
        r"microbatches, remat none.* offload; the least of them needs .* MB or more"
    )
    with pytest.raises(MemoryLimitError, match=said) as error:
        make_plan(layered, *LAYERS, cluster="h100:8", memory=12e6)
    with pytest.raises(MemoryLimitError) as plain:
        make_plan(
            layered, *LAYERS, cluster="h100:8", memory=12e6, microbatches=1, remat="none", chunks=1
        )
    assert 12e6 < error.value.least_bytes < 0.5 * plain.value.least_bytes


class Fake:
    """A row whose plan costs something else than a quick look found; None: it does not fit."""

    def __init__(self, cost_s: float | None) -> None:
        self.cost_s, self.searched, self.asked = cost_s, 0, 0

    @property
    def near_s(self) -> float:
        self.searched = 1
        return math.inf if self.cost_s is None else self.cost_s

    def planned(self, begun: float, tried: str = "") -> Any:
        self.asked += 1
        self.searched = 1
        if self.cost_s is None:
            raise MemoryLimitError("no", least_bytes=1, lower_bytes=1, limit_bytes=0)
        return SimpleNamespace(
            plan=SimpleNamespace(search=SimpleNamespace(cost_s=self.cost_s), name=self)
        )


@pytest.mark.parametrize(
    ("rows", "best", "planned"),
    [
        ([(1.0, 0.9, 1.0), (1.1, 0.9, 0.8)], 0, 1),  # a quick search that was right
        ([(1.0, 0.9, 1.2), (1.1, 0.9, 1.05)], 1, 2),  # one that did not
        ([(1.0, 0.9, 1.2), (1.1, 1.2, 1.0)], 0, 1),  # a bound that leaves no hope
        ([(1.0, 0.9, 1.0), (1.001, 0.9, 0.95)], 1, 2),  # two that a quick search can't order
        ([(1.0, 0.9, None), (1.1, 0.9, 1.3)], 1, 2),  # it does not fit after all
        ([(1.0, 0.9, 1.0), (1.09, 0.8, 0.9)], 1, 2),  # a bound that leaves much to a longer search
        ([(1.0, 0.9, 1.0), (1.2, 0.8, 0.9)], 0, 1),  # but 1.2 times as slow in the quick search
    ],
)
def test_recipes_are_planned_whole_while_a_look_promises_more(
    rows: list[tuple[float, float, float | None]], best: int, planned: int
) -> None:
    fakes: Any = [Fake(cost_s) for _, _, cost_s in rows]
    seen = {
        Recipe(2**k): Outcome(look_s, True, fakes[k], bound_s)
        for k, (look_s, bound_s, _) in enumerate(rows)
    }
    found: Any = best_planned(seen, 0.0, "")
    assert found.plan.name is fakes[best] and sum(f.searched for f in fakes) == planned
    assert sum(f.asked for f in fakes) in (1, planned)


def test_a_recipe_in_words() -> None:
    assert str(Recipe(8, "full", 4)) == "8 microbatches, remat full, 4 chunks"
    assert str(PLAIN) == ""


@pytest.mark.long
def test_a_number_of_microbatches_that_traces_to_another_program_is_left_out() -> None:
    """Of single examples this loss makes no mean; that is refused, and does not end the search."""

    def loss(p: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, p)
        return jnp.mean(h**2) if x.shape[0] > 4 else jnp.sum(jnp.sin(h[0]))

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    args = (LAYERS[0], struct(32, 256))
    with pytest.raises(RequestError):
        make_plan(step, *args, cluster="h100:8", microbatches=8)
    plain = make_plan(step, *args, cluster="h100:8")
    plan = make_plan(step, *args, cluster="h100:8", microbatches="auto", remat="auto")
    assert plan.prediction.step_s <= plain.prediction.step_s
    with pytest.raises(MemoryLimitError, match="also tried"):
        make_plan(step, *args, cluster="h100:8", memory=2.5e6)


@pytest.mark.long
def test_a_coupled_step_is_rematerialized_and_not_cut() -> None:
    def coupled(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, p)
            return jnp.mean((h - h.mean(0)) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    plain = make_plan(coupled, *LAYERS, cluster="h100:8", mesh="data=8")
    limit = 0.5 * plain.prediction.peak_bytes
    plan = make_plan(coupled, *LAYERS, cluster="h100:8", mesh="data=8", memory=limit)
    assert plan.microbatches == 1 and plan.remat != "none"
    assert "no microbatches: this step can't be cut" in plan.notes[-1]


@pytest.mark.parametrize("value", ["some", "1.5", 0, -2, True, 2.0])
def test_bad_numbers(value: Any) -> None:
    with pytest.raises(RequestError, match=r"microbatches=.*expected a whole number from 1 on"):
        make_plan(layered, *LAYERS, cluster="h100:8", microbatches=value)


@pytest.mark.long
@pytest.mark.devices
def test_a_choice_beside_an_option_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Microbatches are given, remat is not: the search adds it, and a warning says so."""
    run = parallelize(layered, cluster="cpu:8", mesh="data=8", memory=40e6, microbatches=2)
    run.prepare(LAYERS[0], struct(8192, 256))
    assert run.plan.microbatches == 2 and run.plan.remat != "none"
    assert any("remat='" in r.message and "microbatches" not in r.message for r in caplog.records)


@pytest.mark.long
@pytest.mark.devices
def test_parallelize_says_that_it_rewrote_the_step(caplog: pytest.LogCaptureFixture) -> None:
    draw = np.random.default_rng(0).normal
    params = tuple(jnp.asarray(0.05 * draw(size=x.shape), jnp.float32) for x in LAYERS[0])
    x = jnp.asarray(draw(size=(8192, 256)), jnp.float32)
    run = parallelize(layered, cluster="cpu:8", mesh="data=8", memory=70e6)
    _, found = run(params, x)
    np.testing.assert_allclose(found, jax.jit(layered)(params, x)[1], rtol=2e-5)
    assert run.plan.recipe != PLAIN
    assert any("does not fit in device memory as it is" in r.message for r in caplog.records)


@pytest.mark.parametrize(
    ("slower", "fill", "best"),
    [(1.005, 0.7, "512"), (1.02, 0.7, "512"), (1.04, 0.7, "64"), (1.02, 0.97, "64")],
)
def test_a_recipe_that_fills_the_memory_yields_to_one_as_fast(
    slower: float, fill: float, best: str
) -> None:
    costs = {"64": (10.0, 0.99), "512": (10.0 * slower, fill), "full": (13.0, 0.3)}

    def look(recipe: Recipe, known_s: float) -> Outcome[None]:
        if recipe.microbatches > 1:
            return Outcome(math.inf, True, None)
        if recipe.remat not in costs:
            return Outcome(math.inf, False, None)
        cost, fill = costs[recipe.remat]
        return Outcome(cost if cost < known_s else math.inf, True, None, 0.0, 0.0, fill)

    found, _ = search_recipes(COUNTS, [(1, ("none", "64", "512", "full"))], look)
    assert found is not None and found.remat == best
