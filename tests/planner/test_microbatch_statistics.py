"""Steps whose examples depend on each other, cut into microbatches with statistics of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from planner import RequestError, make_plan
from planner.graph.trace import trace
from planner.microbatch.classes import classify
from planner.microbatch.cut import Cut
from planner.microbatch.errors import CoupledError, NotExactError
from planner.microbatch.pairs import pair
from planner.microbatch.rewrite import microbatched
from planner.microbatch.shares import Shares
from planner.microbatch.statistics.own import own_statistics
from planner.plan.plan import plan_from_json
from planner.report.table import plan_text
from tests.planner.test_microbatch import EXACT

ROWS, WIDTH = 16, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
OWN = "per-microbatch"
Loss = Callable[[Any, Any], tuple[jax.Array, Any]]


def params() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "scale": (WIDTH,)}
    return {n: jnp.asarray(draw.normal(size=s) / 3, jnp.float32) for n, s in shapes.items()}


def examples() -> dict[str, jax.Array]:
    draw = np.random.default_rng(1)
    mask = draw.integers(0, 2, ROWS)
    mask[:4] = 1  # every microbatch has some
    return {
        "x": jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32),
        "z": jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32),
        "y": jnp.asarray(draw.integers(0, WIDTH, ROWS), jnp.int32),
        "mask": jnp.asarray(mask, jnp.float32),
        "some": jnp.asarray(mask, jnp.int32),
    }


def norm(h: jax.Array, scale: Any) -> Any:
    mean, var = h.mean(0), h.var(0)
    return (h - mean) * jax.lax.rsqrt(var + 1e-5) * scale, {"mean": mean, "var": var}


def entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def normed(p: Any, b: Any) -> Any:
    h, seen = norm(jnp.tanh(b["x"] @ p["a"]), p["scale"])
    return entropy(h @ p["b"], b["y"]), seen


def batch_norm(p: Any, b: Any) -> Any:
    each, seen = normed(p, b)
    return each.mean(), seen


def summed(p: Any, b: Any) -> Any:
    each, seen = normed(p, b)
    return each.sum(), seen


def counted(p: Any, b: Any) -> Any:
    each, seen = normed(p, b)
    return each.sum() / b["x"].shape[0], {**seen, "hits": (each < 2.0).sum()}


def masked_norm(p: Any, b: Any) -> Any:
    h, w = jnp.tanh(b["x"] @ p["a"]), b["mask"][:, None]
    n = jnp.maximum(b["mask"].sum(), 1.0)
    mean = (h * w).sum(0) / n
    var = ((h - mean) ** 2 * w).sum(0) / n
    h = (h - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"]
    return entropy(h @ p["b"], b["y"]).mean(), {"mean": mean}


def unbiased(p: Any, b: Any) -> Any:
    h = b["x"] @ p["a"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0, ddof=1) + 1e-3) * p["scale"]
    return entropy(h @ p["b"], b["y"]).mean(), {}


def experts(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(b["x"] @ p["a"])
    share = jax.nn.one_hot(gates.argmax(-1), WIDTH).mean(0)
    balance = WIDTH * (share * gates.mean(0)).sum()
    each = entropy((b["x"] * gates * p["scale"]) @ p["b"], b["y"])
    return each.mean() + 0.1 * balance, {"balance": balance}


def capacity(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(b["x"] @ p["a"])
    picks = jax.nn.one_hot(gates.argmax(-1), WIDTH, dtype=jnp.int32)
    place = (jnp.cumsum(picks, axis=0) - 1) * picks
    fits = (place < 2 * b["x"].shape[0] // WIDTH) * picks
    each = entropy((b["x"] * gates * fits * p["scale"]) @ p["b"], b["y"])
    return each.mean(), {}


def layers(p: Any, b: Any) -> Any:
    def layer(h: jax.Array, w: jax.Array) -> Any:
        return norm(jnp.tanh(h @ w), p["scale"])

    h, seen = jax.lax.scan(layer, b["x"], jnp.stack([p["a"], p["b"]]))
    return entropy(h, b["y"]).mean(), seen


def again(p: Any, b: Any) -> Any:
    return jax.checkpoint(batch_norm)(p, b)


def twins(p: Any, b: Any) -> Any:
    u, v = (norm(b[name] @ p["a"], p["scale"])[0] for name in ("x", "z"))
    c = u.T @ v / u.shape[0]
    return ((c - jnp.eye(WIDTH)) ** 2).sum() + 0.1 * (p["b"] ** 2).sum(), {}


def largest(p: Any, b: Any) -> Any:
    h = b["x"] @ p["a"]
    return entropy(h / jnp.abs(h).max() @ p["b"] * p["scale"], b["y"]).mean(), {}


def root(p: Any, b: Any) -> Any:
    h = jnp.tanh(b["x"] @ p["a"]) @ p["b"] * p["scale"]
    return jnp.sqrt(((h - b["z"]) ** 2).mean()), {}


def perturbed(p: Any, b: Any) -> Any:
    """Sharpness-aware: the loss where the gradient of a microbatch leads to."""

    def plain(p: Any) -> jax.Array:
        return entropy(jnp.tanh(b["x"] @ p["a"]) @ p["b"] * p["scale"], b["y"]).mean()

    g = jax.grad(plain)(p)
    size = 0.05 / optax.global_norm(g)
    return plain(jax.tree.map(lambda w, g: w + jax.lax.stop_gradient(size * g), p, g)), {}


def weights_first(p: Any, b: Any) -> Any:
    """The masked norm, whose weights are divided by their sum before the mean."""
    h, w = jnp.tanh(b["x"] @ p["a"]), (b["mask"] / b["mask"].sum())[:, None]
    mean = (h * w).sum(0)
    h = (h - mean) * jax.lax.rsqrt(((h - mean) ** 2 * w).sum(0) + 1e-5) * p["scale"]
    return entropy(h @ p["b"], b["y"]).mean(), {"mean": mean}


def centered(p: Any, b: Any) -> Any:
    """Linear in a centered output: the cotangent of its mean is a sum of the batch alone."""
    h = jnp.tanh(b["x"] @ p["a"])
    return ((h - h.mean(0)) * b["z"]).mean(), {}


def covariance(p: Any, b: Any) -> Any:
    """Linear in the parameters: so is the whole gradient."""
    h = b["x"] @ p["a"]
    return ((h - h.mean(0)) * (b["z"] - b["z"].mean(0))).mean(), {}


def centered_twice(p: Any, b: Any) -> Any:
    h = b["x"] @ p["a"]
    h = (h - h.mean(0)) @ p["b"]
    return ((h - h.mean(0)) * b["z"]).mean() + (h**2).mean(), {}


COUPLED: dict[str, Loss] = {
    f.__name__: f
    for f in (
        batch_norm,
        summed,
        counted,
        masked_norm,
        unbiased,
        experts,
        capacity,
        layers,
        again,
        twins,
        largest,
        root,
        perturbed,
        weights_first,
        centered,
        covariance,
        centered_twice,
    )
}


LINEAR = ("centered", "covariance")
"""Exact without statistics of a microbatch, too: the gradient does not read the forward pass."""


def updated(state: Any, value: Any, grads: Any, seen: Any) -> Any:
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    kept = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["kept"], seen)
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "kept": kept}
    return new, {"loss": value, "norm": optax.global_norm(grads)}


def train(loss: Loss) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        made, grads = jax.value_and_grad(loss, has_aux=True)(state["params"], batch)
        return updated(state, made[0], grads, made[1])

    return step


def accumulated(loss: Loss, parts: int, adds: bool = False) -> Callable[..., Any]:
    """The loop that people write: losses, gradients and statistics of strided microbatches, their
    mean (``adds``: of the losses and gradients, the sum)."""

    def step(state: Any, batch: Any) -> Any:
        made = []
        for j in range(parts):
            rows = jax.tree.map(lambda x, j=j: x[j::parts], batch)
            made.append(jax.value_and_grad(loss, has_aux=True)(state["params"], rows))
        whole = jax.tree.map(lambda *xs: sum(xs), *made)
        (value, seen), grads = whole
        if not adds:
            value, grads = jax.tree.map(lambda x: x / parts, (value, grads))
        seen = jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else x / parts, seen
        )
        return updated(state, value, grads, seen)

    return step


def started(loss: Loss) -> Any:
    seen = jax.eval_shape(loss, params(), examples())[1]
    kept = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), seen)
    return {"params": params(), "opt": OPTIMIZER.init(params()), "kept": kept}


def close(found: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.long
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", COUPLED)
def test_equal_to_the_loop_that_people_write(name: str, parts: int) -> None:
    loss = COUPLED[name]
    args = (started(loss), examples())
    if name not in LINEAR:
        with pytest.raises(CoupledError, match="per-microbatch"):
            microbatched(train(loss), args, parts)
    cut = microbatched(train(loss), args, parts, statistics=OWN)
    assert cut.coupled and all(__name__.rpartition(".")[2] in line for line in cut.coupled)
    expected = jax.jit(accumulated(loss, parts, adds=name == "summed"))(*args)
    close(jax.jit(cut)(*args), expected)


@pytest.mark.long
@pytest.mark.parametrize("count", ["mask", "some"])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_mask_counts_in_the_whole_batch(count: str, parts: int) -> None:
    """Statistics are the microbatch's, but each token weighs the same in the loss."""

    def loss(p: Any, b: Any) -> Any:
        each, seen = normed(p, b)
        return (each * b[count]).sum() / b[count].sum(), seen

    total = examples()[count].sum()

    def part(p: Any, b: Any) -> Any:
        each, seen = normed(p, b)
        return (each * b[count]).sum() / total, seen

    args = (started(loss), examples())
    cut = microbatched(train(loss), args, parts, statistics=OWN)
    close(jax.jit(cut)(*args), jax.jit(accumulated(part, parts, adds=True))(*args))


@pytest.mark.long
def test_random_numbers_are_those_of_the_whole_batch() -> None:
    """Drawn once and sliced: every microbatch has its own."""
    for key in (jax.random.key(3), None):

        def drawn(shape: Any, key: Any = key) -> jax.Array:
            return jax.random.bernoulli(jax.random.key(3) if key is None else key, 0.7, shape)

        def loss(p: Any, b: Any) -> Any:
            h = jnp.where(drawn((b["x"].shape[0], WIDTH)), b["x"], 0.0)
            return batch_norm(p, {**b, "x": h})

        kept = drawn((ROWS, WIDTH))
        args = (started(loss), examples())
        dropped = {**examples(), "x": jnp.where(kept, examples()["x"], 0.0)}
        cut = microbatched(train(loss), args, 4, statistics=OWN)
        close(jax.jit(cut)(*args), jax.jit(accumulated(batch_norm, 4))(args[0], dropped))


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True])
def test_random_numbers_of_scanned_layers(recomputed: bool) -> None:
    keys = jax.random.split(jax.random.key(2), 2)

    def loss(p: Any, b: Any, kept: Any = None) -> Any:
        def layer(h: jax.Array, own: Any) -> Any:
            w, key, keep = own
            if kept is None:
                keep = jax.random.bernoulli(key, 0.7, h.shape)
            return norm(jnp.where(keep, jnp.tanh(h @ w), 0.0), p["scale"])

        layer = jax.checkpoint(layer) if recomputed else layer
        rows = jnp.stack([p["a"], p["b"]]), keys, jnp.zeros(2) if kept is None else kept
        h, seen = jax.lax.scan(layer, b["x"], rows)
        return entropy(h, b["y"]).mean(), seen

    args = (started(loss), examples())
    cut = microbatched(train(loss), args, 4, statistics=OWN)
    whole = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (ROWS, WIDTH)))(keys)

    def given(p: Any, b: Any) -> Any:
        return loss(p, b, jnp.moveaxis(b["kept"], 1, 0))

    rows = {**examples(), "kept": jnp.moveaxis(whole, 0, 1)}
    close(jax.jit(cut)(*args), jax.jit(accumulated(given, 4))(args[0], rows))


def test_one_example_has_no_statistics() -> None:
    args = (started(batch_norm), examples())
    with pytest.raises(NotExactError, match=r"one example.*fewer microbatches"):
        microbatched(train(batch_norm), args, ROWS, statistics=OWN)


@pytest.mark.long
def test_a_permutation_is_one_of_the_microbatch() -> None:
    """Mixup: partners come from the same microbatch, and none from outside of it."""

    def step(w: jax.Array, b: Any) -> Any:
        order = jax.random.permutation(jax.random.key(5), b["x"].shape[0])
        return w + 0.1, {"own": b["x"], "other": b["x"][order]}

    args = (jnp.zeros(3), examples())
    found = jax.jit(microbatched(step, args, 4, statistics=OWN))(*args)[1]
    for j in range(4):
        own, other = (np.sort(found[name][j::4], axis=0) for name in ("own", "other"))
        np.testing.assert_array_equal(own, other)


class Net(linen.Module):
    """A layer, Flax's BatchNorm, another layer."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(WIDTH)(x))
        return linen.Dense(WIDTH)(linen.relu(x))


@pytest.mark.long
def test_flax_batch_norm() -> None:
    net = Net()
    variables = net.init(jax.random.key(0), examples()["x"])

    def loss(p: Any, stats: Any, b: Any) -> Any:
        out, new = net.apply({"params": p, "batch_stats": stats}, b["x"], mutable=["batch_stats"])
        return entropy(out, b["y"]).mean(), new["batch_stats"]

    def step(state: Any, b: Any) -> Any:
        make = jax.value_and_grad(loss, has_aux=True)
        (value, stats), g = make(state["params"], state["stats"], b)
        return {
            "params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], g),
            "stats": stats,
        }, value

    def manual(state: Any, b: Any) -> Any:
        rows = [jax.tree.map(lambda x, j=j: x[j::4], b) for j in range(4)]
        made = [step(state, r) for r in rows]
        return jax.tree.map(lambda *xs: sum(xs) / 4, *made)  # SGD: means of all

    args = ({"params": variables["params"], "stats": variables["batch_stats"]}, examples())
    close(jax.jit(microbatched(step, args, 4, statistics=OWN))(*args), jax.jit(manual)(*args))


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in EXACT if n != "waited"])  # refused: one key for all
def test_where_nothing_couples_examples_the_whole_batch_comes_out(name: str) -> None:
    """The same parts, put together by their degrees, are the whole batch's sums and means."""

    def step(state: Any, batch: Any) -> Any:
        value, g = jax.value_and_grad(EXACT[name])(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, g), value

    from tests.planner.test_microbatch import examples, params

    args, shares = (params(), examples()), Shares(4, 1)
    whole = trace(step, args)
    small = trace(step, (args[0], jax.tree.map(lambda x: x[:4], args[1])))
    step_pair = pair(whole.jaxpr, small.jaxpr)
    batch = list(range(len(args[0]), len(args[0]) + len(args[1])))
    found = classify(step_pair, batch, whole.jaxpr, exact=False)
    assert not found.coupled
    try:
        own = own_statistics(step_pair, found, whole.graph, 4)
        cut = Cut.of(whole, own.step, own.found, batch, shares, False, frozenset(), own)
    except NotExactError:
        assert name in ("positioned",)
        return
    loose = name == "bfloat16"
    if name == "positioned":  # each microbatch counts from 0
        return
    close(jax.jit(cut)(*args), jax.jit(step)(*args), *((1e-2, 1e-3) if loose else ()))


def contrastive(p: Any, b: Any) -> Any:
    scores = (b["x"] @ p["a"]) @ (b["z"] @ p["b"]).T
    return entropy(scores, jnp.arange(scores.shape[0])).mean(), {}


def mixed(p: Any, b: Any) -> Any:
    loss, seen = experts(p, b)
    return loss + normed(p, b)[0].sum(), seen


@pytest.mark.parametrize("loss", [contrastive, mixed])
def test_neither_sum_nor_mean(loss: Loss) -> None:
    args = (started(loss), examples())
    with pytest.raises(NotExactError, match=r"test_microbatch_statistics\.py:\d+.*neither a sum"):
        microbatched(train(loss), args, 4, statistics=OWN)


def weights_of_both(p: Any, b: Any) -> Any:
    h, w = jnp.tanh(b["x"] @ p["a"]), (b["mask"] / b["mask"].sum())[:, None]
    return (w[:, 0] * entropy((h - (h * w).sum(0)) @ p["b"], b["y"])).sum(), {}


def test_weights_that_a_statistic_and_the_loss_read_are_refused() -> None:
    """The loss divides by the whole batch's sum, the statistic by the microbatch's."""
    args = (started(weights_of_both), examples())
    with pytest.raises(NotExactError, match=r"both a statistic and the loss read the result"):
        microbatched(train(weights_of_both), args, 2, statistics=OWN)


def masked_covariance(p: Any, b: Any) -> Any:
    h, n = jnp.tanh(b["x"] @ p["a"]), b["mask"].sum()
    mean = (h * b["mask"][:, None]).sum(0) / n
    return ((h - mean) * b["z"]).mean(), {}


def test_a_cotangent_that_meets_a_sum_of_the_batch_is_refused() -> None:
    """Whether the loss divides by it, or the statistic, can't be seen."""
    args = (started(masked_covariance), examples())
    with pytest.raises(NotExactError, match=r"in the gradient of a statistic reads a sum"):
        microbatched(train(masked_covariance), args, 2, statistics=OWN)


def stepped(loss: Callable[..., Any]) -> Callable[..., Any]:
    """One step of gradient descent on a loss."""

    def step(w: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, *batch)
        return w - 0.1 * gradient, value

    return step


@pytest.mark.long
def test_weights_of_a_batch_are_those_of_the_microbatch() -> None:
    """A softmax over values that no parameter has a part in: all of it is a statistic."""
    step = stepped(lambda w, x, score: jnp.sum(jax.nn.softmax(score) * jnp.tanh(x @ w)))
    draw = np.random.default_rng(0)
    w, x, score = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((8,), (16, 8), (16,)))
    cut = microbatched(step, (w, x, score), 2, statistics=OWN)
    parts = [step(w, x[k::2], score[k::2]) for k in range(2)]
    close(jax.jit(cut)(w, x, score), jax.tree.map(lambda *v: sum(v) / 2, *parts))


def test_a_square_of_a_sum_is_refused() -> None:
    step = stepped(lambda w, x, ids: jnp.mean(jax.ops.segment_sum(x @ w, ids, 4) ** 2))
    args = jnp.ones(8), jnp.ones((16, 8)), jnp.arange(16) % 4
    with pytest.raises(NotExactError, match="neither a sum nor a mean"):
        microbatched(step, args, 2, statistics=OWN)


UNEVEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a fixed number of the largest": lambda e: jax.lax.top_k(e, 2)[0].mean(),
    "the median": jnp.median,
    "one by its rank": lambda e: jnp.sort(e)[2],
    "one by its value": lambda e: e[jnp.argmax(e)],
    "the first": lambda e: e[0],
    "the first by a mask": lambda e: jnp.where(jnp.arange(e.shape[0]) < 1, e, 0.0).sum(),
    "those above the second": lambda e: (e * (e >= jax.lax.top_k(e, 2)[0][1])).sum() / 2,
    "as many as there is room for": lambda e: (e * (jnp.cumsum(e > 0) <= 3)).sum() / 3,
    "a product of all": jnp.prod,
    "a logarithm of a sum": jax.nn.logsumexp,
    "the diagonal": lambda e: jnp.trace(jnp.outer(e, e)) / e.shape[0],
    "all but the diagonal": lambda e: (jnp.outer(e, e) * (1 - jnp.eye(e.shape[0]))).mean(),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_examples_that_count_unlike_others(name: str) -> None:
    """What they are for the whole batch does not follow from how many examples there are."""

    def loss(p: Any, b: Any) -> Any:
        return UNEVEN[name](normed(p, b)[0]), {}

    args = (started(loss), examples())
    with pytest.raises(NotExactError, match=r"can't be cut.*test_microbatch_statistics\.py:\d+"):
        microbatched(train(loss), args, 4, statistics=OWN)


@pytest.mark.parametrize(
    "written",
    [
        lambda t, e, b: t.at[b["y"]].set(e),
        lambda t, e, b: t.at[b["y"]].max(e),
        lambda t, e, b: jax.lax.dynamic_update_slice(t, e, (3,)),
        lambda t, e, b: jnp.concatenate([e, t[: -e.shape[0]]]),
    ],
)
def test_rows_that_examples_write_over_are_no_statistics(written: Any) -> None:
    def step(state: Any, b: Any) -> Any:
        each, _ = normed(state["params"], b)
        return {**state, "table": written(state["table"], each, b)}

    args = ({"params": params(), "table": jnp.zeros(60)}, examples())
    with pytest.raises(NotExactError):
        microbatched(step, args, 4, statistics=OWN)


@pytest.mark.long
def test_an_unbiased_variance_of_two_examples() -> None:
    def step(w: jax.Array, b: Any) -> Any:
        h = b["x"] @ w
        return w + 0.1, (h - h.mean(0)).var(0, ddof=1)

    w, rows = params()["a"], {"x": examples()["x"][:4]}
    found = jax.jit(microbatched(step, (w, rows), 2, statistics=OWN))(w, rows)
    parts = [step(w, {"x": rows["x"][j::2]})[1] for j in range(2)]
    close(found[1], sum(parts) / 2)


@pytest.mark.long
def test_figures_outside_of_the_loss() -> None:
    """Those of each microbatch, averaged, as the loss is."""

    def step(state: Any, b: Any) -> Any:
        (value, seen), g = jax.value_and_grad(batch_norm, has_aux=True)(state["params"], b)
        made = {"spread": normed(state["params"], b)[0].std(), "hits": (b["y"] > 3).sum()}
        return updated(state, value, g, seen)[0], made

    args = (started(batch_norm), examples())
    found = jax.jit(microbatched(step, args, 4, statistics=OWN))(*args)[1]
    rows = [jax.tree.map(lambda x, j=j: x[j::4], args[1]) for j in range(4)]
    spread = [normed(args[0]["params"], r)[0].std() for r in rows]
    np.testing.assert_allclose(found["spread"], sum(spread) / 4, rtol=1e-5)
    assert found["hits"] == (args[1]["y"] > 3).sum()


def test_an_update_needs_all_microbatches() -> None:
    def step(state: Any, b: Any) -> Any:
        def first(w: jax.Array) -> jax.Array:
            return ((b["x"] @ w) ** 2).mean()

        def second(w: jax.Array, judge: jax.Array) -> jax.Array:
            return jnp.tanh(b["z"] @ w @ judge).mean()

        judge = state["judge"] - 0.1 * jax.grad(first)(state["judge"])
        maker = state["maker"] - 0.1 * jax.grad(second)(state["maker"], judge)
        return {"judge": judge, "maker": maker}

    args = ({"judge": params()["a"], "maker": params()["b"]}, examples())
    with pytest.raises(NotExactError, match=r"judge.*after its update"):
        microbatched(step, args, 4, statistics=OWN)


def test_steps_in_a_loop_need_all_microbatches() -> None:
    def step(w: jax.Array, b: Any) -> Any:
        def turn(w: jax.Array, _: Any) -> Any:
            return w - 0.1 * jax.grad(lambda w: ((b["x"] @ w) ** 2).mean())(w), None

        return jax.lax.scan(turn, w, None, length=3)[0]

    args = (params()["a"], examples())
    with pytest.raises(NotExactError, match="after its update"):
        microbatched(step, args, 4, statistics=OWN)


def test_groups_of_examples_stay_refused() -> None:
    def loss(p: Any, b: Any) -> Any:
        pairs = normed(p, b)[0].reshape(-1, 2)
        return jax.nn.relu(pairs[:, 0] - pairs[:, 1]).mean(), {}

    args = (started(loss), examples())
    with pytest.raises(NotExactError, match="groups of several examples"):
        microbatched(train(loss), args, 4, statistics=OWN)


def test_what_it_does_not_go_with() -> None:
    args = (started(batch_norm), examples())
    step = train(batch_norm)
    for also in ({"replicas": 2}, {"stages": 2}):
        with pytest.raises(RequestError, match="microbatches alone"):
            make_plan(step, *args, cluster="cpu:8", microbatches=2, statistics=OWN, **also)
    with pytest.raises(RequestError, match="expected 'batch' or 'per-microbatch'"):
        make_plan(step, *args, cluster="cpu:8", microbatches=2, statistics="own")


@pytest.mark.long
def test_the_plan_says_whose_statistics() -> None:
    args = (started(batch_norm), examples())
    plan = make_plan(train(batch_norm), *args, cluster="cpu:8", microbatches=2, statistics=OWN)
    assert plan.statistics == OWN and plan.coupled and plan.replicas == 1
    assert plan.coupled[0] in plan_text(plan) and "not of the whole batch" in plan_text(plan)
    assert f"(1 example in {plan.microbatches})" in plan_text(plan)
    assert plan_from_json(plan.to_json()).recipe == plan.recipe
    exact = make_plan(train(batch_norm), *args, cluster="cpu:8")
    assert '"statistics":' not in exact.to_json() and '"coupled":' not in exact.to_json()


def test_a_share_that_is_weakly_typed() -> None:
    """A ratio of whole numbers beside a maximum over examples."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            h = x @ w
            mask = x[:, 0] > 0
            share = (mask & (h[:, 0] > 0)).sum() / (mask.sum() + 1e-8)
            return ((h - jnp.max(h)) ** 2).mean(), share

        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grads, (value, seen)

    args = (jnp.ones((8, 8)), jnp.asarray(np.random.default_rng(0).normal(size=(16, 8))))
    with pytest.raises(CoupledError, match="reduce_max"):
        microbatched(step, args, 2)
    microbatched(step, args, 2, statistics=OWN)
