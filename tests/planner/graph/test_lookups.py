"""Tables by rows: what is served, what is refused, and gradients equal to those of whole tables."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import shard
from planner.errors import RequestError
from planner.graph.lookups.rows import on_rows, padded, unique_rows
from planner.graph.lookups.tables import find_lookups

ROWS, WIDTH = 50, 6
RNG = np.random.default_rng(0)
IDS = np.array([[3, 7, 3], [49, 0, 7]], np.int32)
Y = RNG.normal(size=(2, 3)).astype(np.float32)
TABLE = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(WIDTH,)).astype(np.float32)
PARAMS = {"embed": TABLE, "head": HEAD}


def error(h: Any, params: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(h) @ params["head"] - y) ** 2)


def plain(params: Any, ids: Any, y: Any) -> Any:
    return error(params["embed"][ids], params, y)


def taken(params: Any, ids: Any, y: Any) -> Any:
    return error(jnp.take(params["embed"], ids, axis=0), params, y)


def clipped(params: Any, ids: Any, y: Any) -> Any:
    return error(params["embed"].at[ids].get(mode="clip"), params, y)


def twice(params: Any, ids: Any, y: Any) -> Any:
    return error(params["embed"][ids] + params["embed"][(ids * 7 + 1) % ROWS], params, y)


def bfloat(params: Any, ids: Any, y: Any) -> Any:
    return error(params["embed"].astype(jnp.bfloat16)[ids].astype(jnp.float32), params, y)


def scanned(params: Any, ids: Any, y: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        position, h = carry
        row = params["embed"][(x + position) % ROWS]  # known carry, unknown carry
        h = jnp.tanh(h + row @ params["head"])
        return (position + 1, h), h

    (_, last), all_h = jax.lax.scan(body, (0, jnp.zeros(2)), ids.T)
    return jnp.mean((all_h.T - y) ** 2) + jnp.sum(last)


def remat(params: Any, ids: Any, y: Any) -> Any:
    return jax.checkpoint(plain)(params, ids, y)


def remat_scan(params: Any, ids: Any, y: Any) -> Any:
    @jax.checkpoint
    def body(total: Any, x: Any) -> Any:
        return total + jnp.sum(jnp.take(params["embed"], x, axis=0) @ params["head"]), None

    return jax.lax.scan(body, 0.0, ids)[0] + jnp.sum(y)


def branches(params: Any, ids: Any, y: Any) -> Any:
    def rows(table: Any, k: Any) -> Any:
        return table[k]

    h = jax.lax.cond(
        y[0, 0] > 0, lambda t: rows(t, ids), lambda t: rows(t, ids + 99), params["embed"]
    )
    return error(h, params, y)


def mapped(params: Any, ids: Any, y: Any) -> Any:
    return error(jax.vmap(jax.vmap(lambda k: params["embed"][k]))(ids), params, y)


def one_row(params: Any, ids: Any, y: Any) -> Any:
    return error(params["embed"][ids[0, 1]] + params["embed"][ids[1, 0], :], params, y)


def by_sorting(params: Any, ids: Any, y: Any) -> Any:
    order = jnp.argsort(ids.reshape(-1))
    return error(params["embed"][ids.reshape(-1)[order].reshape(ids.shape)], params, y)


def after_own_derivative(params: Any, ids: Any, y: Any) -> Any:
    gate = jax.nn.relu(params["head"])  # a custom_jvp that does not see the table
    return error(params["embed"][ids] * gate, params, y)


def deep(params: Any, ids: Any, y: Any) -> Any:
    """A branch in a rematerialised scan in a scan, backwards; a marked table."""
    table = shard(params["embed"], "data", None)

    def inner(h: Any, x: Any) -> Any:
        row = jax.lax.cond(x % 2 == 0, lambda t: t[x], lambda t: 2 * t[(x + 5) % ROWS], table)
        return h + row @ params["head"], h

    def outer(h: Any, row: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(inner), h, row, reverse=True)

    last, all_h = jax.lax.scan(outer, 0.0, ids)
    return last**2 + jnp.mean((all_h - y) ** 2)


def kept(params: Any, ids: Any, y: Any) -> Any:
    policy = jax.checkpoint_policies.everything_saveable
    return jax.checkpoint(taken, policy=policy, prevent_cse=False)(params, ids, y)


GOOD = [
    plain, taken, clipped, twice, bfloat, scanned, remat, remat_scan, branches, mapped, one_row,
    by_sorting, after_own_derivative, deep, kept,
]  # fmt: skip


def rows_and_whole(function: Any, params: Any, *batch: Any, leaf: str) -> tuple[Any, Any, Any]:
    """(value, gradients) by rows, gradients of the tables scattered; and the same of the whole."""
    found = find_lookups(function, params, batch)
    assert leaf in {t.path for t in found.tables}, dict(found.refused)
    leaves, form = jax.tree_util.tree_flatten(params)
    small, ids = list(leaves), {}
    for table, index in zip(found.tables, jax.jit(found.indices)(*batch), strict=True):
        unique = unique_rows(table, [np.asarray(x) for x in index])
        at = ids[table.path] = padded(unique, table.rows)
        values = np.full((len(at), *table.width), 1e9, np.asarray(leaves[table.leaf]).dtype)
        values[: len(unique)] = np.asarray(leaves[table.leaf])[unique]
        small[table.leaf] = values
        assert table.looked_up == sum(x.size for x in index)
    fast = jax.jit(jax.value_and_grad(on_rows(found, form), has_aux=True))
    (value, missing), gradients = fast(jax.tree_util.tree_unflatten(form, small), ids, *batch)
    assert missing == dict.fromkeys(ids, False)
    whole = jax.tree_util.tree_leaves(gradients)
    for table in found.tables:
        full = np.zeros_like(np.asarray(leaves[table.leaf]))
        at = ids[table.path]
        full[at[at < table.rows]] = np.asarray(whole[table.leaf])[at < table.rows]
        assert not np.asarray(whole[table.leaf])[at == table.rows].any()  # padding
        whole[table.leaf] = full
    got = value, jax.tree_util.tree_unflatten(form, whole)
    return got, jax.jit(jax.value_and_grad(function))(params, *batch), found


def same(got: Any, expected: Any, tolerance: float = 0.0) -> None:
    def equal(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(equal, got, expected)


@pytest.mark.long
@pytest.mark.parametrize("function", GOOD, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_whole_table(function: Any) -> None:
    got, expected, _ = rows_and_whole(function, PARAMS, IDS, Y, leaf="['embed']")
    assert np.abs(expected[1]["embed"]).sum() > 0
    same(got, expected, 1e-6)


QUICK = (plain, clipped, scanned, branches, deep)


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, id=f.__name__, marks=() if f in QUICK else pytest.mark.slow) for f in GOOD],
)
def test_a_row_that_is_not_there_is_told(function: Any) -> None:
    """Indices may be rounded otherwise than when rows were asked for; no lookup takes another."""
    found = find_lookups(function, PARAMS, (IDS, Y))
    form = jax.tree_util.tree_structure(PARAMS)
    (index,) = found.indices(IDS, Y)
    asked = unique_rows(found.tables[0], [np.asarray(x) for x in index])
    told = []
    for k in range(-1, len(asked)):
        ids = asked if k < 0 else np.delete(asked, k)
        small = {"embed": TABLE[ids], "head": HEAD}
        told.append(bool(on_rows(found, form)(small, {"['embed']": ids}, IDS, Y)[1]["['embed']"]))
    if function in (branches, deep):  # which pull rows of branches that are not taken
        assert not told[0] and any(told[1:])
    else:
        assert told == [False, *[True] * len(asked)]


def test_a_broken_promise_of_the_taken_branch_is_told() -> None:
    """The rows of all branches are asked for, so an index outside is seen only when it is used."""
    for sign in (1, -1):
        y = sign * np.abs(Y)
        found = find_lookups(branches, PARAMS, (IDS, y))
        form = jax.tree_util.tree_structure(PARAMS)
        everything = {"['embed']": np.arange(ROWS, dtype=np.int32)}
        _, missing = on_rows(found, form)(PARAMS, everything, IDS, y)
        assert bool(missing["['embed']"]) == (sign < 0)


def test_nothing_of_the_walk_is_left() -> None:
    with jax.checking_leaks():
        found = find_lookups(scanned, PARAMS, (IDS, Y))
        jax.jit(found.indices)(IDS, Y)
    assert [t.path for t in found.tables] == ["['embed']"]


def test_a_table_that_is_not_read() -> None:
    def loss(params: Any, ids: Any, y: Any) -> Any:
        jax.lax.cond(y[0, 0] > 0, lambda t: 0.0, lambda t: 1.0, params["embed"])
        return jnp.mean(params["other"][ids]) * jnp.mean(y)

    params = {"embed": TABLE, "other": TABLE, "scale": np.float32(2)}
    found = find_lookups(loss, params, (IDS, Y))
    assert [t.path for t in found.tables] == ["['other']"]
    assert [(t.path, t.looked_up, t.bounds) for t in found.unused] == [("['embed']", 0, ())]
    assert unique_rows(found.unused[0], ()).shape == (0,)
    assert "['embed']" not in {t.path for t in find_lookups(tied, PARAMS, (IDS, Y)).unused}


@pytest.mark.long
@pytest.mark.parametrize(
    "function", [plain, taken, twice, bfloat, scanned], ids=lambda f: f.__name__
)
def test_rows_add_up_in_the_same_order(function: Any) -> None:
    got, expected, _ = rows_and_whole(function, PARAMS, IDS, Y, leaf="['embed']")
    np.testing.assert_array_equal(got[1]["embed"], expected[1]["embed"])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_flax_linen(dtype: Any) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            h = nn.Embed(ROWS, WIDTH, dtype=dtype)(ids).mean(axis=1)
            return nn.Dense(3)(nn.relu(nn.Dense(16)(h))).astype(jnp.float32)

    model = Model()
    params = model.init(jax.random.key(0), IDS)

    def loss(params: Any, ids: Any, y: Any) -> Any:
        return jnp.mean((model.apply(params, ids) - y) ** 2)

    leaf = "['params']['Embed_0']['embedding']"
    got, expected, found = rows_and_whole(loss, params, IDS, Y, leaf=leaf)
    same(got, expected, 1e-6)
    assert [t.path for t in found.tables] == [leaf] and len(found.refused) == 4


@pytest.mark.long
def test_flax_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.words = nnx.Embed(ROWS, WIDTH, rngs=rngs)
            self.places = nnx.Embed(3, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            return self.head(self.words(ids) + self.places(jnp.arange(3)))[..., 0]

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)

    def loss(params: Any, ids: Any, y: Any) -> Any:
        return jnp.mean((nnx.merge(graph, params)(ids) - y) ** 2)

    got, expected, found = rows_and_whole(loss, params, IDS, Y, leaf="['words']['embedding']")
    same(got, expected, 1e-6)
    assert [t.rows for t in found.tables] == [3, ROWS]


@pytest.mark.parametrize("function", [taken, clipped])
def test_indices_outside(function: Any) -> None:
    ids = np.array([[-1, -50, 3], [-51, 50, 1000]], np.int32)
    got, expected, _ = rows_and_whole(function, PARAMS, ids, Y, leaf="['embed']")
    same(got, expected, 1e-6)
    assert np.isnan(expected[0]) == (function is taken)


def test_a_fill_row_has_no_gradient() -> None:
    ids = np.array([[-1, -50, 3], [-51, 50, 1000]], np.int32)

    def loss(params: Any, ids: Any, y: Any) -> Any:
        h = params["embed"].at[ids].get(mode="fill", fill_value=0.5)
        return error(h, params, y)

    got, expected, _ = rows_and_whole(loss, PARAMS, ids, Y, leaf="['embed']")
    same(got, expected, 1e-6)
    assert np.count_nonzero(expected[1]["embed"].sum(axis=1)) == 3


@pytest.mark.parametrize(("index", "side"), [(50, "from 50 on"), (-51, "below the first row")])
def test_a_broken_promise_is_an_error(index: int, side: str) -> None:
    ids = np.full((2, 3), index, np.int32)
    with pytest.raises(RequestError, match=rf"\['embed'\].*test_lookups.py:\d+ .*{side}"):
        rows_and_whole(plain, PARAMS, ids, Y, leaf="['embed']")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int16])
def test_narrow_indices(dtype: Any) -> None:
    table = RNG.normal(size=(300, WIDTH)).astype(np.float32)
    ids = np.array([[3, 100, 127], [0, 3, 7]], dtype)
    got, expected, _ = rows_and_whole(
        taken, {"embed": table, "head": HEAD}, ids, Y, leaf="['embed']"
    )
    same(got, expected, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("width", [(), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rows_of_any_shape(width: tuple[int, ...], dtype: Any) -> None:
    def loss(params: Any, ids: Any, y: Any) -> Any:
        h = params["embed"][ids].astype(jnp.float32)
        return jnp.mean(h**2) + jnp.mean(params["embed"][ids[0, 0]]) + jnp.mean(y)

    params = {"embed": RNG.normal(size=(ROWS, *width)).astype(dtype), "other": HEAD}
    got, expected, found = rows_and_whole(loss, params, IDS, Y, leaf="['embed']")
    low = jax.tree.map(lambda x: np.asarray(x, np.float32), (got, expected))
    same(*low, 1e-6)
    assert found.tables[0].width == width
    assert found.tables[0].row_bytes == int(np.prod(width)) * np.dtype(dtype).itemsize


def test_whole_numbers_are_no_table() -> None:
    found = find_lookups(lambda p, i: p["names"][i].sum(), {"names": np.arange(9)}, (IDS,))
    assert "no gradient" in found.refused["['names']"]


def test_results_keep_their_form() -> None:
    def both(params: Any, ids: Any, y: Any) -> Any:
        return {"loss": plain(params, ids, y), "mean": (y.mean(), params["head"])}

    found = find_lookups(both, PARAMS, (IDS, Y))
    ids = padded(np.unique(IDS).astype(np.int32), ROWS)
    small = {"embed": TABLE[np.minimum(ids, ROWS - 1)], "head": HEAD}
    form = jax.tree_util.tree_structure(PARAMS)
    got, _ = on_rows(found, form)(small, {"['embed']": ids}, IDS, Y)
    same(got, both(PARAMS, IDS, Y), 1e-6)
    with pytest.raises(RequestError, match="parameters of the form"):
        on_rows(found, form)({"embed": 1}, {}, IDS, Y)


def tied(params: Any, ids: Any, y: Any) -> Any:
    return jnp.mean(params["embed"][ids] @ params["embed"].T) + jnp.mean(y)


def decayed(params: Any, ids: Any, y: Any) -> Any:
    return plain(params, ids, y) + 1e-4 * jnp.sum(params["embed"] ** 2)


def one_hot(params: Any, ids: Any, y: Any) -> Any:
    return error(jax.nn.one_hot(ids, ROWS) @ params["embed"], params, y)


def chosen(params: Any, ids: Any, y: Any) -> Any:
    first = params["embed"][ids]
    return error(params["embed"][jnp.argmax(first, axis=-1)], params, y)


def carried(params: Any, ids: Any, y: Any) -> Any:
    h, _ = jax.lax.scan(lambda t, x: (0.5 * t, t[x]), params["embed"], ids)
    return error(h[ids], params, y)


def over(params: Any, ids: Any, y: Any) -> Any:
    return jax.lax.scan(lambda c, row: (c + row.sum(), None), 0.0, params["embed"])[0]


def parts(params: Any, ids: Any, y: Any) -> Any:
    return jnp.mean(params["embed"][ids, 2])


def columns(params: Any, ids: Any, y: Any) -> Any:
    return jnp.mean(params["embed"][:, ids % WIDTH])


def fixed_row(params: Any, ids: Any, y: Any) -> Any:
    return jnp.mean(params["embed"][3])


def branch_of_it(params: Any, ids: Any, y: Any) -> Any:
    table = jax.lax.cond(y[0, 0] > 0, lambda t, u: t, lambda t, u: u, params["embed"], TABLE)
    return error(table[ids], params, y)


def in_while(params: Any, ids: Any, y: Any) -> Any:
    def body(x: Any) -> Any:
        return x[0] + 1, x[1] + params["embed"][x[0]].sum()

    return jax.lax.while_loop(lambda x: x[0] < ids[0, 0], body, (0, 0.0))[1]


@jax.custom_vjp
def own(table: Any, ids: Any) -> Any:
    return table[ids]


own.defvjp(lambda t, i: (t[i], (t, i)), lambda r, g: (r[0] * 2, None))


def own_derivative(params: Any, ids: Any, y: Any) -> Any:
    return error(own(params["embed"], ids), params, y)


def returned(params: Any, ids: Any, y: Any) -> Any:
    return params["embed"]


BAD = [
    (tied, r"(transpose|dot_general) at test_lookups.py:\d+ reads all of it"),
    (decayed, r"reads all of it"),
    (one_hot, r"dot_general at test_lookups.py:\d+ reads all of it"),
    (chosen, r"rows at test_lookups.py:\d+ .* depend on parameters"),
    (carried, r"a loop at test_lookups.py:\d+ carries it"),
    (over, r"a loop at test_lookups.py:\d+ carries it or goes over it"),
    (parts, r"reads something else of it than whole rows"),
    (columns, r"reads something else of it than whole rows"),
    (fixed_row, r"reads something else of it than whole rows"),
    (branch_of_it, r"a branch at test_lookups.py:\d+ returns it"),
    (in_while, r"a loop of unknown length"),
    (own_derivative, r"a function with a derivative of its own"),
    (returned, r"it is a result"),
    (lambda p, i, y: jnp.mean(p["head"]), r"does not look up rows of it"),
]


@pytest.mark.parametrize(("function", "reason"), BAD, ids=lambda x: getattr(x, "__name__", None))
def test_other_uses_are_refused(function: Any, reason: str) -> None:
    found = find_lookups(function, PARAMS, (IDS, Y))
    assert found.tables == ()
    assert re.search(reason, found.refused["['embed']"]), found.refused
    assert found.mixed == (("['embed']",) if function in (tied, decayed, chosen) else ())


INDEX_CASES = {
    "rows": st.integers(1, 40),
    "ids": st.lists(st.integers(-60, 60), min_size=6, max_size=6),
    "mode": st.sampled_from(["clip", "fill", "wrap"]),
    "twice": st.booleans(),
}


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(**INDEX_CASES)
def test_any_index_in_any_mode(rows: int, ids: list[int], mode: str, twice: bool) -> None:
    any_index(rows, ids, mode, twice)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(**INDEX_CASES)
def test_many_indices_in_any_mode(rows: int, ids: list[int], mode: str, twice: bool) -> None:
    any_index(rows, ids, mode, twice)


def any_index(rows: int, ids: list[int], mode: str, twice: bool) -> None:
    def loss(params: Any, ids: Any, y: Any) -> Any:
        h = jnp.take(params["embed"], ids, axis=0, mode=mode, fill_value=0.25)
        if twice:
            h = h * jnp.take(params["embed"], ids[::-1] + 1, axis=0, mode="clip")
        return error(h, params, y)

    params = {"embed": TABLE[:rows], "head": HEAD}
    batch = np.array(ids, np.int32).reshape(2, 3), Y
    got, expected, _ = rows_and_whole(loss, params, *batch, leaf="['embed']")
    same(got, expected, 2e-6)


def test_padding_is_a_power_of_two_and_never_shrinks() -> None:
    for n in range(1, 40):
        ids = padded(np.arange(n, dtype=np.int32), 99)
        assert len(ids) & (len(ids) - 1) == 0 and n <= len(ids) < 2 * n
        assert (ids[n:] == 99).all() and ids.dtype == np.int32
    assert len(padded(np.arange(3, dtype=np.int32), 99, size=16)) == 16
    assert len(padded(np.zeros(0, np.int32), 99)) == 1
