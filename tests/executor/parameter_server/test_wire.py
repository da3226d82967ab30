"""What travels: views that stay as they were, one put for all readers, values in bfloat16."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, Rule, layout_of, train
from executor.parameter_server.server.answers import Values
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.store import Pushed
from executor.parameter_server.transport import wire
from executor.parameter_server.transport.links import LocalLinks
from planner.errors import RequestError

PARAMS = {"w": np.ones((8, 4), np.float32), "b": np.zeros(3, np.float32)}


def test_a_pulled_tree_does_not_change_under_its_reader() -> None:
    """Nor can he write to it; large arrays are where the server's are, without a copy."""
    links = LocalLinks([Shard(Rule("async"), 1, optax.sgd(0.5), 5.0)], 1)
    server = ParameterServer(links, 0, 1, split_bytes=2**20)
    kept = [server.init(PARAMS)]
    assert np.shares_memory(kept[0]["w"], server.pull()["w"])
    for k in range(3):
        kept.append(server.push_pull({"w": np.ones((8, 4), np.float32), "b": PARAMS["b"]}))
        assert not np.shares_memory(kept[k]["w"], kept[k + 1]["w"])
    for k, tree in enumerate(kept):
        np.testing.assert_array_equal(tree["w"], np.full((8, 4), 1 - 0.5 * k))
        with pytest.raises(ValueError, match="read-only"):
            tree["w"][0] = 7.0


def test_a_pushed_array_may_be_used_again() -> None:
    for rule in (Rule("sync"), Rule("async")):
        links = LocalLinks([Shard(rule, 2, None, 5.0) for _ in range(2)], 2)
        servers = [ParameterServer(links, rank, 2, split_bytes=32) for rank in range(2)]
        for server in servers:
            server.init(PARAMS)
        pushed = {k: np.ones_like(x) for k, x in PARAMS.items()}
        servers[0].push(pushed)
        for x in pushed.values():
            x[...] = 99.0
        servers[1].push({k: np.ones_like(x) for k, x in PARAMS.items()})
        moved = 1.0 if rule.mode == "sync" else 2.0
        np.testing.assert_array_equal(servers[1].pull()["w"], PARAMS["w"] + moved)


def test_what_is_in_several_pieces_is_put_together() -> None:
    layout = layout_of(PARAMS, 2, split_bytes=32)
    flats = layout.scatter(PARAMS)
    whole = layout.gather(flats)
    assert not any(np.shares_memory(whole["w"], x) for flat in flats for x in flat.values())
    np.testing.assert_array_equal(whole["w"], PARAMS["w"])
    copied = layout_of(PARAMS, 1).gather(layout_of(PARAMS, 1).scatter(PARAMS), copy=True)
    np.testing.assert_array_equal(copied["w"], PARAMS["w"])
    again = layout.scatter({k: 2 * x for k, x in PARAMS.items()}, flats)
    assert all(a[d] is b[d] for a, b in zip(again, flats, strict=True) for d in a)
    np.testing.assert_array_equal(layout.gather(again)["w"], 2 * PARAMS["w"])


def test_values_are_published_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def publish(flat: Any) -> Any:
        made.append(flat)
        return flat

    monkeypatch.setattr("executor.parameter_server.server.shard.publish", publish)
    shard = Shard(Rule("async"), 3, None, 1.0)
    shard.init({"float32": np.zeros(4, np.float32)})
    found = [shard.pull(worker).values for worker in range(3)]
    assert len(made) == 1 and found[0] is found[1] is found[2]
    assert shard.pull(0, 0, "bfloat16").values["float32"].dtype == jnp.bfloat16
    shard.push(0, 1, Pushed({"float32": np.ones(4, np.float32)}))
    np.testing.assert_array_equal(shard.pull(1).values["float32"], np.ones(4))
    assert len(made) == 3
    np.testing.assert_array_equal(found[0]["float32"], np.zeros(4))


def test_pulls_in_bfloat16_are_the_rounded_values() -> None:
    draw = np.random.default_rng(0)
    params = {
        "x": (draw.normal(size=70) * 10.0 ** draw.integers(-20, 20, 70)).astype(np.float32),
        "special": np.array([np.inf, -np.inf, np.nan, -0.0, 1e-40], np.float32),
        "n": np.arange(5, dtype=np.int32),
    }
    exact = {k: np.zeros_like(x) for k, x in params.items()}
    links = LocalLinks([Shard(Rule("async"), 1, None, 5.0) for _ in range(2)], 1)
    server = ParameterServer(links, 0, 1, split_bytes=40, pull_dtype="bfloat16")
    pulled = server.init(params)
    for name, x in params.items():
        assert pulled[name].dtype == x.dtype
        expected = x if name == "n" else x.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(pulled[name], expected)
    server.push(exact)  # adds nothing: the servers' own values were not rounded
    full = ParameterServer(links, 0, 1, split_bytes=40)
    found = full.init(params)
    np.testing.assert_array_equal(found["x"], params["x"])


def test_an_unknown_pull_dtype() -> None:
    with pytest.raises(RequestError, match="pull_dtype='int4': expected None or 'bfloat16'"):
        train(lambda server: None, workers=1, backend="local", pull_dtype="int4")


def test_answers_without_shared_values_pass() -> None:
    found = [Values(1, {"float32": np.zeros(1)}), True, None]
    assert all(a is b for a, b in zip(wire.fetch(found, 1.0), found, strict=True))


LARGE = wire.INLINE_BYTES // 4 + 1000


def _reads(server: ParameterServer) -> Any:
    """Keeps what it pulls for some steps, and writes over what it has pushed."""
    kept = [server.init({"w": np.zeros(LARGE, np.float32), "b": np.zeros(3, np.float32)})]
    pushed = {"w": np.empty(LARGE, np.float32), "b": np.empty(3, np.float32)}
    for _ in range(12):
        for x in pushed.values():
            x[...] = 1.0
        server.push(pushed)
        for x in pushed.values():
            x[...] = np.nan
        kept.append(server.pull())
    same = [all((x == x.flat[0]).all() for x in tree.values()) for tree in kept]
    return same, [float(tree["w"][-1]) for tree in kept], kept[-1]["w"].flags.writeable


@pytest.mark.slow
@pytest.mark.parametrize("pull_dtype", [None, "bfloat16"])
def test_shared_memory_on_ray(pull_dtype: str | None) -> None:
    pytest.importorskip("ray")
    done = train(_reads, workers=2, servers=2, wait_s=60, split_bytes=2**30, pull_dtype=pull_dtype)
    for same, values, writeable in done.returned:
        assert all(same) and not writeable
        assert values == [float(k) for k in range(13)]
    np.testing.assert_array_equal(done.params["w"], np.full(LARGE, 12.0))
    done.params["b"].sum()  # Ray has ended: they are copies
