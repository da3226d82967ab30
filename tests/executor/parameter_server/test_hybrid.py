"""Mixed placement: tables on servers, the rest planned; equal to a run without servers."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, hybrid, train
from planner.errors import ModelError, RequestError
from planner.graph.lookups.tables import find_lookups
from planner.placement.case import moments_of
from planner.placement.hybrid_step import looks_across, split_of

pytestmark = pytest.mark.devices
ROWS, WIDTH, BATCH, STEPS = 5000, 64, 32, 5
RNG = np.random.default_rng(0)
DATA = [
    (
        RNG.integers(0, ROWS, (BATCH, 4)).astype(np.int32),
        RNG.normal(size=(BATCH,)).astype(np.float32),
    )
    for _ in range(STEPS)
]
SGD = optax.sgd(0.5)


def fresh() -> Any:
    rng = np.random.default_rng(1)
    return {
        "embed": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "hidden": rng.normal(size=(WIDTH, 32)).astype(np.float32) / 8,
        "out": rng.normal(size=(32,)).astype(np.float32) / 6,
    }


def loss(params: Any, ids: Any, y: Any) -> Any:
    h = jnp.take(params["embed"], ids, axis=0).mean(axis=1)
    return jnp.mean((jnp.tanh(h @ params["hidden"]) @ params["out"] - y) ** 2)


class Fake:
    """The store in this process, with plain SGD; what a worker sees of it."""

    def __init__(self, num_workers: int = 1, rate: float = 0.5) -> None:
        self.num_workers, self.rank, self.rate = num_workers, 0, rate
        self.optimizer: Any = optax.sgd(rate)
        self.asked: list[dict[str, int]] = []

    def init(self, params: Any, tables: Any) -> Any:
        self.params = jax.tree.map(np.array, params)
        self.tables = {name: np.array(x) for name, x in tables.items()}
        return self.params

    def pull_rows(self, ids: Any) -> Any:
        self.asked.append({name: len(i) for name, i in ids.items()})
        return {name: self.tables[name][i] for name, i in ids.items()}

    def push(self, gradients: Any, rows: Any = None) -> None:
        for name, (ids, x) in (rows or {}).items():
            np.subtract.at(self.tables[name], ids, self.rate * np.asarray(x))
        if gradients is not None:
            self.params = jax.tree.map(lambda p, g: p - self.rate * g, self.params, gradients)

    def push_pull(self, gradients: Any, rows: Any = None) -> Any:
        self.push(gradients, rows)
        return self.params


def alone() -> tuple[list[float], Any]:
    """The same without servers or devices."""
    params, state = fresh(), SGD.init(fresh())
    losses = []
    for batch in DATA:
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, *batch)
        updates, state = SGD.update(gradients, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


def test_training_is_that_without_servers() -> None:
    server = Fake()
    run = hybrid(loss, fresh(), SGD, server=server, placement={"embed": "ps"}, cluster="cpu:8")
    with pytest.raises(RequestError, match="placed at the first call"):
        _ = run.plan
    losses = [float(run(*batch)) for batch in DATA]
    expected, params = alone()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(server.tables["['embed']"], params["embed"], rtol=1e-4, atol=1e-6)
    assert run.params["embed"] is None
    for name in ("hidden", "out"):
        np.testing.assert_allclose(run.params[name], params[name], rtol=1e-4, atol=1e-6)
    assert [x["['embed']"] for x in server.asked] == [len(np.unique(ids)) for ids, _ in DATA]
    assert run.plan.mesh.num_devices == 8
    (placed,) = run.placement.leaves
    assert placed.place == "ps" and placed.rows == server.asked[0]["['embed']"]
    assert str(placed) in run.plan.notes
    assert not any("['embed']" in leaf.path and "[0]" in leaf.path for leaf in run.plan.inputs)


def split(worker: int, workers: int) -> list[Any]:
    return [(ids[worker::workers], y[worker::workers]) for ids, y in DATA]


def loop(server: ParameterServer) -> Any:
    """A worker's life, with everything on servers if there are several."""
    places = {"embed": "ps"} if server.num_workers == 1 else {"embed": "ps", "": "ps_whole"}
    cluster = f"cpu:{jax.device_count()}"
    run = hybrid(loss, fresh(), SGD, server=server, placement=places, cluster=cluster)
    losses = [float(run(*batch)) for batch in split(server.rank, server.num_workers)]
    everything = np.arange(ROWS, dtype=np.int32)
    server.barrier()
    return losses, server.pull_rows({"['embed']": everything})["['embed']"], run.params


@pytest.mark.parametrize(("workers", "servers"), [(1, 2), (2, 3)])
def test_on_real_servers(workers: int, servers: int) -> None:
    done = train(loop, workers=workers, servers=servers, optimizer=SGD, backend="local", wait_s=60)
    expected, params = alone()
    mean = np.mean([losses for losses, _, _ in done.returned], axis=0)
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
    for _, embed, rest in done.returned:
        np.testing.assert_allclose(embed, params["embed"], rtol=1e-4, atol=1e-6)
        if workers == 1:
            np.testing.assert_allclose(rest["hidden"], params["hidden"], rtol=1e-4, atol=1e-6)
    if workers > 1:
        hidden = done.params["['hidden']"]
        np.testing.assert_allclose(hidden, params["hidden"], rtol=1e-4, atol=1e-6)


def test_a_batch_that_asks_for_nothing() -> None:
    def worker(server: ParameterServer) -> Any:
        places = {"embed": "ps"}
        run = hybrid(filled, fresh(), SGD, server=server, placement=places, cluster="cpu:8")
        first = float(run(np.full((BATCH, 4), ROWS, np.int32), DATA[0][1]))
        return first, float(run(*DATA[0]))

    def filled(params: Any, ids: Any, y: Any) -> Any:
        h = params["embed"].at[ids].get(mode="fill", fill_value=0.5).mean(axis=1)
        return jnp.mean((jnp.tanh(h @ params["hidden"]) @ params["out"] - y) ** 2)

    done = train(worker, workers=1, servers=2, optimizer=SGD, backend="local", wait_s=60)
    first = float(jax.jit(filled)(fresh(), np.full((BATCH, 4), ROWS, np.int32), DATA[0][1]))
    assert done.returned[0][0] == pytest.approx(first, rel=1e-5)
    assert np.isfinite(done.returned[0][1])


def test_ids_of_floating_point_arithmetic_read_no_other_rows() -> None:
    """Row r of the table holds r. Features are standardized, put into buckets and crossed; a
    program over several devices may round them to other buckets than one on the host."""
    rows = 1 << 20

    def crossed(x: Any) -> Any:
        z = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-6)
        bucket = jnp.floor(z * 300).astype(jnp.int32).astype(jnp.uint32)
        cross = bucket @ jnp.array([2654435761, 40503, 2246822519, 97], jnp.uint32)
        return ((cross * jnp.uint32(2654435761)) >> 8).astype(jnp.int32) % rows

    def wrong(params: Any, x: Any) -> Any:
        ids = crossed(x)
        read = jnp.take(params["embed"], ids, axis=0)[:, 0]
        return jnp.max(jnp.abs(read - ids)) + 0 * params["w"].sum()

    table = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 2, axis=1)
    params, places = {"embed": table, "w": np.zeros(8, np.float32)}, {"embed": "ps"}
    run = hybrid(
        wrong, params, SGD, server=Fake(), placement=places, cluster="cpu:8", mode="DATA_PARALLEL"
    )
    rng = np.random.default_rng(1)
    for _ in range(3):
        try:
            assert float(run(rng.normal(7, 3, (50_000, 4)).astype(np.float32))) == 0
        except RequestError as error:
            assert re.search(r"\['embed'\].*test_hybrid.py:\d+ has another index", str(error))
            break  # what is under SPMD is used up


def test_rows_that_did_not_come_are_not_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(*args: Any) -> Any:
        """What is asked for is one row further than what is looked up."""
        found = find_lookups(*args)
        return dataclasses.replace(
            found, indices=lambda *batch: jax.tree.map(lambda x: x + 1, found.indices(*batch))
        )

    monkeypatch.setattr(sys.modules[hybrid.__module__], "find_lookups", rounded)
    server = Fake()
    run = hybrid(loss, fresh(), SGD, server=server, placement={"embed": "ps"}, cluster="cpu:8")
    with pytest.raises(RequestError, match=r"\['embed'\].*test_hybrid.py:\d+ has.*as integers"):
        run(*DATA[0])
    np.testing.assert_array_equal(server.tables["['embed']"], fresh()["embed"])


@pytest.mark.parametrize("later", ["absent", "empty"])
def test_a_later_batch_that_does_not_read_a_table(later: str) -> None:
    def optional(params: Any, batch: Any) -> Any:
        out = jnp.mean(params["embed"][batch["i"]] ** 2)
        if "j" in batch:
            out += jnp.sum(params["second"][batch["j"]] ** 2)
        return out

    first = fresh()["embed"]
    params = {"embed": first, "second": first[:30]}
    i = np.arange(8, dtype=np.int32)
    batches = [{"i": i, "j": i}, {"i": i, "j": i[:0]} if later == "empty" else {"i": i}, {"i": i}]

    def worker(server: ParameterServer) -> Any:
        run = hybrid(optional, params, SGD, server=server, placement={"": "ps"}, cluster="cpu:8")
        losses = [float(run(batch)) for batch in batches]
        return losses, server.pull_rows({"['second']": np.arange(30, dtype=np.int32)})

    done = train(worker, workers=1, servers=2, optimizer=SGD, backend="local", wait_s=60)
    losses, found = done.returned[0]
    held, expected = params, []
    for batch in batches:
        value, gradients = jax.jit(jax.value_and_grad(optional))(held, batch)
        held = jax.tree.map(lambda p, g: p - 0.5 * g, held, gradients)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(found["['second']"], held["second"], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_on_ray() -> None:
    pytest.importorskip("ray")
    done = train(loop, workers=2, servers=2, optimizer=SGD, wait_s=120)
    mean = np.mean([losses for losses, _, _ in done.returned], axis=0)
    np.testing.assert_allclose(mean, alone()[0], rtol=1e-5)


def test_batches_are_any_arrays() -> None:
    def noisy(params: Any, batch: Any, key: Any) -> Any:
        ids = (batch["ids"] + jax.random.randint(key, (), 0, ROWS)) % ROWS
        h = params["embed"][ids].mean(axis=1) * jax.random.bernoulli(key, 0.5, (WIDTH,))
        return jnp.mean((jnp.tanh(h @ params["hidden"]) @ params["out"] - batch["y"]) ** 2)

    server = Fake()
    run = hybrid(noisy, fresh(), SGD, server=server, placement={"embed": "ps"}, cluster="cpu:8")
    batch, key = {"ids": DATA[0][0], "y": DATA[0][1]}, jax.random.key(3)
    expected = float(noisy(fresh(), batch, key))
    assert float(run(batch, key)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_only_what_ids_need_is_fetched(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(params: Any, ids: Any, y: Any, key: Any) -> Any:
        return loss(params, ids, y * jax.random.key_data(key)[0])

    fetched = []
    real = jax.device_get

    def seen(x: Any) -> Any:
        fetched.extend(leaf.shape for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.Array))
        return real(x)

    batch = *jax.device_put(DATA[0]), jax.random.key(3 << 32, impl=impl)
    expected = float(noisy(fresh(), *batch))
    run = hybrid(noisy, fresh(), SGD, server=Fake(), placement={"embed": "ps"}, cluster="cpu:8")
    monkeypatch.setattr(jax, "device_get", seen)
    assert float(run(*batch)) == pytest.approx(expected, rel=1e-5)
    assert fetched == [(BATCH, 4), (BATCH * 4,), (128, WIDTH)]  # ids, indices, rows' gradients


def test_rows_that_grow_are_planned_once_more() -> None:
    server = Fake()
    run = hybrid(loss, fresh(), SGD, server=server, placement={"embed": "ps"}, cluster="cpu:8")
    few = np.zeros_like(DATA[0][0]) + np.arange(4, dtype=np.int32)
    seen = []
    for ids in (few, DATA[0][0], few, DATA[1][0]):
        run(ids, DATA[0][1])
        rows = [leaf.shape for leaf in run.plan.inputs if leaf.path == "[1][\"['embed']\"]"]
        seen += rows
        assert str(run.placement.leaves[0]) in run.plan.notes
    assert seen == [(4, WIDTH), (128, WIDTH), (128, WIDTH), (128, WIDTH)]
    assert len(run._steps) == 2


def test_all_on_servers() -> None:
    server = Fake()
    places = {"embed": "ps", "": "ps_whole"}
    run = hybrid(loss, fresh(), SGD, server=server, placement=places, cluster="cpu:8")
    losses = [float(run(*batch)) for batch in DATA]
    expected, params = alone()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name in ("hidden", "out"):
        np.testing.assert_allclose(server.params[f"['{name}']"], params[name], rtol=1e-4, atol=1e-6)
    assert jax.tree.leaves(run.params) == []
    assert run.placement.at("ps_whole") == {"['hidden']", "['out']"}


@pytest.mark.parametrize(("rows", "place"), [(100_000, "ps"), (ROWS, "spmd")])
def test_the_planner_chooses_by_price(rows: int, place: str) -> None:
    """Adam's pass over a large table costs more than two calls for a few rows; over one that is
    smaller, less."""
    params = {**fresh(), "embed": np.zeros((rows, WIDTH), np.float32)}
    run = hybrid(loss, params, optax.adam(1e-3), server=Fake(), cluster="cpu:8")
    run(*DATA[0])
    (placed,) = run.placement.leaves
    assert placed.place == place and placed.spmd_s is not None
    assert (placed.served_s < placed.spmd_s) == (place == "ps")
    assert re.search(r"s a step on servers, .*s under SPMD", str(run.placement))


def test_what_can_not_be_served_is_said() -> None:
    def tied(params: Any, ids: Any, y: Any) -> Any:
        h = params["embed"][ids].mean(axis=1)
        return jnp.mean(h @ params["embed"].T) + loss(params, ids, y)

    run = hybrid(tied, fresh(), SGD, server=Fake(), placement={"embed": "ps"}, cluster="cpu:8")
    with pytest.raises(RequestError, match=r"\['embed'\].*test_hybrid.py:\d+ reads.*'ps_whole'"):
        run(*DATA[0])
    auto = hybrid(tied, fresh(), SGD, server=Fake(), cluster="cpu:8")
    auto(*DATA[0])
    (placed,) = auto.placement.leaves
    assert placed.place == "spmd" and "can't be served by rows" in placed.reason


def test_several_workers_need_all_on_servers() -> None:
    run = hybrid(loss, fresh(), SGD, server=Fake(2), placement={"embed": "ps"}, cluster="cpu:8")
    with pytest.raises(RequestError, match=r"2 workers.*\['hidden'\] is under SPMD.*ps_whole"):
        run(*DATA[0])


@pytest.mark.parametrize("place", ["ps", "ps_whole", "spmd"])
def test_servers_without_an_optimizer_would_add_gradients(place: str) -> None:
    def worker(server: ParameterServer) -> list[float]:
        places = {"embed": place}
        run = hybrid(loss, fresh(), SGD, server=server, placement=places, cluster="cpu:8")
        return [float(run(*batch)) for batch in DATA]

    job = functools.partial(train, worker, servers=2, backend="local", wait_s=60)
    if place == "spmd":  # nothing is there to add to
        np.testing.assert_allclose(job().returned[0], alone()[0], rtol=1e-5)
        return
    text = r"\['embed'\] is on servers, and train\(\) has no optimizer=: .* pass train\(..., opt"
    with pytest.raises(RequestError, match=text):
        job()


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ("servers", "placement='servers'"),
        (["embed"], "placement=['embed']: expected 'auto' or a mapping"),
        (None, "placement=None: expected 'auto' or a mapping"),
        ({3: "ps"}, "placement: 3 is no regular expression"),
        ({"embed": "gpu"}, "got 'gpu', expected 'ps'"),
        ({"(": "ps"}, "no regular expression"),
    ],
)
def test_broken_requests(placement: Any, text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)):
        hybrid(loss, fresh(), SGD, server=Fake(), placement=placement, cluster="cpu:8")


def test_a_rule_that_matches_nothing() -> None:
    run = hybrid(loss, fresh(), SGD, server=Fake(), placement={"vocab": "ps"}, cluster="cpu:8")
    with pytest.raises(RequestError, match=r"no parameter path matches 'vocab'.*\['embed'\]"):
        run(*DATA[0])


def test_a_run_goes_on_with_its_state(tmp_path: Any) -> None:
    """Servers from snapshots, the rest from what the loop saved; Adam's moments included."""
    from executor import Checkpoints

    def trained(until: int, where: str) -> list[float]:
        def worker(server: ParameterServer) -> list[float]:
            places = {"embed": "ps"}
            run = hybrid(
                loss, fresh(), optax.adam(0.01), server=server, placement=places, cluster="cpu:8"
            )
            losses = []
            with Checkpoints(tmp_path / where) as kept:
                begin = run.begin(*DATA[0])
                if earlier := [k for k in kept.steps if k <= begin]:
                    run.state = kept.restore(run.state, step=earlier[-1])
                for k in range(begin, until):
                    losses.append(float(run(*(DATA * 2)[k])))
                    if (k + 1) % 2 == 0 or k + 1 == until:
                        kept.save(k + 1, run.state)
            return losses

        one = {"workers": 1, "servers": 2, "optimizer": SGD, "backend": "local", "wait_s": 60}
        snapshots = {"snapshots": tmp_path / f"{where}-servers", "snapshot_every": 2}
        (losses,) = train(worker, **one, **snapshots).returned
        return list(losses)

    whole = trained(8, "whole")
    first, second = trained(5, "parts"), trained(8, "parts")
    assert (len(whole), len(first), len(second)) == (8, 5, 3)
    np.testing.assert_allclose(first + second, whole, rtol=1e-6)


def test_a_state_of_another_form_is_refused() -> None:
    run = hybrid(loss, fresh(), SGD, server=Fake(), placement={"embed": "ps"}, cluster="cpu:8")
    with pytest.raises(RequestError, match="placed at the first call"):
        _ = run.state
    with pytest.raises(RequestError, match="placed at the first call"):
        run.state = {}
    run(*DATA[0])
    state = jax.device_get(run.state)
    state["params"]["hidden"] = state["params"]["hidden"][:3]
    expected = r"state: \['params'\]\['hidden'\] is float32\[3, 32\], expected float32\[64, 32\]"
    with pytest.raises(RequestError, match=expected):
        run.state = state
    again = jax.device_get(run.state)
    other_order = {"opt": again["opt"], "params": dict(reversed(again["params"].items()))}
    run.state = other_order
    np.testing.assert_array_equal(run.state["params"]["hidden"], again["params"]["hidden"])
    with pytest.raises(RequestError, match=r"state: \['params'\]\['hidden'\] is missing"):
        run.state = {"opt": state["opt"], "params": {}}


def test_steps_count_where_nothing_is_served() -> None:
    """And float64 parameters are as JAX holds them."""

    def worker(server: ParameterServer, place: str) -> Any:
        params = jax.tree.map(lambda x: x.astype(np.float64), fresh())
        run = hybrid(loss, params, SGD, server=server, placement={"embed": place}, cluster="cpu:8")
        return [float(run(*batch)) for batch in DATA], server.clock

    for place in ("spmd", "ps"):
        life = functools.partial(worker, place=place)
        done = train(life, workers=1, servers=2, optimizer=SGD, backend="local", wait_s=60)
        losses, clock = done.returned[0]
        assert clock == STEPS and done.counts[0].updates == STEPS
        assert done.counts[0].lags == {0: STEPS}
        np.testing.assert_allclose(losses, alone()[0], rtol=1e-5)


FLAT = {"embed": False, "hidden": True, "out": True}
ACROSS = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), SGD),
    "in a step of several": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), SGD), 2
    ).gradient_transformation(),
    "finite": optax.apply_if_finite(SGD, 3),
    "one step later": optax.contrib.prodigy(0.1),
}
APART = {
    "lamb": optax.lamb(0.01),
    "lars": optax.lars(0.01),
    "adafactor": optax.adafactor(0.01),
    "muon": optax.contrib.muon(0.01),
    "each array": optax.chain(optax.clip_by_block_rms(1.0), optax.clip(1.0), SGD),
    "adaptive": optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(0.01)),
    "a mask": optax.chain(optax.masked(optax.clip_by_global_norm(1.0), FLAT), SGD),
    "several": optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(0.01),
    "jitted": optax.GradientTransformation(optax.adam(0.01).init, jax.jit(optax.adam(0.01).update)),
}


@pytest.mark.parametrize("name", ACROSS)
def test_an_optimizer_that_would_look_at_what_is_served(name: str) -> None:
    params = {"embed": fresh()["embed"], "hidden": fresh()["hidden"], "out": fresh()["out"]}
    for places in ({"embed": "ps"}, {"embed": "ps", "out": "ps_whole"}):
        run = hybrid(loss, params, ACROSS[name], server=Fake(), placement=places, cluster="cpu:8")
        with pytest.raises(RequestError, match=r"update of \['hidden'\].*\(\['embed'\]\).*masked"):
            run(*DATA[0])
    kept = hybrid(
        loss, params, ACROSS[name], server=Fake(), placement={"": "spmd"}, cluster="cpu:8"
    )
    kept(*DATA[0])


@pytest.mark.parametrize("name", APART)
def test_optimizers_of_each_array_by_itself(name: str) -> None:
    shapes = jax.eval_shape(fresh)
    split = split_of(shapes, frozenset({"['embed']"}), frozenset())
    assert looks_across(split, APART[name], shapes) is None


def test_an_optimizer_that_looks_at_the_tree() -> None:
    """It has the tree of all parameters when it is priced, and that of the rest when it runs."""
    mask = {"embed": False, "hidden": True, "out": True}
    adamw = optax.adamw(1e-3, mask=mask)

    def labels(params: Any) -> Any:
        return {name: "slow" if name == "out" else "fast" for name in params}

    many = optax.multi_transform({"slow": SGD, "fast": optax.adam(0.1)}, labels)
    for optimizer, moments in ((adamw, 2), (many, 2), (SGD, 0)):
        assert moments_of(optimizer, fresh())["['hidden']"] == moments
        run = hybrid(
            loss, fresh(), optimizer, server=Fake(), placement={"embed": "ps"}, cluster="cpu:8"
        )
        first = float(run(*DATA[0]))
        assert float(run(*DATA[0])) < first
    assert moments_of(many, fresh())["['out']"] == 0
    with pytest.raises(ModelError, match="the optimizer's init of the parameters failed"):
        moments_of(optax.masked(SGD, {"another": True}), fresh())
