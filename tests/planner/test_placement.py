"""Where parameters lie: rules by path, prices, and what the planner chooses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from costmodels import parse_cluster
from planner.errors import MemoryLimitError, RequestError
from planner.graph.lookups.tables import find_lookups
from planner.placement.case import (
    CALL_S,
    SERVER_BYTES_PER_S,
    asked_places,
    parse_placement,
    served_seconds,
)
from planner.placement.choice import Placement, make_placement, place_and_plan
from planner.request.parsed import parse_request


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def loss(params: Any, ids: Any, y: Any) -> Any:
    h = sum(jnp.take(t, ids, axis=0).mean(axis=1) for t in params["tables"].values())
    return jnp.mean((jax.nn.relu(h @ params["hidden"]) @ params["out"] - y) ** 2)


def placed(
    tables: dict[str, int], placement: Any = "auto", *, batch: int = 4096, rows: Any = None,
    optimizer: Any = None, **asked: Any,
) -> Placement:  # fmt: skip
    params = {
        "tables": {name: shape(n, 64) for name, n in tables.items()},
        "hidden": shape(64, 256),
        "out": shape(256),
    }
    args = shape(batch, 8, dtype=jnp.int32), shape(batch)
    request = parse_request("h100:8", mesh="data=8", **asked)
    found = find_lookups(loss, params, args)
    named = {f"['tables']['{k}']": n for k, n in (rows or {}).items()}
    chosen = optimizer or optax.adam(1e-3)
    given = (found, params, args, chosen, placement, request)
    return place_and_plan(*given, asked_for=named)[0]


def test_prices_grow_with_bytes_and_state() -> None:
    one, many = parse_cluster("h100:8"), parse_cluster("h100:8x4")
    base = served_seconds(one, 1e6, 0)
    assert one.host is not None and many.network is not None
    copies = 4 * (one.host.latency_s + 1e6 / one.host.bytes_per_s)
    assert base == pytest.approx(2 * CALL_S + copies + 3e6 / SERVER_BYTES_PER_S)
    assert served_seconds(one, 1e6, 2) == pytest.approx(base + 4e6 / SERVER_BYTES_PER_S)
    wire = 2 * (many.network.latency_s + 1e6 / many.network.bytes_per_s)
    local = 2 * (one.host.latency_s + 1e6 / one.host.bytes_per_s)
    assert served_seconds(many, 1e6, 0) == pytest.approx(base - local + wire)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (optax.adam(1e-3), (2, 2)),
        (optax.sgd(1e-3), (0, 0)),
        (
            optax.multi_transform(
                {"two": optax.adam(1e-3), "one": optax.sgd(1e-3, momentum=0.9)},
                {"e": "two", "x": {"e": "one"}},
            ),
            (2, 1),
        ),
    ],
    ids=["adam", "sgd", "each its own"],
)
def test_a_table_named_like_the_end_of_another_has_its_own_state(
    optimizer: Any, state: tuple[int, int]
) -> None:
    def loss(params: Any, ids: Any) -> Any:
        return sum(jnp.mean(jnp.take(t, ids, axis=0)) for t in (params["e"], params["x"]["e"]))

    params = {"e": shape(2**16, 64), "x": {"e": shape(2**16, 64)}}
    ids = shape(256, dtype=jnp.int32)
    found = make_placement(
        loss, params, optimizer, ids, cluster="h100:8", placement={"": "ps"}, mesh="data=8"
    )
    cluster = parse_cluster("h100:8")
    expected = [served_seconds(cluster, 256 * 64 * 4, moments) for moments in state]
    assert [leaf.path for leaf in found.leaves] == ["['e']", "['x']['e']"]
    assert [leaf.served_s for leaf in found.leaves] == pytest.approx(expected)


def test_what_the_optimizer_looks_at_stays_and_may_not_be_served() -> None:
    """A norm of all gradients: with part of them on servers it would be another."""

    def loss(params: Any, ids: Any) -> Any:
        return jnp.mean(jnp.take(params["table"], ids, axis=0) @ params["head"])

    params = {"table": shape(100_000_000, 64), "head": shape(64, 8)}
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    def place(optimizer: Any, placement: Any) -> Any:
        ids = shape(256, dtype=jnp.int32)
        return make_placement(
            loss, params, optimizer, ids, cluster="h100:8", placement=placement, mesh="data=8"
        )

    (served,), (kept,) = (place(o, "auto").leaves for o in (optax.adam(0.1), clipped))
    assert (served.place, kept.place) == ("ps", "spmd")
    assert "update of ['head'] depends on other arrays" in kept.reason
    with pytest.raises(RequestError, match=r"update of \['head'\] depends .*\(\['table'\]\)"):
        place(clipped, {"table": "ps"})


@pytest.mark.long
def test_a_large_table_of_few_rows_is_served_and_one_that_is_read_whole_is_not() -> None:
    found = placed({"large": 100_000_000, "small": 8_192}, rows={"large": 2_000, "small": 8_192})
    large, small = found.leaves
    assert (large.place, small.place) == ("ps", "spmd")
    assert large.spmd_s is not None and small.spmd_s is not None
    assert large.served_s < large.spmd_s and small.served_s >= small.spmd_s
    assert large.rows == 2_000 and large.row_bytes == 2_000 * 256
    assert set(map(str, found.leaves)) <= set(found.plan.notes)
    paths = [leaf.path for leaf in found.plan.inputs]
    assert "[0]['params']['tables']['small']" in paths
    assert not any("'large'" in path for path in paths if path.startswith("[0]"))


@pytest.mark.long
def test_the_price_under_spmd_is_what_the_plan_costs_more() -> None:
    tables = {"large": 100_000_000}
    chosen = placed(tables, rows={"large": 2_000})
    without, within = (
        placed(tables, {"large": where}, rows={"large": 2_000}).plan.prediction.step_s
        for where in ("ps", "spmd")
    )
    assert chosen.leaves[0].spmd_s == pytest.approx(within - without)


@pytest.mark.long
def test_what_does_not_fit_is_served() -> None:
    found = placed({"large": 100_000_000}, rows={"large": 200_000}, memory="2GB")
    (large,) = found.leaves
    assert large.place == "ps" and large.spmd_s == math.inf and "no plan fits" in large.reason
    with pytest.raises(MemoryLimitError):
        placed({"large": 100_000_000}, {"large": "spmd"}, memory="2GB")
    with pytest.raises(MemoryLimitError):
        placed({"large": 100_000_000}, rows={"large": 4_000_000}, memory="100MB")


def test_without_a_batch_all_look_ups_may_differ() -> None:
    (large,) = placed({"large": 100_000_000}, {"large": "ps"}).leaves
    assert large.rows == 4096 * 8 and large.spmd_s is None and "requested" in large.reason


def test_a_table_may_cost_nothing_under_spmd() -> None:
    """Of all lookups, each may ask for another row: as many rows come as the table has."""
    (table,) = placed({"table": 8_192}, rows={"table": 8_192}).leaves
    assert table.spmd_s is not None and table.spmd_s < table.served_s and table.place == "spmd"
    shown = "no more under SPMD" if table.spmd_s <= 0 else "us under SPMD"
    assert table.reason.endswith(shown)


def test_small_tables_are_not_looked_at() -> None:
    assert placed({"small": 1_000}).leaves == ()
    assert str(placed({"small": 1_000})) == "all parameters under SPMD"


def test_a_loss_is_a_scalar_and_nothing_besides() -> None:
    params = {"e": shape(2**16, 64)}

    def table_loss(params: Any, ids: Any) -> Any:
        return jnp.sum(params["e"][ids]), {}

    with pytest.raises(RequestError, match=r"^loss\(params, \*batch\) returns float32\[\] in"):
        make_placement(
            table_loss, params, optax.sgd(1.0), shape(8, dtype=jnp.int32), cluster="h100:8"
        )


def test_rules() -> None:
    paths = ["['a']['embed']", "['b']['embed']", "['head']"]
    rules = parse_placement({"'a'": "spmd", "embed": "ps", "head": "ps_whole"})
    assert list(asked_places(rules, paths).values()) == ["spmd", "ps", "ps_whole"]
    assert set(asked_places(parse_placement("auto"), paths).values()) == {"auto"}
    with pytest.raises(RequestError, match="no parameter path matches 'vocab'"):
        asked_places((("vocab", "ps"),), paths)
