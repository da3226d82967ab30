"""Steps in pipeline stages: equal to the plain step, or refused with the line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.recipes import Recipe, rewritten
from tests.zoo.running import difference

WIDTH, VOCAB, SEQ, BATCH = 8, 12, 6, 16


@dataclasses.dataclass(frozen=True)
class Model:
    """A small language model.

    Attributes:
        layers: how many.
        scanned: whether they are one scan.
        tied: whether the head is the embedding.
        shared: whether all layers read one more parameter.
        masked: whether a mask is made of the batch and read by all layers.
        dropout: whether layers drop out, by a key in the state.
        extra: whether every layer adds to the loss.
        momentum: whether the optimizer has state.
        checkpointed: whether layers are under ``jax.checkpoint``.
    """

    layers: int = 4
    scanned: bool = False
    tied: bool = False
    shared: bool = False
    masked: bool = False
    dropout: bool = False
    extra: bool = False
    momentum: bool = False
    checkpointed: bool = False

    def parameters(self) -> Any:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)

        one = [
            {
                "up": normal(WIDTH, 2 * WIDTH),
                "bias": normal(2 * WIDTH),
                "down": normal(2 * WIDTH, WIDTH),
                "scale": 1 + normal(WIDTH),
                "out": normal(WIDTH),
            }
            for _ in range(self.layers)
        ]
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *one)
        return {
            "embed": normal(VOCAB, WIDTH),
            "layers": stacked if self.scanned else one,
            "shared": normal(WIDTH),
            "norm": 1 + normal(WIDTH),
            **({} if self.tied else {"head": normal(WIDTH, VOCAB)}),
        }

    def layer(self, x: Any, p: Any, shared: Any, mask: Any, key: Any) -> Any:
        y = p["scale"] * x / (1e-3 + jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)))
        if self.shared:
            y = y * shared
        y = jnp.tanh(y @ p["up"] + p["bias"])
        if self.dropout:
            y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0)
        y = jax.nn.gelu(y @ p["down"] + p["out"])
        mixed = jnp.einsum("bts,bsd->btd", mask, y) if self.masked else y
        return x + mixed

    def step(self, state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            x = params["embed"][batch["tokens"]]
            seen = (batch["tokens"] > 0).astype(jnp.float32)
            mask = seen[:, None, :] * jnp.tril(jnp.ones((SEQ, SEQ))) / SEQ
            more = 0.0
            run = jax.checkpoint(self.layer) if self.checkpointed else self.layer
            if self.scanned:

                def turn(x: Any, p: Any) -> Any:
                    x = run(x, p, params["shared"], mask, None)
                    return x, jnp.sum(x**2) if self.extra else None

                x, each = jax.lax.scan(turn, x, params["layers"])
                more = 1e-3 * jnp.sum(each) if self.extra else 0.0
            else:
                for k, p in enumerate(params["layers"]):
                    key = jax.random.fold_in(state["key"], k)
                    x = run(x, p, params["shared"], mask, key)
                    more = more + 1e-3 * jnp.sum(x**2) if self.extra else more
            head = params["embed"].T if self.tied else params["head"]
            logits = jax.nn.log_softmax((x * params["norm"]) @ head)
            picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)
            return -jnp.mean(picked) + more / BATCH

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        new = {**state, "key": jax.random.split(state["key"])[0]}
        if self.momentum:
            new["m"] = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
            grads = new["m"]
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 1.0 / norm)
        new["params"] = jax.tree.map(lambda p, g: p - 0.1 * scale * g, state["params"], grads)
        return new, {"loss": loss, "norm": norm}

    def args(self) -> tuple[Any, Any]:
        params = self.parameters()
        state = {"params": params, "key": jax.random.key(0)}
        if self.momentum:
            state["m"] = jax.tree.map(jnp.ones_like, params)
        rng = np.random.default_rng(1)
        words = jnp.asarray(rng.integers(0, VOCAB, (2, BATCH, SEQ)), jnp.int32)
        return state, {"tokens": words[0], "targets": words[1]}


def recipe(stages: int, parts: int, remat: str = "none") -> Recipe:
    return Recipe(microbatches=parts, remat=remat, stages=stages)


def plain(result: Any) -> Any:
    """Without keys, which numpy can't compare."""
    state, metrics = result
    return {k: v for k, v in state.items() if k != "key"}, metrics


def check(model: Model, how: Recipe) -> Callable[..., Any]:
    args = model.args()
    made = rewritten(model.step, args, how)
    got, expected = jax.jit(made)(*args), jax.jit(model.step)(*args)
    assert difference(plain(got), plain(expected)) <= 2e-6
    assert (jax.random.key_data(got[0]["key"]) == jax.random.key_data(expected[0]["key"])).all()
    return made


MODELS = {
    "scanned": Model(scanned=True),
    "scanned, all at once": Model(scanned=True, tied=True, shared=True, masked=True, momentum=True),
    "scanned, checkpointed": Model(scanned=True, checkpointed=True, masked=True),
    "written out": Model(),
    "written out, all at once": Model(tied=True, shared=True, masked=True, momentum=True),
    "written out, dropout": Model(dropout=True, masked=True),
    "written out, checkpointed": Model(checkpointed=True, masked=True),
}


SHORT = "written out, all at once", "scanned"
"""Models whose test with four stages is not slow."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stages", "parts"),
    [
        *((name, 2, 4) for name in MODELS),
        *((name, 4, 2) for name in SHORT),
        *(pytest.param(n, 4, 2, marks=pytest.mark.slow) for n in MODELS if n not in SHORT),
    ],
)
def test_equal_numbers(name: str, stages: int, parts: int) -> None:
    made = check(MODELS[name], recipe(stages, parts))
    assert f"{stages} stages, each " in made.staged[0]  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("name", ["scanned, all at once", "written out, all at once"])
@pytest.mark.parametrize("remat", ["full", "dots", "64"])
def test_with_rematerialization(name: str, remat: str) -> None:
    check(MODELS[name], recipe(2, 4, remat))


@pytest.mark.long
@pytest.mark.parametrize("name", ["scanned", "written out"])
def test_blocks_of_several_layers(name: str) -> None:
    made = check(dataclasses.replace(MODELS[name], layers=6), recipe(3, 8))
    assert "3 stages, each 2 of the 6" in made.staged[0]  # type: ignore[attr-defined]


def encoded(scanned: bool) -> Callable[..., Any]:
    """A step of an encoder and a decoder that attends to its output in every layer."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            memory = params["embed"][batch["tokens"]]
            for p in params["encoder"]:
                memory = memory + jnp.tanh(memory @ p["up"]) @ p["down"]
            x = params["embed"][batch["targets"]]

            def layer(x: Any, p: Any) -> Any:
                weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x * p["scale"], memory))
                x = x + jnp.einsum("bts,bsd->btd", weights, memory) * p["out"]
                return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

            if scanned:
                x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
            else:
                for p in params["layers"]:
                    x = layer(x, p)
            return jnp.mean((x * params["norm"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    return step


@pytest.mark.long
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_every_layer_attends_to_goes_along(scanned: bool, remat: str) -> None:
    model = Model(scanned=scanned)
    state, batch = model.args()
    params = {**state["params"], "encoder": Model(layers=1).parameters()["layers"]}
    step = encoded(scanned)
    made = rewritten(step, (params, batch), recipe(4, 4, remat))
    got, expected = jax.jit(made)(params, batch), jax.jit(step)(params, batch)
    assert difference(got, expected) <= 2e-6


@pytest.mark.long
@pytest.mark.parametrize(
    ("scanned", "remat"),
    [
        (True, "full"),
        (False, "none"),
        pytest.param(True, "none", marks=pytest.mark.slow),
        pytest.param(False, "full", marks=pytest.mark.slow),
    ],
)
def test_layers_that_are_left_over_stay_behind_the_stages(scanned: bool, remat: str) -> None:
    model = Model(layers=7, scanned=scanned, masked=True, tied=True, momentum=True)
    made = check(model, recipe(3, 4, remat))
    (line,) = made.staged  # type: ignore[attr-defined]
    assert "3 stages, each 2 of the " in line and line.split("; ")[1][0] == "1"


@pytest.mark.parametrize("rank", [1, 2])
def test_equal_convolutions_are_layers(rank: int) -> None:
    """A layer's input gradient reads a reversed kernel; the first layer needs none."""
    numbers = ("NWC", "WIO", "NWC") if rank == 1 else ("NHWC", "HWIO", "NHWC")
    rng = np.random.default_rng(0)

    def layer(h: Any, w: Any) -> Any:
        ones = (1,) * rank
        out = jax.lax.conv_general_dilated(h, w, ones, "SAME", dimension_numbers=numbers)
        return h + jnp.tanh(out)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = layer(h, w)
            return jnp.mean((h - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = [rng.normal(size=(*(3,) * rank, 4, 4)).astype(np.float32) / 6 for _ in range(4)]
    args = (params, rng.normal(size=(8, *(4,) * rank, 4)).astype(np.float32))
    made = rewritten(step, args, Recipe(stages=2, microbatches=4))
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 1e-5


def test_a_loop_over_no_rows_is_cut_in_two() -> None:
    """A loop of five turns that reads the batch alone, behind four layers."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = h + jnp.tanh(h @ w)
            again = jax.lax.fori_loop(0, 5, lambda _, u: jnp.sin(u + h), jnp.zeros(h.shape))
            return jnp.mean(again * h)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    rng = np.random.default_rng(0)
    params = [rng.normal(size=(8, 8)).astype(np.float32) / 4 for _ in range(4)]
    args = (params, rng.normal(size=(8, 8)).astype(np.float32))
    made = rewritten(step, args, Recipe(stages=2, microbatches=2))
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 1e-5
