"""Steps in microbatches equal the whole batch, or are refused with the line that is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from planner import RequestError, make_plan
from planner.microbatch.algebra import FREE, MAP, POST, SUM, Class
from planner.microbatch.classes import classify
from planner.microbatch.errors import NotExactError
from planner.microbatch.pairs import Number, pair
from planner.microbatch.rewrite import microbatched
from planner.plan.plan import plan_from_json
from planner.report.table import plan_text

ROWS, WIDTH = 16, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
Params = dict[str, jax.Array]
Loss = Callable[[Params, dict[str, jax.Array]], jax.Array]


def params(seed: int = 0) -> Params:
    draw = np.random.default_rng(seed)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "scale": (WIDTH,), "table": (32, WIDTH)}
    return {n: jnp.asarray(draw.normal(size=s) / 3, jnp.float32) for n, s in shapes.items()}


def examples(seed: int = 1) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32),
        "y": jnp.asarray(draw.integers(0, WIDTH, ROWS), jnp.int32),
        "mask": jnp.asarray(draw.integers(0, 2, ROWS), jnp.float32),
        "tokens": jnp.asarray(draw.integers(0, 32, (ROWS, 5)), jnp.int32),
    }


def train(loss: Loss) -> Callable[..., Any]:
    """A train step with clipping by the global norm and Adam."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def state() -> Any:
    return {"params": params(), "opt": OPTIMIZER.init(params())}


def hidden(p: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"] * p["scale"]


def per_example(p: Params, b: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(hidden(p, b["x"]), b["y"])


def masked(p: Params, b: Any) -> jax.Array:
    return jnp.sum(per_example(p, b) * b["mask"]) / jnp.sum(b["mask"])


def tied(p: Params, b: Any) -> jax.Array:
    h = p["table"][b["tokens"]].mean(1)
    logits = jnp.tanh(h @ p["a"]) @ p["table"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, b["tokens"][:, 0]))


def scanned(p: Params, b: Any) -> jax.Array:
    def turn(x: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(jax.checkpoint(turn), b["x"], jnp.stack([p["a"], p["b"]]))
    return jnp.mean((x - b["y"][:, None]) ** 2)


def recurrent(p: Params, b: Any) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(x @ p["a"] + h @ p["b"])
        return h, h

    words = jnp.moveaxis(p["table"][b["tokens"]], 1, 0)
    _, hs = jax.lax.scan(cell, jnp.zeros((b["tokens"].shape[0], WIDTH)), words)
    return jnp.mean(hs**2)


def dropped(p: Params, b: Any) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(7), 0.7, (b["x"].shape[0], WIDTH))
    return jnp.mean(jnp.where(keep, hidden(p, b["x"]), 0.0) ** 2)


def folded(p: Params, b: Any) -> jax.Array:
    flat = p["table"][b["tokens"]].reshape(-1, WIDTH)  # tokens of all examples
    return jnp.mean(jnp.tanh(flat @ p["a"]) ** 2) + 0.1 * jnp.sum(p["b"] ** 2)


def keyed(p: Params, b: Any) -> jax.Array:
    keys = jax.random.split(jax.random.key(1), b["x"].shape[0])  # a key for each example
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return jnp.mean((hidden(p, b["x"]) + noise) ** 2)


def positioned(p: Params, b: Any) -> jax.Array:
    rows = jnp.arange(64.0 * WIDTH).reshape(64, WIDTH)[: b["x"].shape[0]]  # a row for each example
    return jnp.mean(hidden(p, b["x"]) * rows * jnp.arange(b["x"].shape[0])[:, None] / 64)


def waited(p: Params, b: Any) -> jax.Array:
    """One key, which is split by the number of elements."""
    noise = jax.random.gamma(jax.random.key(3), 2.0, (b["x"].shape[0], WIDTH))
    return jnp.mean((hidden(p, b["x"]) * noise) ** 2)


def waited_apart(p: Params, b: Any) -> jax.Array:
    keys = jax.random.split(jax.random.key(3), b["x"].shape[0])
    rates = 1.0 + b["x"] ** 2
    noise = jax.vmap(lambda key, rate: jax.random.gamma(key, rate))(keys, rates)
    return jnp.mean((hidden(p, b["x"])) ** 2) + jnp.mean(noise * jnp.sum(p["b"]))


def sampled(p: Params, b: Any) -> jax.Array:
    """Several samples of each example, in front of it; also where it is computed again."""

    def weight(x: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(5), (3, x.shape[0], WIDTH))
        return -jnp.sum((hidden(p, x) + noise) ** 2, -1)

    again = jax.checkpoint(weight)(b["x"])
    return -jnp.mean(jax.nn.logsumexp(weight(b["x"]) + 0.1 * again, 0))


EXACT: dict[str, Loss] = {
    "sampled": sampled,
    "keyed": keyed,
    "waited": waited,
    "waited apart": waited_apart,
    "positioned": positioned,
    "mean": lambda p, b: jnp.mean(per_example(p, b)),
    "sum": lambda p, b: jnp.sum(per_example(p, b)),
    "size": lambda p, b: jnp.sum(per_example(p, b)) / b["x"].shape[0],
    "masked": masked,
    "tied": tied,
    "scanned": scanned,
    "recurrent": recurrent,
    "dropped": dropped,
    "folded": folded,
    "vmapped": lambda p, b: jnp.mean(jax.vmap(lambda x: jnp.sum(hidden(p, x)))(b["x"])),
    "bfloat16": lambda p, b: jnp.mean(
        (b["x"].astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("parts", "replicas"), [(2, 1), (8, 1), (2, 4)])
@pytest.mark.parametrize("name", EXACT)
def test_equal_to_the_whole_batch(name: str, parts: int, replicas: int) -> None:
    step = train(EXACT[name])
    args = (state(), examples())
    cut = microbatched(step, args, parts, replicas=replicas)
    expected, found = jax.jit(step)(*args), jax.jit(cut)(*args)
    loose = name == "bfloat16"
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-2 if loose else 2e-5, atol=1e-3 if loose else 1e-7)


@pytest.mark.long
@pytest.mark.parametrize(("parts", "replicas"), [(4, 1), (2, 2), (4, 2)])
def test_results_of_examples_come_back_in_their_order(parts: int, replicas: int) -> None:
    def step(w: jax.Array, b: Any) -> Any:
        flat = jnp.repeat(b["x"] @ w, 3, axis=0).reshape(-1, WIDTH)
        return w - 0.1, {"rows": b["x"] @ w, "columns": (b["x"] @ w).T, "folded": flat}

    args = (params()["a"], examples())
    expected, found = (
        step(*args),
        jax.jit(microbatched(step, args, parts, replicas=replicas))(*args),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, found
    )


@pytest.mark.long
def test_integers_that_follow_from_the_size_are_the_whole_batchs() -> None:
    def step(w: jax.Array, b: Any) -> Any:
        return w - 0.1, jnp.sum((b["x"] @ w > 0).astype(jnp.int32)) * b["x"].shape[0]

    args = (params()["a"], examples())
    assert microbatched(step, args, 4)(*args)[1] == step(*args)[1]


def test_what_is_printed_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: jax.Array, b: Any) -> Any:
        loss = jnp.mean((b["x"] @ w) ** 2)
        jax.debug.print("loss {:.4f}", loss)
        jax.debug.print("weight {:.4f}", w[0, 0])
        return w - loss, loss

    args = (params()["a"], examples())
    said = []
    for run in (step, microbatched(step, args, 4)):
        run(*args)
        jax.effects_barrier()
        said.append(sorted(capfd.readouterr().out.split("\n")))
    assert said[0] == said[1] and len(said[0]) == 3

    def rows(w: jax.Array, b: Any) -> Any:
        jax.debug.print("{}", b["x"] @ w)
        return w - 0.1, jnp.mean(b["x"] @ w)

    with pytest.raises(NotExactError, match="prints or calls out once for the whole batch"):
        microbatched(rows, args, 4)


def normalized(p: Params, b: Any) -> jax.Array:
    x = b["x"] @ p["a"]
    return jnp.mean((x - x.mean(0)) ** 2)


def ranked(p: Params, b: Any) -> jax.Array:
    return jnp.sum(jnp.sort(b["x"] @ p["a"], axis=0)[0])


def gated(p: Params, b: Any) -> jax.Array:
    gate = jax.nn.sigmoid(b["x"] @ p["scale"])
    return jnp.sum(gate * per_example(p, b)) / jnp.sum(gate)


def written(p: Params, b: Any) -> jax.Array:
    return jnp.mean((b["x"].reshape(ROWS, 2, WIDTH // 2).sum(1) @ p["a"][: WIDTH // 2]) ** 2)


centered = Primitive("centered_of_microbatches")
centered.def_abstract_eval(lambda x: x)
mlir.register_lowering(
    centered, mlir.lower_fun(lambda x: x - x.mean(0, keepdims=True), multiple_results=False)
)
ad.deflinear2(centered, lambda cotangent, _: [centered.bind(cotangent)])


def paired(p: Params, b: Any) -> jax.Array:
    """Answers to one question stand one behind the other, as for preferences and rewards."""
    rewards = per_example(p, b).reshape(-1, 2)
    return jnp.mean((rewards - rewards.mean(1, keepdims=True)) ** 2)


REFUSED: dict[str, tuple[Loss, str]] = {
    "groups of examples": (paired, "reshape of .* makes groups of several examples: 8 of 16"),
    "some of the examples": (
        lambda p, b: jnp.mean(hidden(p, b["x"])[: b["x"].shape[0] // 2] ** 2),
        "slice of .* takes 8 of 16 examples; give each example a weight in the batch",
    ),
    "weights by position": (
        lambda p, b: jnp.mean(jnp.linspace(0.0, 1.0, b["x"].shape[0]) * per_example(p, b)),
        "iota of .* counts 15 of 16 examples; give each example a weight in the batch",
    ),
    "other examples by number": (
        lambda p, b: jnp.mean(hidden(p, b["x"])[jnp.int32(b["x"][:, 0] > 0)] ** 2),
        "computes with the batch's size: 16 is 4 .*; select no other examples of the batch by num",
    ),
    "unknown operation": (
        lambda p, b: jnp.mean(centered.bind(b["x"] @ p["a"]) ** 2),
        "centered_of_microbatches of .* mixes examples",
    ),
    "batch statistics": (normalized, "sub of .* reads a value that is summed over the batch"),
    "sorted": (ranked, "mixes examples"),
    "one key by examples": (
        lambda p, b: jnp.mean(
            jax.random.gamma(jax.random.key(3), 1.0 + b["x"] ** 2) * jnp.sum(p["b"])
        ),
        "random_gamma .* draws from one key by parameters of each example",
    ),
    "contrastive": (
        lambda p, b: jnp.mean(jax.nn.logsumexp((b["x"] @ p["a"]) @ (b["x"] @ p["b"]).T, axis=1)),
        "dot_general of .* mixes examples",
    ),
    "running": (lambda p, b: jnp.mean(jnp.cumsum(b["x"] @ p["a"], axis=0) ** 2), "mixes examples"),
    "rolled": (lambda p, b: jnp.mean((b["x"] @ p["a"]) * jnp.roll(b["x"], 1, 0)), "mixes examples"),
    "hardest": (lambda p, b: jnp.max(per_example(p, b)), "is not a sum of terms"),
    "learned weights": (gated, "summed over the batch|before that is complete"),
    "recurrence over examples": (
        lambda p, b: jnp.sum(
            jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), p["scale"], b["x"])[0]
        ),
        "goes over the examples",
    ),
    "size as a bound": (
        lambda p, b: jnp.sum(
            jnp.where(jnp.arange(b["x"].shape[0]) < b["x"].shape[0] - 3, per_example(p, b), 0.0)
        ),
        "computes with the batch's size: 13 is 1 in a microbatch",
    ),
    "size as a power": (
        lambda p, b: jnp.mean(jnp.abs(hidden(p, b["x"])) ** (b["x"].shape[0] + 3)),
        "the power 1. is . in a microbatch",
    ),
    "size written": (written, "as if that number were written|mixes examples|reshape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_coupled_examples_are_refused_with_the_line(name: str) -> None:
    loss, said = REFUSED[name]
    with pytest.raises(NotExactError, match=said) as caught:
        microbatched(train(loss), (state(), examples()), 4)
    assert "test_microbatch.py:" in str(caught.value) or name == "size written"


@pytest.mark.parametrize(
    ("parts", "said"),
    [(5, "does not divide the batch: .* holds 16 examples"), (0, "whole number"), ("4", "whole")],
)
def test_bad_numbers_of_microbatches(parts: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        microbatched(train(EXACT["mean"]), (state(), examples()), parts)


def test_arguments_of_different_numbers_of_examples_are_named() -> None:
    def step(w: jax.Array, x: jax.Array, z: jax.Array) -> Any:
        return w - jnp.mean(x @ w) * jnp.mean(z), jnp.mean(z)

    args = (params()["a"], jnp.ones((8, WIDTH)), jnp.ones((4, WIDTH)))
    with pytest.raises(
        RequestError, match=r"different numbers of examples: \[1\] has 8, \[2\] has 4"
    ):
        microbatched(step, args, 2)


def test_what_the_step_does_not_read_is_no_batch() -> None:
    def step(w: jax.Array, x: jax.Array, rng: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - grads, value

    args = (params()["a"], jnp.ones((16, WIDTH)), jnp.zeros((2,), jnp.uint32))
    for got, want in zip(jax.jit(microbatched(step, args, 4))(*args), step(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_a_step_without_a_batch() -> None:
    with pytest.raises(RequestError, match="no argument of the step is a batch"):
        microbatched(lambda w: w * 0.5, (params()["a"],), 2)


def test_classes_of_a_loss() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w * 2, x @ w, jnp.sum(x @ w), jnp.sqrt(jnp.sum((x @ w) ** 2)), jnp.sum(x)

    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    whole, small = (
        jax.make_jaxpr(step)(w, jax.ShapeDtypeStruct((n, WIDTH), jnp.float32)) for n in (8, 4)
    )
    found = pair(whole, small)
    classes = classify(found, [1], whole)
    expected: list[Class] = [FREE, MAP, SUM, POST, FREE]  # the last: of the batch alone
    assert [classes.of[o] for o in found.outputs if not isinstance(o, Number)] == expected


def test_a_plan_says_its_microbatches_and_needs_less_memory() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            h = x
            for layer in w:
                h = jnp.tanh(h @ layer)
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    w = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((65536, 256), jnp.float32)
    whole, cut = (make_plan(step, w, x, cluster="h100:8", microbatches=m) for m in (1, 8))
    assert cut.prediction.peak_bytes < 0.4 * whole.prediction.peak_bytes
    assert "microbatches" in plan_text(cut, 120) and "microbatches" not in plan_text(whole, 120)
    assert cut.microbatches == 8 and plan_from_json(cut.to_json()) == cut
    assert '"microbatches"' not in whole.to_json()
    assert str(cut.inputs[-1].spec) == str(whole.inputs[-1].spec)  # the batch stays split


@pytest.mark.long
@pytest.mark.devices
@pytest.mark.parametrize("name", ["masked", "tied", "scanned", "dropped"])
def test_sharded_microbatches_train_as_the_unsharded_whole(name: str) -> None:
    from executor import compile_plan, parallelize

    step = train(EXACT[name])
    run = parallelize(step, cluster="cpu:8", microbatches=2)
    here = there = state()
    for seed in range(3):
        batch = examples(seed)
        here, found = run(here, batch)
        there, expected = jax.jit(step)(there, batch)
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    plan = make_plan(step, state(), examples(), cluster="cpu:8", microbatches=2)
    _, found = compile_plan(step, plan)(state(), examples())
    np.testing.assert_allclose(found, jax.jit(step)(state(), examples())[1], rtol=2e-5)


def test_an_exported_module_has_no_microbatches() -> None:
    from executor.run.export import python_text

    plan = make_plan(train(EXACT["mean"]), state(), examples(), cluster="cpu:8", microbatches=2)
    with pytest.raises(RequestError, match="2 microbatches, which no exported module"):
        python_text(plan)


@pytest.mark.long
def test_groups_in_a_dimension_of_their_own_are_equal() -> None:
    def loss(w: jax.Array, b: Any) -> jax.Array:
        rewards = jnp.sum(jnp.tanh(b["x"] @ w), axis=-1)  # questions, answers
        return jnp.mean((rewards - rewards.mean(1, keepdims=True)) ** 2)

    def step(w: jax.Array, b: Any) -> tuple[jax.Array, jax.Array]:
        value, grads = jax.value_and_grad(loss)(w, b)
        return w - grads, value

    batch = {"x": examples()["x"].reshape(8, 2, WIDTH)}
    args = (params()["a"], batch)
    for got, want in zip(jax.jit(microbatched(step, args, 4))(*args), step(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_an_array_type_that_holds_its_sizes_is_refused_by_name() -> None:
    @jax.tree_util.register_pytree_node_class
    class Named:
        def __init__(self, array: Any, sizes: tuple[int, ...]) -> None:
            self.array, self.sizes = array, sizes
            if getattr(array, "shape", sizes) != sizes:
                raise ValueError(f"{array.shape} does not match {sizes}")

        def tree_flatten(self) -> Any:
            return (self.array,), self.sizes

        @classmethod
        def tree_unflatten(cls, sizes: Any, children: Any) -> Any:
            return cls(children[0], sizes)

    def step(w: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x.array @ w) ** 2))(w)
        return w - 0.1 * g, value

    args = (jnp.ones((8, 8)), Named(jnp.ones((16, 8)), (16, 8)))
    with pytest.raises(NotExactError, match=r"8 examples in place of 16.*does not match \(16, 8\)"):
        microbatched(step, args, 2)
