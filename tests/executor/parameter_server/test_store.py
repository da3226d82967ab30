"""Updates on flat parts have the bits of updates on whole arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import layout_of
from executor.parameter_server.placement.elementwise import EXACT
from executor.parameter_server.server.store import Pushed, Store

OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "rmsprop": optax.rmsprop(0.1),
    "adagrad": optax.adagrad(0.1),
    "lion": optax.lion(1e-2),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 20)),
}
SHAPES = {"w": (7, 5), "b": (3,), "v": (2, 3, 11), "s": (2,)}


@pytest.mark.parametrize(
    ("name", "servers", "split"),
    [
        pytest.param(
            *(name, *cut), marks=() if cut == (3, 64) or name == "adam" else pytest.mark.slow
        )
        for name in OPTIMIZERS
        for cut in ((1, 10**6), (2, 40), (3, 64))
    ],
)
def test_the_same_bits_however_arrays_are_cut(name: str, servers: int, split: int) -> None:
    optimizer = OPTIMIZERS[name]
    draw = np.random.default_rng(1)
    params = {k: draw.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    layout = layout_of(params, servers, split_bytes=split)
    stores = [Store(optimizer, exact=True) for _ in range(servers)]
    for store, flat in zip(stores, layout.scatter(params), strict=True):
        store.init(flat)

    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(update, compiler_options=EXACT)
    whole = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(whole)
    for _ in range(12):
        gradients = {k: draw.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
        for store, flat in zip(stores, layout.scatter(gradients), strict=True):
            store.apply(Pushed(flat))
        whole, state = step(whole, state, gradients)
    served = layout.gather([store.read() for store in stores])
    jax.tree.map(np.testing.assert_array_equal, served, jax.device_get(whole))


def test_what_is_read_stays_as_it_was() -> None:
    store = Store(optax.sgd(0.1), exact=False)
    store.init({"float32": np.ones(64, np.float32)})
    before = store.read()["float32"]
    store.apply(Pushed({"float32": np.ones(64, np.float32)}))
    np.testing.assert_array_equal(before, np.ones(64))


def test_a_scaled_update_moves_less() -> None:
    for optimizer in (None, optax.sgd(1.0), optax.adam(0.1)):
        moved = []
        for scale in (1.0, 0.25):
            store = Store(optimizer, exact=False)
            store.init({"float32": np.zeros(4, np.float32)})
            store.apply(Pushed({"float32": np.ones(4, np.float32)}), scale=scale)
            moved.append(store.read()["float32"])
        np.testing.assert_allclose(moved[1], 0.25 * moved[0], rtol=1e-6)


def test_integers_are_scaled_and_rounded() -> None:
    store = Store(None, exact=False)
    large = np.array([2**24 + 1, 10, 3], np.int32)
    store.init({"int32": np.zeros(3, np.int32)}, {"t": np.zeros((1, 3), np.int32)})
    for scale in (1.0, 0.5):
        store.apply(Pushed({"int32": large}, {"t": (np.array([0]), large[None])}), scale=scale)
    halves = np.array([2**23, 5, 2])  # to even
    np.testing.assert_array_equal(store.read()["int32"], large + halves)
    np.testing.assert_array_equal(store.tables.whole()["t"][0], large + halves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_a_mean_is_summed_in_order(dtype: str, count: int) -> None:
    """With every addition rounded, as NumPy does it; a push without dense gradients counts."""
    draw = np.random.default_rng(count)
    parts = [(100 * draw.normal(size=999)).astype(jnp.dtype(dtype)) for _ in range(count)]
    store = Store(None, exact=True)
    store.init({dtype: np.zeros(999, jnp.dtype(dtype))})
    store.apply(*(Pushed({dtype: x}) for x in parts[:-1]), Pushed())
    total = parts[0]
    for x in parts[1:-1]:
        total = total + x
    expected = (total / count).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(store.read()[dtype], expected)
