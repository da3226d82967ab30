"""The clock: closed forms against a simulation of single passes, hiding, and what adds up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import AnalyticCostModel, parse_cluster
from costmodels.schedule import (
    SCHEDULES,
    Overlap,
    Pipeline,
    Place,
    StageSeconds,
    bubble_share,
    hiding_share,
    step_seconds,
)
from tests.costmodels.pipeline_simulator import (
    Simulated,
    Task,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
)

ORDERS: dict[str, Callable[[int, int, int], list[list[Task]]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}
COUNTS = [
    Pipeline(p, m, v, name)
    for p in (1, 2, 3, 4, 8)
    for m in (1, 2, 3, 4, 8, 9, 16, 32)
    for name in SCHEDULES
    for v in ((2, 3, 4) if name == "interleaved" else (1,))
    if name != "interleaved" or m % p == 0
]
seconds = st.floats(0.0, 10.0)
shares = st.floats(0.0, 1.0)
works = st.builds(StageSeconds, seconds, seconds, seconds, seconds, seconds)


def simulated(
    how: Pipeline, forward_s: list[float], backward_s: list[float], sending: bool = False
) -> Simulated:
    """A pipeline with the passes of each stage; a stage that sends is busy with that."""
    p, v = how.stages, how.virtual
    last, x = p * v - 1, how.transfer_s if sending else 0.0
    forward = [forward_s[c % p] / v + (x if c < last else 0.0) for c in range(p * v)]
    backward = [backward_s[c % p] / v + (x if c else 0.0) for c in range(p * v)]
    return simulate(ORDERS[how.schedule](p, how.microbatches, v), forward, backward)


def test_every_schedule_is_simulated() -> None:
    assert set(ORDERS) == set(SCHEDULES)
    assert {how.schedule for how in COUNTS if how.stages > 2} == set(SCHEDULES)


@pytest.mark.parametrize("how", COUNTS, ids=str)
def test_equal_stages_take_what_the_simulation_takes(how: Pipeline) -> None:
    p = how.stages
    found = step_seconds([StageSeconds(3.0)] * p, how)
    truth = simulated(how, [1.0] * p, [2.0] * p)
    assert found.step_s == pytest.approx(truth.end_s)
    assert found.bubble_s == pytest.approx(truth.end_s - 3.0 * how.microbatches)
    share = bubble_share(p, how.microbatches, how.virtual, how.schedule)
    assert share == pytest.approx(found.bubble_s / found.compute_s)
    assert how.in_flight() == tuple(n / how.virtual for n in truth.in_flight)


@given(st.data())
def test_unequal_stages_are_bounded(data: st.DataObject) -> None:
    """Backward takes the same multiple of forward in all stages. The clock is GPipe's time, and no
    less than that of 1F1B; the slowest stage's passes and those before it no schedule saves. The
    order of interleaved stages is fixed: with slow stages at both ends of fast ones it takes up to
    2 % longer than the clock (the worst of 6,000: stages of 3, 0.1, 0.5, 0.1, 0.5 and 3 s)."""
    p, v = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 4))
    m = p * data.draw(st.integers(1, 3))
    forward = data.draw(st.lists(st.floats(0.1, 3.0), min_size=p, max_size=p))
    ratio = data.draw(st.floats(0.5, 3.0))
    backward = [ratio * f for f in forward]
    stages = [StageSeconds(f + b) for f, b in zip(forward, backward, strict=True)]
    whole = [s.compute_s for s in stages]
    for name in SCHEDULES:
        how = Pipeline(p, m, v if name == "interleaved" else 1, name)
        found = step_seconds(stages, how).step_s
        truth = simulated(how, forward, backward)
        least = max(m * whole[s] + sum(whole[:s]) / how.virtual for s in range(p))
        assert least <= truth.end_s * (1 + 1e-9)
        assert truth.end_s <= found * (1.03 if name == "interleaved" else 1 + 1e-9)
        if name == "gpipe":
            assert truth.end_s == pytest.approx(found)


@pytest.mark.parametrize("how", [h for h in COUNTS if h.stages > 1], ids=str)
def test_transfers_against_the_simulation(how: Pipeline) -> None:
    """A stage that sends is busy, and sends over real borders only. Exact in GPipe. Too much in the
    others: by one transfer in 1F1B, by two for each stage in the interleaved order; of
    two stages, which send one way each, by one for each chunk of a microbatch."""
    how = dataclasses.replace(how, transfer_s=0.25)
    p, m, v = how.stages, how.microbatches, how.virtual
    found = step_seconds([StageSeconds(3.0)] * p, how)
    truth = simulated(how, [1.0] * p, [2.0] * p, sending=True)
    assert found.step_s == pytest.approx(3.0 * (m + (p - 1) / v) + 0.5 * (m * v + p - 2))
    much = {"gpipe": 0, "1f1b": m if p == 2 else 1, "interleaved": m * v if p == 2 else 2 * p}
    over = (found.step_s - truth.end_s) / how.transfer_s
    assert -1e-6 <= over <= much[how.schedule] + 1e-6


@given(works, st.builds(Overlap, shares, shares, shares), seconds)
def test_one_stage_and_one_microbatch(work: StageSeconds, overlap: Overlap, fixed_s: float) -> None:
    """To the last bit: plans show these figures."""
    found = step_seconds([work], overlap=overlap, fixed_s=fixed_s)
    compute = work.compute_s + fixed_s
    communication = work.waited_s + (work.ahead_s + work.behind_s)
    could = overlap.waited * work.waited_s + overlap.ahead * work.ahead_s
    could += overlap.behind * work.behind_s
    assert overlap.hideable_s(work) == pytest.approx(could, rel=1e-12, abs=1e-300)
    hidden = min(overlap.hideable_s(work), compute)
    assert found.fixed_s + found.compute_s == compute
    assert found.communication_s == communication
    assert found.hidden_s == hidden
    assert found.step_s == compute + communication - hidden + work.wait_s
    assert found.bubble_s == found.transfer_s == 0.0


@given(st.data())
def test_parts_add_up_and_nothing_hides_twice(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    stages = data.draw(st.lists(works, min_size=p, max_size=p))
    overlap = data.draw(st.builds(Overlap, shares, shares, shares))
    once, fixed_s = data.draw(works), data.draw(seconds)
    found = step_seconds(stages, Pipeline(p, m), overlap, once, fixed_s)
    assert 0 <= found.hidden_s <= found.fixed_s + found.compute_s - once.compute_s + 1e-9
    exposed = found.exposed
    assert min(dataclasses.astuple(exposed)) >= 0
    total = exposed.waited_s + exposed.ahead_s + exposed.behind_s + exposed.once_s
    assert total == pytest.approx(found.exposed_s, abs=1e-9)
    parts = found.fixed_s + found.compute_s + total + found.wait_s + found.bubble_s
    assert found.step_s == pytest.approx(parts, abs=1e-9)
    if p == 1:
        linear = m * overlap.linear_s(stages[0].compute_s, stages[0].communication)
        assert linear <= found.step_s + 1e-9


def test_what_comes_once_hides_under_the_last_microbatch() -> None:
    """Two of its ten seconds are free there: the microbatch's own gathers hide under four."""
    work, once = StageSeconds(6.0, ahead_s=5.0), StageSeconds(1.0, 2.0, 0.0, 10.0, 0.5)
    found = step_seconds([work], Pipeline(1, 3), Overlap(0.5, 0.8, 0.8), once)
    assert found.compute_s == 19.0
    assert found.communication_s == 27.0
    assert found.hidden_s == pytest.approx(4.0 + 4.0 + 6.0)
    assert found.exposed.once_s == pytest.approx(2.0 + 10.0 - 8.0 * 6.0 / 12.0)
    assert found.wait_s == 0.5
    early = step_seconds([work], Pipeline(1, 3), Overlap(0.5, 0.8, 0.8), once, fixed_s=9.0)
    assert early.step_s == pytest.approx(found.step_s + 9.0)  # the start is not before the last


def test_the_slowest_stage_counts_with_its_head() -> None:
    """Three stages of 2 s and a last one of 3 s: 5 microbatches there, a ramp of the others."""
    found = step_seconds([StageSeconds(2.0)] * 3 + [StageSeconds(3.0)], Pipeline(4, 5))
    assert (found.compute_s, found.bubble_s) == (15.0, 6.0)
    waiting = step_seconds([StageSeconds(2.0), StageSeconds(1.0, wait_s=4.0)], Pipeline(2, 2))
    assert (waiting.compute_s, waiting.wait_s, waiting.bubble_s) == (2.0, 8.0, 2.0)


def test_a_late_host_holds_up_its_device() -> None:
    work, overlap = StageSeconds(2.0, 1.0, 1.0), Overlap(0.5, 1.0, 0.0)
    assert work.late_s(2.0, overlap) == 0.0
    assert work.late_s(4.0, overlap) == pytest.approx(4.0 - 2.5)


def test_shares_of_a_model_and_their_linear_form() -> None:
    overlap = Overlap.of(AnalyticCostModel(parse_cluster("h100:8")))
    assert overlap == Overlap(0.3, 0.7, 0.7)
    assert [overlap.share(p) + overlap.exposed(p) for p in Place] == [1.0, 1.0, 1.0]
    one, overlap = np.ones((2, 3)), Overlap(0.3, 0.7, 0.2)
    total = 1 + 0.7 * 2 + 0.3 * 3 + 0.8 * 4
    assert overlap.linear_s(one, (2 * one, 3 * one, 4 * one)) == pytest.approx(total + 0 * one)
    assert hiding_share(1.0, 4.0) == 0.25
    assert hiding_share(0.0, 0.0) == 1.0


def test_what_cannot_be_sent_takes_forever() -> None:
    """Infinite seconds stay infinite, not undefined; compute still hides what it can."""
    found = step_seconds([StageSeconds(1.0, math.inf)], Pipeline(1, 2), Overlap(0.5, 0.5, 0.5))
    assert found.step_s == found.exposed.waited_s == math.inf
    assert found.hidden_s == 2.0


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0,), "stages is 0: it must be at least 1"),
        ((2, 0), "microbatches is 0"),
        ((2, 2, 0), "virtual is 0"),
        ((2, 2, 1, "2f2b"), "no schedule '2f2b': use one of gpipe, 1f1b, interleaved"),
        ((2, 2, 2), "'1f1b' runs one chunk per device, not 2: use 'interleaved'"),
        ((2, 2, 1, "interleaved"), "at least 2 chunks per device"),
        ((4, 6, 2, "interleaved"), "a multiple of 4 microbatches, not 2 and 6"),
    ],
)
def test_pipelines_that_cannot_run(counts: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Pipeline(*counts)


def test_work_of_other_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="work of 1 stages for a pipeline of 2"):
        step_seconds([StageSeconds()], Pipeline(2, 2))
