"""Tables of rows: what is pulled and pushed, lazy optimizers, and other numbers of servers."""

from __future__ import annotations

import functools
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.parameter_server import ParameterServer, Rule, train
from executor.parameter_server.placement.elementwise import EXACT
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.store import Pushed, Store
from executor.parameter_server.server.tables import joined, reshard_tables, summed
from executor.parameter_server.transport.links import LocalLinks
from executor.parameter_server.worker.rows import table_layout
from planner.errors import RequestError

ROWS, WIDTH, STEPS = 37, 5, 12
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)


def alone(optimizer: Any = None, servers: int = 1, rule: Rule | None = None, **options: Any) -> Any:
    """A worker with servers of its own."""
    shards = [Shard(rule or Rule("async"), 1, optimizer, 5.0) for _ in range(servers)]
    return ParameterServer(LocalLinks(shards, 1), 0, 1, optimizer=optimizer, **options)


def drawn(seed: int, n: int = 20) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    ids = np.minimum(draw.zipf(1.3, size=n) - 1, ROWS - 1)  # some repeat
    return ids, draw.normal(size=(n, WIDTH)).astype(np.float32)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([(), (3,), (2, 2)]),
    st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=4),
)
def test_rows_are_those_of_one_array(
    servers: int, rows: int, width: tuple[int, ...], pushes: list[list[int]]
) -> None:
    table = np.random.default_rng(rows).integers(-9, 9, size=(rows, *width)).astype(np.float32)
    server = alone(servers=servers)
    server.init({}, tables={"t": table})
    expected = table.copy()
    for number, drawn_ids in enumerate(pushes):
        ids = np.array(drawn_ids, np.int32) % rows
        got = server.pull_rows({"t": ids})["t"]
        np.testing.assert_array_equal(got, expected[ids])
        assert got.shape == (len(ids), *width)
        changes = np.random.default_rng(number).integers(-9, 9, size=got.shape)
        assert server.push(None, rows={"t": (ids, changes.astype(np.float32))})
        np.add.at(expected, ids, changes.astype(np.float32))
    held = [shard.tables() for shard in server._links.shards]
    np.testing.assert_array_equal(joined(held)["t"], expected)
    for shard in server._links.shards:
        assert shard.counts.applied == shard.counts.updates == len(pushes)


def by_hand(pushes: Any, rate: float, b1: float = 0.9, b2: float = 0.999) -> Any:
    """Adam, row by row: moments of the rows of an update alone, one count for the table."""
    values, first, second = (np.array(x, np.float64) for x in (TABLE, 0 * TABLE, 0 * TABLE))
    for count, (ids, gradients) in enumerate(pushes, 1):
        for row in set(ids.tolist()):
            g = gradients[ids == row].astype(np.float64).sum(0)
            first[row] = b1 * first[row] + (1 - b1) * g
            second[row] = b2 * second[row] + (1 - b2) * g**2
            m, v = first[row] / (1 - b1**count), second[row] / (1 - b2**count)
            values[row] -= rate * m / (np.sqrt(v) + 1e-8)
    return values


@pytest.mark.parametrize("servers", [1, 3])
def test_lazy_adam_is_that_by_hand(servers: int) -> None:
    server = alone(optax.adam(0.1), servers)
    server.init({}, tables={"t": TABLE})
    pushes = [drawn(k, n) for k, n in enumerate((1, 20, 0, 40, 17, 3))]
    for push in pushes:
        server.push(rows={"t": push})
    got = server.pull_rows({"t": np.arange(ROWS)})["t"]
    np.testing.assert_allclose(got, by_hand(pushes, 0.1), rtol=2e-4, atol=2e-5)


def test_rows_that_are_not_pushed_stay_and_so_do_dense_values() -> None:
    server = alone(optax.adam(0.1), 2)
    params = server.init({"w": np.ones(3, np.float32)}, tables={"t": TABLE, "u": TABLE})
    ids = np.array([4, 9, 4])
    server.push(None, rows={"t": (ids, np.ones((3, WIDTH), np.float32))})
    np.testing.assert_array_equal(server.pull()["w"], params["w"])
    got = server.pull_rows({"t": np.arange(ROWS), "u": np.arange(ROWS)})
    np.testing.assert_array_equal(got["u"], TABLE)
    assert sorted(np.flatnonzero((got["t"] != TABLE).any(1))) == [4, 9]
    np.testing.assert_allclose(got["t"][4], TABLE[4] - 0.1, rtol=1e-5)  # Adam's first step
    after = server.push_pull({"w": np.ones(3, np.float32)}, rows={"u": (ids[:1], TABLE[:1])})
    np.testing.assert_allclose(after["w"], params["w"] - 0.1, rtol=1e-5)
    assert (server.pull_rows({"u": ids[:1]})["u"] != TABLE[4]).all()


def test_an_update_takes_no_memory_of_the_size_of_a_table_and_few_forms_are_compiled() -> None:
    store = Store(optax.adam(0.1), exact=False)
    store.init({}, {"t": np.zeros((200_000, 16), np.float32)})
    held = store.tables.held["t"]
    where = [id(held.values), *map(id, (x for x in held.leaves if x.ndim == 2))]
    draw = np.random.default_rng(0)

    def push(n: int) -> None:
        ids = np.unique(draw.integers(0, 200_000, 2 * n))[:n]
        store.apply(Pushed(rows={"t": (ids, np.ones((n, 16), np.float32))}))

    for n in range(1, 65):
        push(n)
    assert store.tables._update._cache_size() == 3  # 16, 32 and 64 rows
    tracemalloc.start()
    push(60)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * held.values.nbytes
    assert where == [id(held.values), *map(id, (x for x in held.leaves if x.ndim == 2))]


def test_repeated_rows_of_half_precision_are_summed_in_full() -> None:
    for dtype in (jnp.bfloat16, np.float16):
        ids, sums = summed(np.zeros(1000, int), np.ones((1000, 2), dtype))
        assert ids.tolist() == [0] and sums.dtype == dtype
        np.testing.assert_array_equal(sums.astype(np.float32), [[1000, 1000]])


def sparse(server: ParameterServer) -> None:
    """Each worker its rows, with dense parameters beside them."""
    server.init({"w": np.zeros(3, np.float32)}, tables={"t": TABLE})
    for step in range(STEPS):
        ids, gradients = drawn(100 * server.rank + step)
        gradients = gradients + 0.1 * server.pull_rows({"t": ids})["t"]
        dense = {"w": gradients[:3, 0]} if step % 3 else None
        server.push(dense, rows={"t": (ids, gradients)})
        server.pull()


OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "adagrad": optax.adagrad(0.1),
    "momentum": optax.sgd(0.1, 0.9),
    "schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
}


def single_loop(optimizer: Any, workers: int) -> Any:
    """The same lazy optimizer in one loop, on rows that are gathered and written back."""
    values = TABLE.copy()
    leaves = [np.array(x) for x in jax.tree.leaves(optimizer.init({"t": TABLE}))]

    def update(values: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, values)
        return optax.apply_updates(values, updates), state

    update = jax.jit(update, compiler_options=EXACT)
    for step in range(STEPS):
        sums: dict[int, Any] = {}
        for rank in range(workers):
            ids, gradients = drawn(100 * rank + step)
            gradients = gradients + 0.1 * values[ids]
            own: dict[int, Any] = {}
            for row, g in zip(ids.tolist(), gradients, strict=True):
                own[row] = own[row] + g if row in own else g
            for row, g in own.items():
                sums[row] = sums[row] + g if row in sums else g
        rows = sorted(sums)
        mean = np.stack([sums[row] / np.float32(workers) for row in rows])
        # a second array, as on the servers: a lone scalar power is computed otherwise
        both = {"t": values[rows], "z": np.zeros(1, np.float32)}
        whole = optimizer.init(both)
        at = [k for k, x in enumerate(jax.tree.leaves(whole)) if x.shape == both["z"].shape]
        held = iter([x[rows] if x.shape == TABLE.shape else x for x in leaves])
        given = [
            np.zeros(1, x.dtype) if k in at else next(held)
            for k, x in enumerate(jax.tree.leaves(whole))
        ]
        new, after = update(
            both,
            jax.tree.unflatten(jax.tree.structure(whole), given),
            {"t": mean, "z": np.zeros(1, np.float32)},
        )
        values[rows] = new["t"]
        ends = [x for k, x in enumerate(jax.tree.leaves(after)) if k not in at]
        for k, x in enumerate(ends):
            if leaves[k].shape == TABLE.shape:
                leaves[k][rows] = x
            else:
                leaves[k] = np.array(x)
    return values


QUICK = ("adagrad", "schedule")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_synchronous_rows_have_the_bits_of_one_loop(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    ends = [
        train(sparse, workers=3, servers=servers, optimizer=optimizer, backend="local")
        for servers in (1, 2, 3, 3)
    ]
    expected = single_loop(optimizer, 3)
    for end in ends:
        np.testing.assert_array_equal(end.tables["t"], expected)
        np.testing.assert_array_equal(end.params["w"], ends[0].params["w"])
        assert all(c.updates == STEPS and c.applied == 3 * STEPS for c in end.counts)


def test_plain_descent_by_rows_is_dense_descent() -> None:
    """A table that is looked up: its dense gradient is the scatter of its rows' gradients."""
    targets = RNG.normal(size=(64, WIDTH)).astype(np.float32)
    ids = RNG.integers(0, ROWS, size=(2, 10, 64))

    def rows_loop(server: ParameterServer) -> None:
        server.init({}, tables={"t": TABLE})
        for own in ids[server.rank]:
            rows = server.pull_rows({"t": own})["t"]
            server.push(rows={"t": (own, rows - targets)})

    def dense_loop(server: ParameterServer) -> None:
        params = server.init({"t": TABLE})
        for own in ids[server.rank]:
            gradient = jax.grad(lambda t, own=own: 0.5 * ((t[own] - targets) ** 2).sum())
            params = server.push_pull({"t": gradient(params["t"])})

    options: Any = {"workers": 2, "servers": 2, "optimizer": optax.sgd(0.05), "backend": "local"}
    by_rows, dense = train(rows_loop, **options), train(dense_loop, **options)
    np.testing.assert_allclose(by_rows.tables["t"], dense.params["t"], rtol=1e-4, atol=1e-5)
    assert np.abs(by_rows.tables["t"] - TABLE).max() > 0.1


@pytest.mark.parametrize("options", [{"mode": "ssp", "staleness": 2}, {"mode": "async"}])
@pytest.mark.parametrize("row_cache", [0, 2])
def test_every_push_of_stale_workers_is_in_the_rows(options: Any, row_cache: int) -> None:
    def counting(server: ParameterServer) -> Any:
        server.init({}, tables={"t": np.zeros((ROWS, 1), np.int64)})
        for step in range(30):
            ids, _ = drawn(1000 * server.rank + step)
            server.pull_rows({"t": ids})
            assert server.push(rows={"t": (ids, np.ones((len(ids), 1), np.int64))})
        return server.cache_hits, server.cache_misses

    done = train(counting, workers=3, servers=2, backend="local", row_cache=row_cache, **options)
    expected = np.zeros((ROWS, 1), np.int64)
    for rank in range(3):
        for step in range(30):
            np.add.at(expected, drawn(1000 * rank + step)[0], 1)
    np.testing.assert_array_equal(done.tables["t"], expected)
    assert all(c.applied == c.updates == sum(c.lags.values()) == 90 for c in done.counts)
    assert all((hits > 0) == (row_cache > 0) for hits, _ in done.returned)


def test_a_push_of_rows_that_comes_again_counts_once() -> None:
    shard = Shard(Rule("async"), 1, None, 0.05)
    shard.init({}, {"t": TABLE})
    push = Pushed(rows={"t": (np.array([1]), np.ones((1, WIDTH), np.float32))})
    for number in (1, 1, 2, 1, 2):
        assert shard.push(0, number, push)
    np.testing.assert_array_equal(shard.tables()["t"][1], TABLE[1] + 1 + 1)
    assert (shard.counts.applied, shard.counts.duplicates) == (2, 3)


def test_lags_count_from_the_first_read_since_the_last_push() -> None:
    shard = Shard(Rule("async"), 2, None, 0.05)
    shard.init({}, {"t": TABLE})
    for worker in (0, 1):
        shard.pull(worker)  # nothing to read: there are tables alone
    one = Pushed(rows={"t": (np.array([1]), TABLE[:1])})
    shard.push(0, 1, one)
    shard.pull_rows(1, {"t": np.array([0])})
    shard.push(0, 2, one)
    shard.pull_rows(1, {"t": np.array([2])})  # more rows for the same gradient
    shard.push(1, 1, one)
    shard.pull_rows(1, {"t": np.array([2])})
    shard.push(1, 2, one)
    assert shard.counts.lags == {0: 2, 1: 2}


def test_what_is_pulled_is_the_workers_own() -> None:
    for row_cache in (0, 3):
        server = alone(row_cache=row_cache)
        server.init({}, tables={"t": TABLE})
        for _ in range(2):
            got = server.pull_rows({"t": [1, 2, 1]})["t"]
            np.testing.assert_array_equal(got, TABLE[[1, 2, 1]])
            got += 7


@pytest.mark.parametrize("optimizer", [None, optax.sgd(0.5)])
def test_the_cache_is_bounded_and_has_what_the_worker_pushed(optimizer: Any) -> None:
    """Another worker's pushes come in after ``row_cache`` own pushes, own ones at once."""
    shards = [Shard(Rule("async"), 2, optimizer, 5.0) for _ in range(2)]
    server = ParameterServer(LocalLinks(shards, 2), 0, 2, row_cache=2, optimizer=optimizer)
    other = ParameterServer(LocalLinks(shards, 2), 1, 2)
    server.init({}, tables={"t": TABLE})
    other.init({}, tables={"t": jax.ShapeDtypeStruct(TABLE.shape, TABLE.dtype)})
    ones = np.ones((2, WIDTH), np.float32)
    step = np.float32(1 if optimizer is None else -0.5)
    np.testing.assert_array_equal(server.pull_rows({"t": [3, 4]})["t"], TABLE[[3, 4]])
    other.push(rows={"t": ([3, 4], ones)})
    seen = TABLE[[3, 4]]
    for clock in range(3):  # row 3 was read at clock 0, and is good for two more
        got = server.pull_rows({"t": [3]})["t"][0]
        np.testing.assert_array_equal(got, seen[0])
        server.push(rows={"t": ([9, 4], ones)})
        own = server.pull_rows({"t": [4]})["t"][0]
        fresh = TABLE[4] + step + step * (clock + 1)
        kept = TABLE[4] + step * (clock + 1)
        if optimizer is None and clock < 2:
            np.testing.assert_allclose(own, kept, rtol=1e-6)
        else:
            np.testing.assert_allclose(own, fresh, rtol=1e-6)
    np.testing.assert_array_equal(server.pull_rows({"t": [3]})["t"][0], TABLE[3] + step)
    expected = (5, 4) if optimizer is None else (3, 6)
    assert (server.cache_hits, server.cache_misses) == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_resharding_goes_there_and_back(old: int, new: int, rows: int) -> None:
    whole = {
        "values/0/a/b": RNG.normal(size=(rows, 3)),
        "rows/1/a/b": RNG.normal(size=(rows, 3)),
        "shared/0/a/b": np.array(7),
    }
    dumps = reshard_tables([whole], old)
    there = reshard_tables(dumps, new)
    for key, x in whole.items():
        for server in range(new):
            expected = x if key.startswith("shared") else x[server::new]
            np.testing.assert_array_equal(there[server][key], expected)
    for one, two in zip(dumps, reshard_tables(there, old), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 2)])
def test_tables_move_to_other_servers_with_their_state(old: int, new: int) -> None:
    optimizer = optax.adam(0.1)
    tables = {"t": TABLE, "a/b": TABLE[:2]}  # fewer rows than servers, and a name with a slash

    def stores(servers: int) -> list[Store]:
        return [Store(optimizer, exact=True) for _ in range(servers)]

    def push(held: list[Store], number: int) -> None:
        ids, gradients = drawn(number)
        layout = table_layout(tables, len(held), added=True)
        rows = {"t": (ids, gradients), "a/b": (ids % 2, gradients)}
        for store, part in zip(held, layout.push(rows)[1], strict=True):
            store.apply(Pushed(rows=part))

    first = stores(old)
    for store, part in zip(
        first, table_layout(tables, old, added=True).scatter(tables), strict=True
    ):
        store.init({}, part)
    for number in range(3):
        push(first, number)
    dumps = [store.tables.dump() for store in first]
    second = stores(new)
    for store, dumped in zip(second, reshard_tables(dumps, new), strict=True):
        store.tables.load(dumped)
    back = reshard_tables([store.tables.dump() for store in second], old)
    for one, two in zip(dumps, back, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], two[key])
    for number in (3, 4):
        push(first, number)
        push(second, number)
    ends = [joined([store.tables.whole() for store in held]) for held in (first, second)]
    for name in tables:
        np.testing.assert_array_equal(ends[0][name], ends[1][name])
        assert (ends[0][name] != tables[name]).any()
    other = Store(optax.sgd(0.1), exact=True)
    with pytest.raises(RequestError, match="resume with the optimizer of that run"):
        other.tables.load(dumps[0])


@pytest.mark.parametrize("dense", [False, True])
def test_a_job_with_tables_goes_on_with_other_servers(tmp_path: Path, dense: bool) -> None:
    """Snapshots have the tables and the state of their rows: two halves are the whole run."""

    def half(server: ParameterServer, begin: int, end: int) -> None:
        params = {"w": np.zeros(3, np.float32)} if dense else {}
        server.init(params, tables={"t": TABLE})
        for step in range(begin, end):
            ids, gradients = drawn(100 * server.rank + step)
            gradients = gradients + 0.1 * server.pull_rows({"t": ids})["t"]
            server.push({"w": gradients[:3, 0]} if dense else None, rows={"t": (ids, gradients)})
        server.pull()

    def run(begin: int, end: int, servers: int, **options: Any) -> Any:
        return train(
            functools.partial(half, begin=begin, end=end),
            workers=2,
            servers=servers,
            optimizer=optax.adam(0.05),
            mode="sync",
            backend="local",
            **options,
        )

    run(0, 6, 2, snapshots=tmp_path)
    resumed = run(6, 12, 3, snapshots=tmp_path)
    whole = run(0, 12, 2)
    np.testing.assert_array_equal(resumed.tables["t"], whole.tables["t"])
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_what_does_not_fit_is_named() -> None:
    server = alone(servers=2)
    with pytest.raises(RequestError, match="call init"):
        server.pull_rows({"t": [0]})
    for table in (np.float32(1), "text"):
        with pytest.raises(RequestError, match=r"table 'x': got .*, expected an array of numbers"):
            server.init({}, tables={"x": table})
    server.init({}, tables={"t": TABLE})
    for ids, text in [
        ([3, 37], r"table 't': got id 37 \(number 1 of 2\), expected 0 to 36: .* 37 rows"),
        ([-1], r"got id -1 \(number 0 of 1\)"),
        ([0.5], r"got ids float64\[1\], expected integers \[n\]"),
        ([True], r"got ids bool\[1\]"),
        ([[1]], r"got ids int64\[1, 1\]"),
    ]:
        with pytest.raises(RequestError, match=text):
            server.pull_rows({"t": ids})
        with pytest.raises(RequestError, match=text):
            server.push(rows={"t": (ids, TABLE[:1])})
    with pytest.raises(RequestError, match=r"table 'u': expected one of \['t'\]"):
        server.pull_rows({"u": [0]})
    for wrong in (TABLE[:2], TABLE[:1, :4], TABLE[:1].astype(np.float64)):
        with pytest.raises(
            RequestError, match=r"table 't': got gradients .*expected float32\[1, 5"
        ):
            server.push(rows={"t": ([0], wrong)})
    assert server.push(rows={"t": ([0], TABLE[:1])})  # what was refused had no number
    assert server._links.shards[0].counts.lost == {}
    for k in (-1, 1):
        with pytest.raises(RequestError, match=f"row_cache={k} in mode 'sync'"):
            train(sparse, workers=1, backend="local", row_cache=k)


@pytest.mark.slow
def test_rows_on_ray() -> None:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=10**8)
    try:
        done = train(sparse, workers=2, servers=2, optimizer=optax.adam(0.05))
    finally:
        ray.shutdown()
    here = train(sparse, workers=2, servers=2, optimizer=optax.adam(0.05), backend="local")
    np.testing.assert_array_equal(done.tables["t"], here.tables["t"])
    assert all(c.updates == STEPS for c in done.counts)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_tables_that_would_be_cut_are_refused(dtype: Any) -> None:
    """JAX computes their updates in 32 bits; what is only added stays as it is."""
    tables = {"t": np.ones((4, 2), dtype)}
    assert table_layout(tables, 2, added=True).like["t"].dtype == dtype
    with pytest.raises(RequestError, match=r"table 't': got \w+64, which JAX computes as \w+32"):
        table_layout(tables, 2, added=False)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.pull_rows([1]), "pull_rows: got list, expected a dict of ids"),
        (lambda s: s.push(rows={"t": np.ones((1, 2))}), r"table 't': got ndarray, expected \(ids"),
        (lambda s: s.push(rows=[1]), "rows: got list"),
        (lambda s: s.init({}, tables=[TABLE]), "tables: got list"),
        (lambda s: s.init({}, tables={"t": TABLE[:0]}), "expected an array of numbers"),
    ],
)
def test_what_is_no_dict_of_tables(call: Any, text: str) -> None:
    server = alone(servers=2)
    if "init" not in call.__code__.co_names:
        server.init({}, tables={"t": np.zeros((4, 2), np.float32)})
    with pytest.raises(RequestError, match=text):
        call(server)
