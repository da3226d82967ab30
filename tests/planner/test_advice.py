"""When no plan fits: the least peak, who holds it, and whether what is offered would help."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import pallas as pl

from costmodels import parse_cluster
from planner import MemoryLimitError, make_plan
from planner.advice import least as least_module
from planner.advice.batch import batch_leaves, growing
from planner.advice.trials import grown
from planner.graph.trace import trace
from planner.planning import row as pipeline
from planner.report.shortage import Holder, Relief, Shortage, shortage_text
from planner.search import SEARCHES, ilp, read_iopddl
from planner.search.local.memory_limit import least_memory
from planner.search.problem import Problem, Solution, make_solution

WIDE, BATCH, OUT = 8192, 1024, 1024


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense_step(params: Any, state: Any, x: Any, y: Any) -> Any:
    """Dense layers and a head, with Adam."""

    def loss(p: Any) -> Any:
        h = x
        for w, b in p["layers"]:
            h = jax.nn.relu(h @ w + b)
        return jnp.mean((h @ p["head"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optax.adam(1e-3).update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def dense_args(wide: int = WIDE, batch: int = BATCH, layers: int = 4) -> tuple[Any, ...]:
    params = {
        "layers": [(struct(wide, wide), struct(wide)) for _ in range(layers)],
        "head": struct(wide, OUT),
    }
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    return params, state, struct(batch, wide), struct(batch, OUT)


def tanh_step(params: Any, x: Any, y: Any, wrap: Callable[..., Any] = lambda f: f) -> Any:
    """Dense layers that keep much between forward and backward, with plain gradient descent."""
    layer = wrap(lambda h, w: jnp.tanh(h @ w))

    def loss(p: Any) -> Any:
        h = x
        for w in p:
            h = layer(h, w)
        return jnp.mean((h - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def tanh_args(batch: int = 16384) -> tuple[Any, ...]:
    return [struct(512, 512)] * 6, struct(batch, 512), struct(batch, 512)


def refused(function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """The error for the step as it is: nothing of it is rewritten to make it fit."""
    options = {"microbatches": 1, "remat": "none", **options}
    with pytest.raises(MemoryLimitError) as error:
        make_plan(function, *args, **options)
    return error.value


def unadvised(function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """The same error; nothing is tried that would help, which takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.advice.case.ADVICE_S", 0.0)
        return refused(function, args, **options)


# ---- plans near the least peak --------------------------------------------------------------


@pytest.fixture(scope="module")
def dense_problem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Problem, float]:
    """The bare problem of four 8192-wide layers and a head on 8 devices, and its least peak."""
    path = tmp_path_factory.mktemp("dense") / "problem.json"
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=4,model=2"}
    make_plan(dense_step, *dense_args(), dump_problem=path, **options)
    problem = read_iopddl(path)
    return problem, least_memory(problem).peak_bytes


def limited(problem: Problem, limit: float) -> Problem:
    return dataclasses.replace(problem, limit_bytes=limit)


@pytest.mark.long
def test_the_integer_program_agrees_about_the_least_peak(
    dense_problem: tuple[Problem, float],
) -> None:
    problem, least = dense_problem
    assert ilp(limited(problem, least), time_limit_s=30).feasible
    below = ilp(limited(problem, least * 0.9999), time_limit_s=30)
    assert not below.feasible and below.lower_bound_s == float("inf")


@pytest.mark.parametrize(
    "share", [1.0, 1.05, *(pytest.param(x, marks=pytest.mark.slow) for x in (1.01, 1.2))]
)
@pytest.mark.parametrize("search", ["auto", "recursive_programming"])
def test_searches_find_what_fits_near_the_least_peak(
    search: str, share: float, dense_problem: tuple[Problem, float]
) -> None:
    problem, least = dense_problem
    found = SEARCHES[search](limited(problem, least * share), time_limit_s=10)
    assert found.feasible, found.reason


@pytest.mark.long
@pytest.mark.parametrize(
    "share", [1.0, 1.05, *(pytest.param(x, marks=pytest.mark.slow) for x in (1.01, 1.2))]
)
@pytest.mark.parametrize(
    ("mesh", "search"),
    [
        ("data=4,model=2", "auto"),
        ("data=4,model=2", "recursive_programming"),
        (None, "recursive_programming"),
        pytest.param(None, "auto", marks=pytest.mark.slow),
    ],
)
def test_plans_near_the_least_peak(mesh: str | None, search: str, share: float) -> None:
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": mesh, "search": search}
    error = unadvised(dense_step, dense_args(), memory=4e8, **options)
    assert error.least_bytes > 4e8
    assert error.lower_bytes == pytest.approx(error.least_bytes, rel=1e-9)
    limit = error.least_bytes * share
    plan = make_plan(dense_step, *dense_args(), memory=limit, time_limit_s=10, **options)
    over = any("as it runs the plan takes" in note for note in plan.notes)
    assert over is (plan.prediction.peak_bytes > limit * (1 + 1e-9))
    assert plan.prediction.peak_bytes <= limit * 1.03  # arrays in two layouts at once
    if share == 1.0:
        unadvised(dense_step, dense_args(), memory=limit * 0.9999, **options)
    else:
        assert not over


@pytest.mark.long
def test_a_search_that_gives_up_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    def helpless(problem: Problem, *, time_limit_s: float) -> Solution:
        return make_solution(problem, [0] * len(problem.names), 0.0, "helpless", "gave up", 0.0)

    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8"}
    least = unadvised(tanh_step, tanh_args(), memory=1e6, **options).least_bytes
    for name in SEARCHES:
        monkeypatch.setitem(SEARCHES, name, helpless)
    as_written = {"microbatches": 1, "remat": "none", "chunks": 1}
    plan = make_plan(tanh_step, *tanh_args(), memory=least * 1.02, **options, **as_written)
    assert plan.prediction.peak_bytes <= least * 1.02
    assert "the plan of the least peak" in plan.search.reason
    assert [m.verdict for m in plan.meshes] == ["chosen"]


# ---- what the error says --------------------------------------------------------------------

SIZE = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def reliefs(error: MemoryLimitError) -> dict[str, str]:
    """The lines of what would help, by their first words."""
    lines = str(error).split("what would help\n")[1].splitlines()
    return {
        next(w for w in ("devices", "batch", "remat", "offload", "mode") if w in x): x
        for x in lines
    }


def seconds(line: str) -> float:
    number, unit = re.search(r"step ([\d.]+) (\w+) predicted", line).groups()
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


@pytest.mark.long
def test_what_is_offered_fits_at_the_price_that_is_said_and_half_of_it_does_not() -> None:
    options: dict[str, Any] = {"memory": 20e6, "search": "recursive_programming", "remat": "none"}
    error = refused(tanh_step, tanh_args(), cluster="h100:8", **options)
    assert error.limit_bytes == 20e6 < error.lower_bytes == error.least_bytes
    lines = reliefs(error)

    found = re.search(r"(\d+) devices, (\S+): fits, peak ([\d.]+) (\wB)", lines["devices"])
    assert found is not None
    plan = make_plan(tanh_step, *tanh_args(), cluster=found[2], **options)
    assert plan.mesh.num_devices == int(found[1])
    assert 0.99 * float(found[3]) * SIZE[found[4]] <= plan.prediction.peak_bytes <= 20e6
    assert plan.search.cost_s == pytest.approx(seconds(lines["devices"]), rel=0.01)
    nodes = int(found[1]) // 16
    if nodes > 1:
        unadvised(tanh_step, tanh_args(), cluster=f"h100:8x{nodes}", **options)

    found = re.search(r"1/(\d+) of the batch, (\d+) instead of 16384: fits", lines["batch"])
    assert found is not None
    batch = int(found[2])
    assert batch * int(found[1]) == 16384
    plan = make_plan(tanh_step, *tanh_args(batch), cluster="h100:8", **options)
    assert plan.search.cost_s == pytest.approx(seconds(lines["batch"]), rel=0.01)
    unadvised(tanh_step, tanh_args(2 * batch), cluster="h100:8", **options)


def uneven_step(params: Any, x: Any, y: Any, wrap: Callable[..., Any] = lambda f: f) -> Any:
    """Layers of different widths, so that no block repeats; ``wrap`` goes around each two."""

    def two(h: Any, ws: Any) -> Any:
        for w in ws:
            h = jnp.tanh(h @ w)
        return h

    def loss(p: Any) -> Any:
        h = x
        for k in range(0, 6, 2):
            h = wrap(two)(h, p[k : k + 2])
        return jnp.mean((h - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def uneven_args(batch: int = 16384) -> tuple[Any, ...]:
    widths = [512, 528, 544, 560, 576, 592, 512]
    layers = [struct(a, b) for a, b in itertools.pairwise(widths)]
    return layers, struct(batch, 512), struct(batch, 512)


@pytest.mark.long
def test_remat_of_single_activations_that_is_said_to_fit_fits_with_checkpoints() -> None:
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8"}
    least = unadvised(uneven_step, uneven_args(), memory=1e6, **options).least_bytes
    memory = 0.8 * least
    line = reliefs(refused(uneven_step, uneven_args(), memory=memory, **options))["remat"]
    assert re.search(r"remat \(jax.checkpoint\) of \d+ activations? of test_advice.py:", line)
    assert ": fits, peak" in line and "estimate" in line

    step = functools.partial(uneven_step, wrap=jax.checkpoint)
    plan = make_plan(step, *uneven_args(), memory=memory, **options)
    free = make_plan(uneven_step, *uneven_args(), **options)
    assert plan.prediction.compute_s > free.prediction.compute_s
    assert seconds(line) > free.search.cost_s


def deep_step(params: Any, x: Any, wrap: Callable[..., Any] = lambda f: f) -> Any:
    """Residual blocks, stacked and scanned, or unrolled; ``wrap`` is put around each."""

    def block(h: Any, p: Any) -> Any:
        y = jax.nn.softmax(h @ p["up"], axis=-1)
        return h + jnp.tanh(y * jax.nn.sigmoid(y)) @ p["down"]

    def loss(layers: Any) -> Any:
        if isinstance(layers, dict):
            h, _ = jax.lax.scan(lambda h, p: (wrap(block)(h, p), None), x, layers)
        else:
            h = x
            for p in layers:
                h = wrap(block)(h, p)
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def deep_args(*, scan: bool, layers: int = 12, batch: int = 16384) -> tuple[Any, ...]:
    first = (layers,) if scan else ()
    layer = {"up": struct(*first, 256, 1024), "down": struct(*first, 1024, 256)}
    return layer if scan else [layer] * layers, struct(batch, 256)


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_checkpoint_of_loop_bodies_and_equal_blocks_is_tried(scan: bool) -> None:
    args = deep_args(scan=scan)
    options: dict[str, Any] = {"cluster": "h100:8", "memory": "120MB"}
    text = str(refused(deep_step, args, **options))
    first = text.split("what would help\n")[1].splitlines()[0]
    what = "the body of the scan" if scan else "each of 12 equal blocks"
    assert re.search(rf"remat \(jax.checkpoint\) of {what} at test_advice.py:\d+: fits", first)
    line = int(re.search(r"test_advice.py:(\d+)", first)[1])
    source = Path(__file__).read_text().splitlines()[line - 1]
    assert ("jax.lax.scan" if scan else "h = wrap(block)(h, p)") in source

    step = functools.partial(deep_step, wrap=jax.checkpoint)
    plan = make_plan(step, *args, search="recursive_programming", **options)
    assert plan.prediction.peak_bytes <= 120e6
    assert seconds(first) == pytest.approx(plan.search.cost_s, rel=0.15)


@pytest.mark.long
def test_what_remat_keeps_is_put_on_the_host_where_that_fits() -> None:
    args = deep_args(scan=True, layers=48)
    kept = 48 * 16384 * 256 * 4 / 8  # the inputs of the blocks, split over the devices
    lines = str(refused(deep_step, args, cluster="h100:8", memory=kept)).splitlines()
    remat = [line for line in lines if "remat (jax.checkpoint)" in line]
    assert len(remat) == 2 and "does not suffice" in remat[0]
    assert "with what it keeps in host memory" in remat[1] and ": fits" in remat[1]


@pytest.mark.long
def test_no_batch_that_fits_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate of a step with many layers ends far above what planning finds."""

    def poor(problem: Problem, *, time_limit_s: float) -> Any:
        found = least_memory(problem, time_limit_s=time_limit_s)
        return dataclasses.replace(found, peak_bytes=100 * found.peak_bytes)

    monkeypatch.setattr("planner.advice.batch.least_memory", poor)
    args = deep_args(scan=False)
    options: dict[str, Any] = {"cluster": "h100:8", "search": "recursive_programming"}
    half = make_plan(deep_step, *deep_args(scan=False, batch=8192), **options)
    memory = 1.05 * half.prediction.peak_bytes
    line = reliefs(refused(deep_step, args, memory=memory, **options))["batch"]
    assert "1/2 of the batch, 8192 instead of 16384: fits" in line


@pytest.mark.long
def test_equal_layers_do_not_hide_the_least_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time for a search over every layer, equal layers still get the plan that is found
    for one of them."""
    args = deep_args(scan=False)
    options: dict[str, Any] = {"cluster": "h100:8", "memory": 1e6}
    least = unadvised(deep_step, args, **options).least_bytes
    kept, sizes = least_module.least_memory, set[int]()

    def without_time(problem: Problem, *, time_limit_s: float) -> Any:
        sizes.add(len(problem.names))
        slow = len(problem.names) > min(sizes)
        return kept(problem, time_limit_s=0.0 if slow else time_limit_s)

    monkeypatch.setattr(least_module, "least_memory", without_time)
    assert unadvised(deep_step, args, **options).least_bytes <= 1.01 * least
    assert len(sizes) > 1


@pytest.mark.long
def test_operations_without_a_rule_are_named_first() -> None:
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = jnp.broadcast_to(jnp.tanh(x[...] @ w[0]), (8, 4096, 4096))

    def step(params: Any, x: Any) -> Any:
        body = pl.pallas_call(kernel, out_shape=struct(8, 4096, 4096))
        return params - 0.1 * jnp.mean(body(x, params)) * jnp.ones_like(params)

    args = (struct(8, 1024, 4096), struct(4096, 1024))
    error = unadvised(step, args, cluster="h100:8", memory="300MB")
    lines = str(error).splitlines()
    assert "operations without a sharding rule" in lines[1]
    line = step.__code__.co_firstlineno
    sizes = re.findall(r"^    pallas_call \(test_advice.py:(\d+)\): ([\d.]+) MB$", str(error), re.M)
    assert sizes and all(int(at) - line in range(4) for at, _ in sizes)
    assert float(sizes[0][1]) > 500  # the result alone is 512 MiB
    assert lines.index(next(x for x in lines if "write them in plain JAX" in x)) < lines.index(
        next(x for x in lines if "that peak is on mesh" in x)
    )
    plan = make_plan(step, *args, cluster="h100:8")
    assert plan.fallbacks and all("MB of operands and results" in f for f in plan.fallbacks)


@pytest.mark.long
def test_advice_says_what_it_had_no_time_to_try() -> None:
    text = str(unadvised(tanh_step, tanh_args(), cluster="h100:8", memory=20e6))
    assert "a smaller batch: not tried (out of time)" in text
    assert "peak 0" not in text and "does not suffice" not in text


@pytest.mark.long
def test_a_step_that_knows_its_batch_gives_an_estimate() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        assert x.shape[0] == 16384
        return tanh_step(params, x, y)

    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8", "memory": 20e6}
    line = reliefs(refused(step, tanh_args(), **options))["batch"]
    exact = reliefs(refused(tanh_step, tanh_args(), **options))["batch"]
    assert "an estimate of the memory: the step can't be traced with a smaller batch" in line
    assert "predicted" not in line and "predicted" in exact
    assert line.split(":")[0] == exact.split(":")[0]


@pytest.mark.long
def test_another_mode_is_told_about_auto_parallel() -> None:
    args = dense_args(1024, 64)
    replicated = 3 * 4 * 4 * 1024**2
    options: dict[str, Any] = {"cluster": "h100:8", "memory": 0.5 * replicated}
    error = refused(dense_step, args, mode="DATA_PARALLEL", **options)
    assert error.lower_bytes == 0 and "no lower bound is known" in str(error)
    line = reliefs(error)["mode"]
    assert "mode AUTO_PARALLEL: fits" in line
    as_written = {"microbatches": 1, "remat": "none", "chunks": 1}
    options["search"] = "recursive_programming"
    plan = make_plan(dense_step, *args, **options, **as_written)
    assert plan.search.cost_s == pytest.approx(seconds(line), rel=0.01)
    assert make_plan(dense_step, *args, **options).search.cost_s <= 1.01 * plan.search.cost_s


@pytest.mark.long
def test_holders_are_named_by_what_they_are() -> None:
    text = str(unadvised(dense_step, dense_args(), cluster="h100:8", memory="400MB"))
    assert text.startswith("no plan fits in 400 MB per device on h100:8: the lowest peak tried is ")
    assert re.search(r"\d MB  optimizer state  \[1\]\[0\]\.mu\['layers'\]\[\*\]\[0\] x4\n", text)
    assert re.search(r"\d MB  parameter +\[0\]\['layers'\]\[\*\]\[0\] x4\n", text)
    assert re.search(r"activation +\w+ float32\[8192,8192\] \(test_advice.py:\d+\)", text)
    assert re.search(r"that peak is on mesh .*, at \w+ \(test_advice.py:\d+\), and held by\n", text)


# ---- parts ----------------------------------------------------------------------------------


def test_values_that_grow_with_the_batch() -> None:
    traced = trace(dense_step, dense_args(16, 32, 2))
    graph = traced.graph
    leaves = batch_leaves(graph)
    assert [graph.input_paths[k] for k in leaves] == ["[2]", "[3]"]
    grown_values = growing(graph, traced.rules, leaves)
    live = graph.live_ops()
    for value in graph.values:
        if value.shape and (value.op < 0 or live[value.op]):  # only the batch is 32 long
            assert (value.index in grown_values) == (32 in value.shape), str(value)


def test_values_that_grow_inside_a_scan() -> None:
    def step(w: Any, xs: Any) -> Any:
        def loss(w: Any) -> Any:
            def body(h: Any, x: Any) -> Any:
                h = jnp.tanh(h @ w + x)
                return h, h

            return jnp.mean(jax.lax.scan(body, jnp.zeros((32, 16)), xs.swapaxes(0, 1))[1])

        return w - jax.grad(loss)(w)

    traced = trace(step, (struct(16, 16), struct(32, 5, 16)))
    graph = traced.graph
    leaves = batch_leaves(graph)
    assert [graph.input_paths[k] for k in leaves] == ["[1]"]
    found = growing(graph, traced.rules, leaves)
    carries = [op.outputs[0] for op in graph.ops if op.kind == "loop_carry"]
    assert any(v in found for v in carries)
    assert not any(graph.values[v].shape == (16, 16) for v in found)


@pytest.mark.parametrize(
    ("text", "times", "larger"),
    [
        *[("h100:8", 4, "h100:8x4"), ("h100:8x2", 2, "h100:8x4")],
        *[("v5p:4x4x8", 4, "v5p:8x8x8"), ("v5e:16x16+2", 4, "v5e:16x16+8")],
    ],
)
def test_larger_clusters(text: str, times: int, larger: str) -> None:
    cluster = grown(parse_cluster(text), times)
    assert cluster.text == larger
    assert cluster.num_devices == times * parse_cluster(text).num_devices
    assert parse_cluster(cluster.text) == cluster


def test_text_says_only_what_is_known() -> None:
    holders = (Holder("parameter", "[0]['w']", 2, 6e9), Holder("input", "[1]", 1, 5e8))
    tried = (
        Relief("16 devices, h100:8x2", 4.5e9, 0.012, True, "mesh data=16"),
        Relief("1/2 of the batch, 4 instead of 8", 5.5e9, 0.012, False),
    )
    known = Shortage("h100:8", 5e9, 6e9, 6e9, "data=8", "mul (a.py:3)", holders, tried)
    assert shortage_text(known).splitlines() == [
        "no plan fits in 5.00 GB per device on h100:8: the lowest peak tried is 6.00 GB, 1.00 GB "
        "too many; no plan on the meshes searched needs less",
        "  that peak is on mesh data=8, at mul (a.py:3), and held by",
        "    6.00 GB  parameter  [0]['w'] x2",
        "     500 MB  input      [1]",
        "  what would help",
        "    16 devices, h100:8x2: fits, peak 4.50 GB, step 12.0 ms predicted (mesh data=16)",
        "    1/2 of the batch, 4 instead of 8: does not suffice, peak 5.50 GB",
    ]
    loose = Shortage("h100:8", 5e9, 6e9, 4e9, "data=8", "mul (a.py:3)", (), ())
    assert "a plan that fits may exist" in shortage_text(loose)
    assert "what would help" not in shortage_text(loose)
    open_ = Shortage("h100:8", 5e9, 6e9, 5.5e9, "data=8", "mul (a.py:3)", (), ())
    assert "every plan needs at least 5.50 GB on the meshes searched\n" in shortage_text(open_)


@pytest.mark.long
def test_meshes_that_were_never_priced_leave_the_bound_open() -> None:
    seen: list[Any] = []
    kept = pipeline.least_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "least_plan", lambda *a: seen.append(a) or kept(*a))
        error = unadvised(tanh_step, tanh_args(), cluster="h100:4", memory=1e6)
    quotient, tried, request = seen[0]
    assert error.lower_bytes > 0
    (priced, solution), *rest = tried
    unpriced = dataclasses.replace(priced, sets=()), dataclasses.replace(solution, choice=())
    least = kept(quotient, [unpriced, *rest], request)
    assert least.priced.mesh in {p.mesh for p, _ in rest} and least.lower_bytes == 0


def test_a_large_operation_without_a_rule_is_the_first_line_of_a_report() -> None:
    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def step(w: Any, x: Any) -> Any:
        whole = pl.pallas_call(kernel, out_shape=struct(65536, 4096))
        return jnp.tanh(whole(x @ w))

    plan = make_plan(step, struct(4096, 4096), struct(65536, 4096), cluster="h100:8")
    assert plan.fallbacks[0].endswith(" of memory")
    lines = [line.strip() for line in str(plan).splitlines() if line.strip()]
    assert lines[1].startswith("not split") and "pallas_call (test_advice.py:" in lines[1]
    small = make_plan(step, struct(4096, 4096), struct(65536, 4096), cluster="h100:8", memory="1TB")
    assert small.fallbacks and "not split" not in str(small)
