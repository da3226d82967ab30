"""Schedules as data: closed forms, the other simulator, deadlocks, files."""

import json
import random
from pathlib import Path

import pytest

from costmodels.orders import (
    NAMES,
    DeadlockError,
    Order,
    OrderError,
    Task,
    Work,
    drawn,
    in_ticks,
    named_order,
    order_of_rows,
    read_order,
    rows_of,
    simulate,
    write_order,
)
from costmodels.schedule import Pipeline, StageSeconds, step_seconds
from tests.costmodels import pipeline_simulator as plain

PLAIN = {
    "gpipe": plain.gpipe,
    "1f1b": plain.one_forward_one_backward,
    "interleaved": plain.interleaved,
}
COUNTS = [(1, 3), (2, 2), (2, 5), (4, 8), (8, 16), (8, 64), (16, 128)]


@pytest.mark.parametrize(("p", "m"), COUNTS)
@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_clock_and_the_simulation_agree(name: str, virtual: int, p: int, m: int) -> None:
    if name == "interleaved" and m % p:
        pytest.skip("the schedule does not run such counts")
    order = named_order(name, p, m, virtual)
    done = simulate(order, [Work(1 / virtual, 1.5 / virtual, 0.5 / virtual)] * (p * virtual))
    how = Pipeline(p, m, virtual, name)
    assert done.step_s == pytest.approx(step_seconds([StageSeconds(3.0)] * p, how).step_s, rel=1e-9)
    assert [n / virtual for n in order.in_flight()] == list(how.in_flight())
    # written apart from it, for the clock's own tests
    passes = [1.0 / virtual] * (p * virtual)
    truth = plain.simulate(PLAIN[name](p, m, virtual), passes, [2.0 * t for t in passes])
    assert done.step_s == pytest.approx(truth.end_s, rel=1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 16), (8, 64), (16, 128)])
def test_zero_bubble_closed_forms(p: int, m: int) -> None:
    """Qi et al. 2023, table 1: with F = B = W the ramp is (p - 1) (F + B - W); held: p and 2p - 1
    microbatches. No order that starts with stage 0 and ends for all at once takes less than the
    last stage's work behind the first microbatch's way to it."""
    one = [Work(1.0, 1.0, 1.0, 6.0, 2.0)] * p
    h1, h2 = (simulate(named_order(name, p, m), one) for name in ("zb-h1", "zb-h2"))
    assert h1.step_s == h2.step_s == 3 * m + p - 1
    assert h1.order.in_flight() == (p,) * p
    assert h2.order.in_flight() == (min(2 * p - 1, m),) * p
    assert h1.bubble == pytest.approx((p - 1) / (3 * m + p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_forth_and_back_closed_forms(p: int, more: int) -> None:
    """Qi et al. 2023, section 6: with F = B = W a device idles only while the first microbatch
    reaches it, p - 1 passes of a chunk, from 2 p - 1 microbatches on; every device holds what the
    first stage of 1F1B does. A device that has begun does not wait."""
    m = 2 * p - 1 + more
    done = simulate(named_order("zb-v", p, m), [Work(1.0, 1.0, 1.0, 6.0, 2.0)] * (2 * p))
    assert done.step_s == 6 * m + p - 1
    assert done.order.place == (*range(p), *reversed(range(p)))
    assert max(done.order.in_flight()) <= 2 * p
    whole = simulate(named_order("1f1b", p, m), [Work(2.0, 2.0, 2.0, 12.0, 4.0)] * p)
    assert max(done.peak_bytes) <= max(whole.peak_bytes) == 12.0 * p
    assert [ends[0] - 1.0 for ends in done.ends] == [float(d) for d in range(p)]


@pytest.mark.parametrize("m", [1, 2, 5])
def test_forth_and_back_with_few_microbatches(m: int) -> None:
    """All passes, once, and no deadlock."""
    done = simulate(named_order("zb-v", 4, m), [Work(1.0, 1.0, 1.0)] * 8)
    assert sum(map(len, done.ends)) == 3 * 8 * m


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("F0.0 B0.0", "F2.0 B2.0"), r"has the chunks \[0, 2\]"),
        (("F0.0 B0.0", "F1.0"), "lacks B0 of chunk 1"),
        (("F0.0 B0.0", "F1.0 X1.0"), "task 'X1.0'"),
        (("", ""), "no chunks"),
    ],
)
def test_rows_that_are_no_schedule(rows: tuple[str, ...], said: str) -> None:
    with pytest.raises(OrderError, match=said):
        order_of_rows("mine", rows)


def test_the_second_has_no_waits_inside() -> None:
    """In ZB-H2 a device that has begun does not wait until it ends."""
    p, m = 4, 12
    done = simulate(named_order("zb-h2", p, m), [Work(1.0, 1.0, 1.0)] * p)
    for device, ends in enumerate(done.ends):
        assert ends[0] - 1.0 == device
        assert ends[-1] == device + 3 * m


def test_memory_over_time() -> None:
    done = simulate(named_order("1f1b", 2, 4), [Work(1.0, 1.0, 1.0, held_bytes=10.0)] * 2)
    assert done.peak_bytes == (20.0, 10.0)
    over = done.held_over_time(0)
    assert over[0] == (0.0, 10.0)
    assert max(held for _, held in over) == 20.0
    assert over[-1] == (done.step_s, 0.0)
    apart = simulate(named_order("zb-h1", 2, 4), [Work(1.0, 1.0, 1.0, 10.0, 4.0)] * 2)
    assert apart.peak_bytes == (20.0, 14.0)


def test_transfers_take_time_between_devices_only() -> None:
    one = Work(1.0, 2.0)
    assert simulate(named_order("1f1b", 1, 4), [one], transfer_s=5.0).step_s == 12.0
    assert simulate(named_order("gpipe", 2, 1), [one] * 2, transfer_s=5.0).step_s == 6.0 + 10.0


def test_a_deadlock_is_refused_with_its_cycle() -> None:
    order = Order(
        "crossed",
        (
            (Task("F", 0, 0), Task("B", 0, 0), Task("F", 0, 1), Task("B", 0, 1)),
            (Task("F", 1, 0), Task("F", 1, 1), Task("B", 1, 0), Task("B", 1, 1)),
        ),
        (0, 1),
        2,
    )
    with pytest.raises(DeadlockError) as error:
        simulate(order, [Work(1.0, 1.0)] * 2)
    assert str(error.value) == (
        "schedule 'crossed' deadlocks: device 0 waits with B0 of chunk 0 for B0 of chunk 1 of "
        "device 1; device 1 waits with F1 of chunk 1 for F1 of chunk 0 of device 0"
    )


def test_orders_shuffled_at_random_end_or_are_refused() -> None:
    """A hundred mixed orders: where one ends, every task stands behind what it reads."""
    ended = 0
    for seed in range(100):
        draw = random.Random(seed)
        order = named_order("1f1b", draw.randint(1, 3), draw.randint(1, 3))
        rows = []
        for row in order.devices:
            tasks = list(row)
            for _ in range(draw.randint(0, 2)):
                k = draw.randrange(len(tasks))
                tasks.insert(draw.randrange(len(tasks)), tasks.pop(k))
            rows.append(tuple(tasks))
        mixed = Order("mixed", tuple(rows), order.place, order.microbatches)
        try:
            done = simulate(mixed, [Work(1.0, 2.0)] * len(order.place))
        except DeadlockError:
            continue
        ended += 1
        when = {
            task: end
            for row, ends in zip(rows, done.ends, strict=True)
            for task, end in zip(row, ends, strict=True)
        }
        for task, end in when.items():
            start = end - done.seconds_of(task)
            if task.kind == "F" and task.chunk:
                assert when[Task("F", task.chunk - 1, task.microbatch)] <= start
            if task.kind == "B":
                assert when[Task("F", task.chunk, task.microbatch)] <= start
    assert 20 < ended < 100


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_what_was_written(name: str, tmp_path: Path) -> None:
    order = named_order(name, 4, 8, 2 if name == "interleaved" else 1)
    assert order_of_rows(name, rows_of(order)) == order
    path = tmp_path / "order.json"
    path.write_text(write_order(order))
    assert read_order(path) == order


WHOLE = {
    "schedule": "mine",
    "microbatches": 1,
    "place": [0, 1],
    "devices": [["F0.0", "B0.0"], ["F1.0", "B1.0"]],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": [["F0.0"], ["F1.0", "B1.0"]]}, "lacks B0 of chunk 0"),
        ({"devices": [["F0.0", "F0.0"], ["F1.0", "B1.0"]]}, "has F0 of chunk 0 twice"),
        ({"devices": [["F0.0", "B1.0"], ["F1.0", "B0.0"]]}, "which device 1 holds"),
        ({"devices": [["F0.0", "X0.0"], ["F1.0", "B1.0"]]}, "task 'X0.0', expected such as"),
        ({"devices": [["F0.0", "B7.0"], ["F1.0", "B1.0"]]}, "a chunk below 2"),
        ({"devices": [["F0.0"], 3]}, "device 1: got 3, expected a list"),
        ({"place": [0, 5]}, "chunk 1 is on device 5, of 2 devices"),
        ({"place": "01"}, "place: got '01', expected a value of type list"),
        ({"microbatches": True}, "microbatches: got True"),
        ({"microbatches": 0}, "no chunks or no microbatches"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "order.json"
    path.write_text(json.dumps({**WHOLE, **change}))
    with pytest.raises(OrderError, match=r"order\.json") as error:
        read_order(path)
    assert said in str(error.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    path.write_text("[1, 2")
    with pytest.raises(OrderError, match="can't be read"):
        read_order(path)
    with pytest.raises(OrderError, match="can't be read"):
        read_order(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "counts", "said"),
    [
        ("zb-9", (2, 2, 1), "no schedule 'zb-9': use one of gpipe"),
        ("1f1b", (2, 2, 2), "one chunk per device, not 2"),
        ("interleaved", (2, 3, 2), "a multiple of 2 microbatches"),
        ("gpipe", (0, 2, 1), "each must be at least 1"),
    ],
)
def test_counts_that_a_schedule_does_not_run(
    name: str, counts: tuple[int, int, int], said: str
) -> None:
    with pytest.raises(OrderError) as error:
        named_order(name, *counts)
    assert said in str(error.value)


def test_work_of_another_number_of_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="work of 3 chunks for an order of 2"):
        simulate(named_order("gpipe", 2, 2), [Work(1.0, 1.0)] * 3)


def test_a_schedule_is_drawn() -> None:
    done = simulate(named_order("zb-h1", 3, 4), [Work(1.0, 1.0, 1.0)] * 3)
    assert drawn(done, columns=14).splitlines() == [
        "0  012..a+3b+c+d+",
        "1  .01.a2b+3c+d++",
        "2  ..0a1b2c+3d+++",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 3), (4, 2), (4, 8), (8, 32)])
def test_ticks_are_one_forward_and_one_backward_pass_in_step(p: int, m: int) -> None:
    done = in_ticks(p, m, Work(1.0, 2.0, held_bytes=1.0))
    assert done.step_s == 3 * (m + p - 1)
    free = simulate(done.order, [Work(1.0, 2.0, held_bytes=1.0)] * p)  # the same order can run
    assert free.step_s <= done.step_s
    assert done.busy_s == free.busy_s
    for s, (tasks, ends) in enumerate(zip(done.order.devices, done.ends, strict=True)):
        at = dict(zip(tasks, ends, strict=True))
        for i in range(m):
            forward, backward = at[Task("F", s, i)], at[Task("B", s, i)]
            assert backward - 2.0 >= forward
            if s:
                before = dict(zip(done.order.devices[s - 1], done.ends[s - 1], strict=True))
                assert forward - 1.0 >= before[Task("F", s - 1, i)]
                assert before[Task("B", s - 1, i)] - 2.0 >= backward
        held = [sum(at[Task("F", s, i)] <= t < at[Task("B", s, i)] for i in range(m)) for t in ends]
        assert max(held) == done.peak_bytes[s]


def test_ticks_need_a_stage() -> None:
    with pytest.raises(OrderError, match="0 stages"):
        in_ticks(0, 2, Work(1.0, 2.0))
