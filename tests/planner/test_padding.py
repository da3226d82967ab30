"""A padded batch: the same results, for steps as people write them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner import make_plan
from planner.errors import RequestError
from planner.microbatch.errors import NotExactError
from planner.microbatch.rewrite import microbatched
from planner.padding.rewrite import padded

ROWS, SEQ, WIDTH, LAYERS, MORE = 10, 4, 16, 3, 16


def state() -> Any:
    draw = np.random.default_rng(0)
    return {
        "w": jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, jnp.float32),
        "embed": jnp.asarray(draw.normal(size=(32, WIDTH)), jnp.float32),
        "bias": jnp.asarray(draw.normal(size=(WIDTH,)), jnp.float32),
    }


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 32, (ROWS, SEQ)), jnp.int32)


def apart(got: Any, want: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.max(jnp.abs(a - b) / (1.0 + jnp.abs(b)))) for a, b in pairs)


def check(step: Any, *args: Any, rows: int = MORE) -> None:
    made = padded(step, args, rows)
    want, got = jax.jit(step)(*args), jax.jit(made)(*args)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert apart(got, want) < 2e-6
    lengths = {v.aval.shape[:1] for e in jax.make_jaxpr(made)(*args).eqns for v in e.outvars}
    assert (rows,) in lengths  # it does compute with more


def next_token_loss(p: Any, t: Any) -> Any:
    x = p["embed"][t] + p["bias"]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])
    logits = x @ p["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, t))


@pytest.mark.long
@pytest.mark.parametrize("remat", [False, True])
def test_a_decoder_with_a_scan(remat: bool) -> None:
    loss = jax.checkpoint(next_token_loss) if remat else next_token_loss

    def step(p: Any, t: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, t)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), {"loss": value}

    check(step, state(), tokens())


@pytest.mark.long
def test_results_of_examples_lose_the_copies() -> None:
    def step(p: Any, t: Any) -> Any:
        x = jnp.tanh(p["embed"][t])
        return p, {"each": jnp.sum(x, (1, 2)), "flat": x.reshape(-1, WIDTH), "all": jnp.sum(x)}

    check(step, state(), tokens())


@pytest.mark.long
def test_masks_and_several_arguments() -> None:
    """The denominator is a sum over the batch alone."""

    def step(p: Any, t: Any, mask: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = p["embed"][t] @ p["embed"].T
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, t)
            return jnp.sum(losses * mask) / jnp.sum(mask)

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    mask = jnp.asarray(np.random.default_rng(2).integers(0, 2, (ROWS, SEQ)), jnp.float32)
    check(step, state(), tokens(), mask)


@pytest.mark.long
def test_random_numbers_are_those_of_the_batch_as_it_is() -> None:
    def step(p: Any, t: Any) -> Any:
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, (ROWS, SEQ, WIDTH))

        def loss(p: Any) -> Any:
            return jnp.mean(jnp.where(keep, p["embed"][t], 0.0) ** 2)

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    with pytest.raises(NotExactError, match="can't be padded"):
        check(step, state(), tokens())  # the number of rows is written in it

    def by_shape(p: Any, t: Any) -> Any:
        def loss(p: Any) -> Any:
            keep = jax.random.bernoulli(jax.random.key(0), 0.5, (*t.shape, WIDTH))
            return jnp.mean(jnp.where(keep, p["embed"][t], 0.0) ** 2)

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    check(by_shape, state(), tokens())


@pytest.mark.long
def test_labels_by_position() -> None:
    def step(p: Any, t: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = jnp.mean(p["embed"][t], 1) @ p["embed"].T
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(t)), t[:, 0]])

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    check(step, state(), tokens())


@pytest.mark.long
def test_a_convolution() -> None:
    images = jnp.asarray(np.random.default_rng(3).normal(size=(6, 8, 8, 3)), jnp.float32)
    kernel = jnp.asarray(np.random.default_rng(4).normal(size=(3, 3, 3, 5)), jnp.float32)

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            numbers = jax.lax.conv_dimension_numbers(x.shape, p.shape, ("NHWC", "HWIO", "NHWC"))
            y = jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=numbers)
            return jnp.mean(jax.nn.relu(y) ** 2)

        return p - 0.1 * jax.grad(loss)(p)

    check(step, kernel, images, rows=8)


def test_statistics_of_the_batch_are_refused() -> None:
    def step(p: Any, t: Any) -> Any:
        def loss(p: Any) -> Any:
            x = p["embed"][t]
            return jnp.mean((x - jnp.mean(x, 0)) ** 2)

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    with pytest.raises(NotExactError, match=r"can't be padded: test_padding.py:\d+: .*summed"):
        padded(step, (state(), tokens()), MORE)

    advice = make_plan(step, state(), tokens(), cluster="cpu:8", mode="DATA_PARALLEL")
    assert advice.idle and "pad_batch='auto'" in advice.idle + "".join(advice.notes)
    asked = make_plan(
        step, state(), tokens(), cluster="cpu:8", mode="DATA_PARALLEL", pad_batch="auto"
    )
    texts = (asked.idle, *asked.notes)
    assert not any("pad_batch='auto'" in text for text in texts)
    assert any("batch not padded" in text and "test_padding.py" in text for text in texts[1:])


@pytest.mark.long
def test_requests_that_cannot_be_met() -> None:
    def step(p: Any, t: Any) -> Any:
        return p, jnp.sum(p["embed"][t])

    args = state(), tokens()
    assert padded(step, args, ROWS) is step
    other = tokens()[:3]  # of other shapes it is the step as it was
    assert apart(padded(step, args, MORE)(state(), other), step(state(), other)) < 1e-6
    with pytest.raises(RequestError, match="10 examples can't be padded to 8"):
        padded(step, args, 8)
    with pytest.raises(RequestError, match="no argument of the step is a batch"):
        padded(lambda p: jax.tree.map(jnp.tanh, p), (state(),), 8)


def test_data_parallel_pads_where_it_can_split_nothing_else() -> None:
    """Splitting the weights instead is predicted to be faster here, but is not data parallel."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    args = (
        jax.ShapeDtypeStruct((4096, 4096), jnp.float32),
        jax.ShapeDtypeStruct((1001, 4096), jnp.float32),
    )
    plain = make_plan(step, *args, cluster="h100:8", mode="dp")
    filled = make_plan(step, *args, cluster="h100:8", mode="dp", pad_batch="auto")
    assert plain.prediction.step_s < filled.prediction.step_s
    assert filled.pad_batch == 1008 and "activations split 8 ways" in str(filled)
    assert any("batch padded to 1008" in note for note in filled.notes)


def test_a_size_in_the_step_is_told_with_its_line() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda w: jnp.mean(x @ w - jnp.ones(12)))(w)
        return w - 0.1 * g, value

    with pytest.raises(NotExactError, match=r"can't be padded: test_padding.py:\d+: sub got"):
        make_plan(step, jnp.ones(4), jnp.ones((12, 4)), cluster="cpu:8", pad_batch=16)


@pytest.mark.parametrize("table", ["counts", "sums", "rows"])
def test_examples_are_added_onto_rows_of_the_state(table: str) -> None:
    """As counts of classes are: the state plus a sum over examples, in one operation."""

    def step(state: Any, batch: Any) -> Any:
        rows, counts, sums = state
        ids, y = batch
        if table == "counts":
            counts = counts.at[ids].add(1)
        elif table == "sums":
            sums = sums.at[ids, 1].add(y)
        else:
            rows = rows.at[ids].add(-0.1 * y[:, None] * rows[ids])
        return (rows, counts, sums), jnp.mean(
            (rows.sum(1)[ids] - y) ** 2
        ) if table != "rows" else 0.0

    rng = np.random.default_rng(0)
    state = (
        rng.normal(size=(20, 8)).astype(np.float32),
        np.arange(20, dtype=np.int32),
        rng.normal(size=(20, 3)).astype(np.float32),
    )
    args = (state, (np.arange(8, dtype=np.int32) % 5, rng.normal(size=8).astype(np.float32)))
    expected = jax.jit(step)(*args)
    for made in (padded(step, args, 11), microbatched(step, args, 2), microbatched(step, args, 8)):
        for one, other in zip(
            jax.tree.leaves(jax.jit(made)(*args)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
