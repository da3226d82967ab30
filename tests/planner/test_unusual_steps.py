"""Steps that arrange batch, state and gradients in their own way: what the modes make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import parallelize
from planner import Plan, RequestError, make_plan
from tests.zoo.running import difference

D, H, B = 1024, 4096, 4096


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {"a": struct(D, H), "b": struct(H, D)}


def model(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"]


def descend(p: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)


def planned(step: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    return make_plan(step, *args, cluster="h100:8", **options)


def specs(plan: Plan) -> dict[str, bool]:
    """Per argument, whether it is stored split."""
    return {leaf.path: bool(leaf.spec.axes) for leaf in plan.inputs}


def reports_labels(p: Any, batch: Any) -> Any:
    """The metrics hand back an array of the batch by its name."""

    def loss(p: Any) -> jax.Array:
        return jnp.mean((model(p, batch["x"]) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return descend(p, grads), {"loss": value, "y": batch["y"]}


def reweighted(p: Any, train: Any, clean: Any) -> Any:
    """Examples are weighed by how they help on a small clean set (Ren et al. 2018)."""

    def weighed(weights: jax.Array, p: Any) -> jax.Array:
        return jnp.sum(weights * jnp.mean((model(p, train["x"]) - train["y"]) ** 2, -1))

    def meta(weights: jax.Array) -> jax.Array:
        ahead = descend(p, jax.grad(weighed, 1)(weights, p))
        return jnp.mean((model(ahead, clean["x"]) - clean["y"]) ** 2)

    weights = jax.nn.relu(-jax.grad(meta)(jnp.zeros(len(train["x"]))))
    value, grads = jax.value_and_grad(weighed, 1)(weights, p)
    return descend(p, grads), value


def joined(p: Any, some: Any, more: jax.Array) -> Any:
    """Labeled and unlabeled examples go through the model together."""

    def loss(p: Any) -> jax.Array:
        out = model(p, jnp.concatenate([some["x"], more]))
        known, rest = out[: len(some["x"])], out[len(some["x"]) :]
        return jnp.mean((known - some["y"]) ** 2) + jnp.mean(rest**2)

    value, grads = jax.value_and_grad(loss)(p)
    return descend(p, grads), value


def pair(rows: int) -> Any:
    return {"x": struct(rows, D), "y": struct(rows, D)}


@pytest.mark.parametrize("mode", ["dp", "fsdp"])
@pytest.mark.parametrize(
    ("step", "batches"),
    [
        (reports_labels, (pair(B),)),
        (reweighted, (pair(B), pair(B // 2))),
        (joined, (pair(B), struct(4 * B, D))),
    ],
    ids=["labels among the metrics", "two sets", "one behind the other"],
)
def test_batches_are_no_weights(
    step: Callable[..., Any], batches: tuple[Any, ...], mode: str
) -> None:
    plan = planned(step, WEIGHTS, *batches, mode=mode)
    name = "FSDP" if mode == "fsdp" else "data parallel"
    assert plan.strategy == f"{name} over 8; batch split 8 ways"
    weights = {path for path in specs(plan) if path.startswith("[0]")}
    assert all(
        split == (mode == "fsdp" or path not in weights) for path, split in specs(plan).items()
    )
    assert not any(leaf.frozen for leaf in plan.inputs)


def test_a_buffer_in_the_state_is_not_gathered_in_every_step() -> None:
    """Replay: FSDP shards what is trained; a buffer that is larger goes by cost."""

    def step(state: Any, key: jax.Array) -> Any:
        rows = jax.random.randint(key, (1024,), 0, 100_000)
        x = state["buffer"][rows]
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - x) ** 2))(state["p"])
        return {"p": descend(state["p"], grads), "buffer": state["buffer"]}

    p = {"a": struct(512, 2048), "b": struct(2048, 512)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = {"p": p, "buffer": struct(100_000, 512)}, key
    plan = make_plan(step, *args, cluster="h100:8", mode="fsdp")
    leaves = {leaf.path: leaf for leaf in plan.inputs}
    assert leaves["[0]['p']['a']"].spec.axes and leaves["[0]['buffer']"].used_as is None
    dp = make_plan(step, *args, cluster="h100:8", mode="dp")
    assert plan.prediction.step_s < 1.5 * dp.prediction.step_s


def adam(state: Any, grads: Any) -> Any:
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
    p = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["p"], m, v)
    return {"p": p, "m": m, "v": v}


def private(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """Each example's gradient is clipped (Abadi et al. 2016)."""
    grads = jax.vmap(jax.grad(lambda p, x, y: jnp.mean((model(p, x) - y) ** 2)), (None, 0, 0))(
        state["p"], x, y
    )
    norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in grads.values()))
    scale = jnp.minimum(1, 1 / norms)[:, None, None]
    return adam(state, jax.tree.map(lambda g: jnp.mean(g * scale, 0), grads)), norms.mean()


def tasks(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """Each task trains before its loss counts (Finn et al. 2017)."""

    def task(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        inner = jax.grad(lambda p: jnp.mean((model(p, x[:8]) - y[:8]) ** 2))(p)
        return jnp.mean((model(descend(p, inner), x[8:]) - y[8:]) ** 2)

    value, grads = jax.value_and_grad(lambda p: jnp.mean(jax.vmap(task, (None, 0, 0))(p, x, y)))(
        state["p"]
    )
    return adam(state, grads), value


@pytest.mark.parametrize(
    ("step", "rows"), [(private, (256, D)), (tasks, (64, 16, D))], ids=["private", "tasks"]
)
def test_gradients_per_example_become_shards(
    step: Callable[..., Any], rows: tuple[int, ...]
) -> None:
    state = {"p": WEIGHTS, "m": WEIGHTS, "v": WEIGHTS}
    plan = planned(step, state, struct(*rows), struct(*rows), mode="fsdp")
    assert plan.strategy == "FSDP over 8; batch split 8 ways" and all(specs(plan).values())
    kinds = {row.kind for row in plan.collectives if row.payload_bytes >= 4 * D * H}
    assert kinds == {"all_gather", "reduce_scatter"}
    assert not any("FSDP" in note for note in plan.notes)


def small_arguments(rows: tuple[int, ...]) -> tuple[Any, jax.Array, jax.Array]:
    """State, inputs and targets of ``private`` and ``tasks``."""
    keys = jax.random.split(jax.random.key(0), 4)
    p = {
        "a": jax.random.normal(keys[0], (32, 128)) / 6,
        "b": jax.random.normal(keys[1], (128, 32)) / 11,
    }
    zeros = jax.tree.map(jnp.zeros_like, p)
    x, y = (jax.random.normal(key, rows) for key in keys[2:])
    return {"p": p, "m": zeros, "v": zeros}, x, y


@pytest.mark.devices
@pytest.mark.parametrize(
    "options", [{"mode": "fsdp"}, {"mode": "fsdp", "microbatches": 2}], ids=str
)
@pytest.mark.parametrize(
    ("step", "rows"), [(private, (64, 32)), (tasks, (16, 16, 32))], ids=["private", "tasks"]
)
def test_their_numbers_are_those_of_the_step(
    step: Callable[..., Any], rows: tuple[int, ...], options: dict[str, Any]
) -> None:
    state, x, y = small_arguments(rows)
    want = state
    run = parallelize(step, **options)
    for _ in range(3):
        state, value = run(state, x, y)
        want, expected = jax.jit(step)(want, x, y)
    assert difference(jax.device_get((state, value)), jax.device_get((want, expected))) <= 5e-6


def test_evolution_says_what_fsdp_leaves_whole() -> None:
    """The noise of all candidates has the sharding of what is added up: nothing is stored split."""

    def step(p: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        noise = jax.random.normal(key, (64, *p.shape))
        score = jax.vmap(lambda n: jnp.mean((x @ (p + 0.1 * n)) ** 2))(noise)
        return p - 0.1 * jnp.mean(noise * score[:, None, None], 0), score.mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = planned(step, struct(D, D), struct(256, D), key, mode="fsdp")
    assert not specs(plan)["[0]"]
    assert any(note.startswith("FSDP: 0 % of the bytes of the state") for note in plan.notes)


def test_steps_in_a_loop_are_fsdp() -> None:
    """A bias among the parameters that a loop carries made the plan tensor parallel."""

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["a"] + p["bias"])
        return jnp.mean((jnp.tanh(h @ p["c"]) @ p["b"] - y) ** 2)

    def step(state: Any, xs: jax.Array, ys: jax.Array) -> Any:
        def one(state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(state["p"], *batch)
            return adam(state, grads), value

        return jax.lax.scan(one, state, (xs, ys))

    p = {**WEIGHTS, "c": struct(H, H), "bias": struct(H)}
    batches = struct(4, B, D)
    plan = planned(step, {"p": p, "m": p, "v": p}, batches, batches, mode="fsdp")
    assert plan.strategy == "FSDP over 8; batch split 8 ways"


@pytest.mark.parametrize("form", ["masked", "noisy"])
def test_weights_that_are_masked_or_noisy_are_weights(form: str) -> None:
    mask = np.tril(np.ones((D, H), np.float32))

    def step(p: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            a = p["a"] * mask if form == "masked" else p["a"] + jax.random.normal(key, (D, H))
            return jnp.mean((jnp.tanh(x @ a) @ p["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return descend(p, grads), value

    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = planned(step, WEIGHTS, struct(B, D), key, mode="tp", mesh="data=2,model=4")
    assert plan.strategy.startswith("data parallel over 2 x tensor parallel over 4")


def test_idle_devices_are_explained_by_the_examples() -> None:
    """Four steps of 36 examples: 36 do not divide, and not four."""

    def step(w: jax.Array, xs: jax.Array) -> Any:
        def one(w: jax.Array, x: jax.Array) -> Any:
            value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return w - 0.1 * grad, value

        return jax.lax.scan(one, w, xs)

    plan = planned(step, struct(D, D), struct(4, 36, D), mode="dp")
    assert "; batch 36 does not divide by 8 (pad_batch='auto' may help)" in plan.idle


def test_a_constant_in_the_next_state_is_no_reason_to_fail() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            h = x @ w
            return jnp.mean(((h - h.mean(0)) / (h.std(0) + 1e-3)) ** 2 * jnp.arange(float(D)))

        value, grad = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - grad, "since": jnp.zeros((), jnp.int32)}, value

    state = {"w": struct(D, D), "since": struct(dtype=jnp.int32)}
    with pytest.raises(RequestError, match=r"test_unusual_steps\.py"):
        planned(step, state, struct(64, D), microbatches=2)
    plan = planned(step, state, struct(64, D), microbatches=2, statistics="per-microbatch")
    assert plan.microbatches == 2


def test_devices_that_do_not_divide_the_batch_split_the_sequence() -> None:
    """Twelve sequences on eight devices, in layers that are computed again: the mode spread nothing
    through these, and every device did the whole work."""
    layers = 4

    def step(p: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            def layer(h: jax.Array, p: Any) -> Any:
                return h + jnp.tanh(h @ p["a"]) @ p["b"], None

            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return descend(p, grads), value

    p = {"a": struct(layers, D, H), "b": struct(layers, H, D)}
    times = {}
    for mode in ("dp", "fsdp", None):
        options = {"mode": mode} if mode else {"mesh": "data=8"}
        times[mode] = planned(step, p, struct(12, 1024, D), **options).prediction.step_s
    assert max(times.values()) <= 1.5 * times[None]


def test_microbatches_that_the_devices_do_not_divide() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, value

    plan = planned(step, struct(64, 64), struct(16, 64), mode="dp", microbatches=4)
    assert plan.idle == (
        "uses 1 of 8 devices' worth of work; the 4 examples of a microbatch do not divide by 8: "
        "fewer microbatches may help"
    )
