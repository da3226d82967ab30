"""What the process-wide mode takes for a staleness."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import make_plan
from planner.errors import MemoryLimitError, RequestError
from planner.modes import get_parallel_mode, set_parallel_mode


@pytest.mark.parametrize("value", ["4", 2.5, True, None])
def test_a_staleness_is_a_whole_number(value: Any) -> None:
    before = get_parallel_mode()
    kind = type(value).__name__
    with pytest.raises(RequestError, match=f"staleness={value!r}: got {kind}, expected a whole"):
        set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=value)
    assert get_parallel_mode() == before


def test_numpys_numbers_are_pythons() -> None:
    before = set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=np.int64(4))  # type: ignore[arg-type]
    try:
        found = get_parallel_mode().staleness
        assert found == 4 and type(found) is int
    finally:
        set_parallel_mode(before)


def test_modes_by_the_names_of_jax_users() -> None:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def wide(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    shapes = (struct(1024, 1024), struct(8192, 1024))
    plans = {mode: make_plan(wide, *shapes, cluster="h100:8", mode=mode) for mode in ("dp", "FSDP")}
    assert plans["dp"] == make_plan(wide, *shapes, cluster="h100:8", mode="DATA_PARALLEL", zero=0)
    assert (
        plans["FSDP"].strategy.startswith("FSDP over 8") and plans["FSDP"].mode == "DATA_PARALLEL"
    )
    assert plans["dp"].strategy.startswith("data parallel over 8")
    before = set_parallel_mode("fsdp")
    try:
        assert get_parallel_mode().zero == 3
        assert make_plan(wide, *shapes, cluster="h100:8") == plans["FSDP"]
        assert (
            make_plan(wide, *shapes, cluster="h100:8", mode="DATA_PARALLEL", zero=0) == plans["dp"]
        )
        with pytest.raises(RequestError, match=r"zero=1 contradicts the mode in force.*level 3"):
            make_plan(wide, *shapes, cluster="h100:8", zero=1)
    finally:
        set_parallel_mode(before)
    assert get_parallel_mode() == before
    with pytest.raises(RequestError, match=r"zero=3 contradicts the mode dp"):
        make_plan(wide, *shapes, cluster="h100:8", mode="dp", zero=3)
    with pytest.raises(RequestError, match=r"'fdsp'.*dp, fsdp, tp, .*; did you mean fsdp\?"):
        make_plan(wide, *shapes, cluster="h100:8", mode="fdsp")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_a_step_is_split_again_behind_a_change_that_cannot_be_avoided(mode):
    """Parts of the batch, one after the other, cut the batch across the devices: once gathered, it
    is split again."""

    def step(params, x):
        def loss(p, x):
            for w in p:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        parts = x.reshape(4, -1, x.shape[1])
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

        grads = jax.lax.scan(add, zeros, parts)[0]
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), jnp.sum(x)

    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for _ in range(4)]
    batch = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    plan = make_plan(step, params, batch, cluster="h100:8", mode=mode)
    best = make_plan(step, params, batch, cluster="h100:8", mesh="data=8")
    assert "worth of work" not in str(plan)
    assert plan.prediction.step_s < 2.0 * best.prediction.step_s


def _layers(count: int, width: int = 1024, rows: int = 8192) -> tuple[Any, ...]:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": struct(width, 4 * width), "down": struct(4 * width, width)}
    return [layer] * count, struct(rows, width)


def _loss(layers: Any, h: jax.Array) -> jax.Array:
    for layer in layers:
        h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
    return jnp.mean(h**2)


def _step(layers: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(_loss)(layers, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value


@pytest.mark.parametrize(("mode", "axes"), [("tp", {"model"}), ("fsdp+tp", {"data", "model"})])
def test_tensor_parallelism_by_name(mode: str, axes: set[str]) -> None:
    plan = make_plan(_step, *_layers(2), cluster="h100:8", mode=mode, mesh="data=4,model=2")
    weights = [leaf for leaf in plan.inputs if leaf.path.startswith("[0]")]
    assert all(set(leaf.spec.axes) == axes for leaf in weights)
    (batch,) = (leaf for leaf in plan.inputs if leaf.path == "[1]")
    assert batch.spec.dims[0] == ("data",)
    assert not any(note.startswith("tensor parallel:") for note in plan.notes)
    free = make_plan(_step, *_layers(2), cluster="h100:8", mode=mode)
    assert free.mesh.size("model") > 1 and free.prediction.step_s <= plan.prediction.step_s * 1.03


def test_matrices_that_cannot_be_split_are_named() -> None:
    plan = make_plan(_step, *_layers(2, width=1021), cluster="h100:8", mode="tp", mesh="model=8")
    assert any("split over model; others, such as [0]" in note for note in plan.notes), plan.notes


def test_a_mesh_without_the_axis_of_the_mode() -> None:
    with pytest.raises(RequestError, match=r"mode tp splits matrices over the mesh axis model"):
        make_plan(_step, *_layers(2), cluster="h100:8", mode="tp", mesh="data=8")


@pytest.mark.long
def test_pipelines_by_name() -> None:
    """The faster of one program and a program for each stage; these where layers are unequal."""

    def unequal(layers: Any, x: jax.Array) -> Any:
        def loss(layers: Any) -> jax.Array:
            h = x
            for bend, layer in zip("stssttts", layers, strict=True):
                h = h + (jnp.sin if bend == "s" else jnp.tanh)(h @ layer["up"]) @ layer["down"]
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value

    plan = make_plan(unequal, *_layers(8), cluster="h100:8", mode="pp")
    assert plan.stages > 1 and plan.microbatches > 1 and plan.schedule == "1f1b"
    assert any("no stages: this step can't be cut into stages" in n for n in plan.notes), plan.notes

    def embedded(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            return _loss(state["layers"], jnp.tanh(x @ state["in"]))

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    layers, x = _layers(8)
    state = {"layers": layers, "in": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    alike = make_plan(embedded, state, x, cluster="h100:8", mode="pp")
    assert alike.mesh.size("stage") == alike.stages > 1 and not alike.schedule  # passes are short
    four = make_plan(embedded, state, x, cluster="h100:8", mode="pp", stages=4)
    assert four.stages == 4 and four.mesh.size("stage") == 4 and not four.schedule
    assert alike.prediction.step_s < 1.05 * four.prediction.step_s
    large = _layers(8, width=4096, rows=1 << 17)
    named = [
        make_plan(_step, *large, cluster="h100:8", stages=n, schedule="1f1b") for n in (2, 4, 8)
    ]
    plan = make_plan(_step, *large, cluster="h100:8", mode="pp")
    assert plan.schedule == "1f1b"
    assert plan.prediction.step_s <= 1.01 * min(p.prediction.step_s for p in named)
    with pytest.raises(RequestError, match="stages=1 contradicts the mode pp"):
        make_plan(_step, *_layers(8), cluster="h100:8", mode="pp", stages=1)
    with pytest.raises(RequestError, match=r"the mode pp wants two .* no plan has: "):
        make_plan(_step, *_layers(8, rows=1), cluster="h100:8", mode="pp")
    with pytest.raises(MemoryLimitError):
        make_plan(embedded, state, x, cluster="h100:8", mode="pp", memory="20MB")


@pytest.mark.long
def test_the_host_starts_every_pass() -> None:
    """Of 8 stages in one process: 8 x 2 passes of each microbatch, half a millisecond each."""
    options: dict[str, Any] = {"cluster": "h100:8", "stages": 8, "schedule": "1f1b"}
    plan = make_plan(_step, *_layers(8), microbatches=32, **options)
    assert plan.prediction.step_s == pytest.approx(8 * 2 * 32 * 0.5e-3)
    assert any("512 passes at 500 us" in note for note in plan.notes), plan.notes
    spread = make_plan(_step, *_layers(8), microbatches=32, **{**options, "cluster": "h100:8x4"})
    assert spread.prediction.step_s == pytest.approx(plan.prediction.step_s / 4)


def test_the_mode_in_force_is_set_again_whole() -> None:
    before = set_parallel_mode("fsdp+tp")
    try:
        inner = set_parallel_mode("dp")
        set_parallel_mode(inner)
        assert get_parallel_mode() == inner
        assert (inner.zero, inner.tensor) == (3, "model")
        plan = make_plan(_step, *_layers(2), cluster="h100:8")
        assert plan.mesh.size("model") > 1
    finally:
        set_parallel_mode(before)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["dp", "fsdp", "SEMI_AUTO_PARALLEL", "tp"])
def test_a_batch_that_the_devices_do_not_divide_is_named(mode: str) -> None:
    options: dict[str, Any] = {"cluster": "h100:8", "mode": mode}
    if mode == "tp":
        options["mesh"] = "data=8,model=1"
    plan = make_plan(_step, *_layers(2, rows=100), **options)
    (note,) = (n for n in plan.notes if "examples" in n)
    assert "the 100 examples of [1] are not split over 8 devices (data)" in note
    assert note.endswith("96 or 104 examples would be, or pad_batch='auto' fills them up")
    fine = make_plan(_step, *_layers(2, rows=104), **options)
    assert not any("are not split" in n for n in fine.notes)


def test_marks_that_a_mode_does_not_follow_are_counted() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.P(None, "data"))

    def marked(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(jax.lax.with_sharding_constraint(x @ w, split)) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - 0.1 * g, value

    args = jnp.ones((16, 16)), jnp.ones((64, 16))
    plan = make_plan(marked, *args, cluster="cpu:8", mode="fsdp")
    (note,) = [note for note in plan.notes if "ignored" in note]
    assert "of the model ignored, the first is test_modes.py:" in note
    plan = make_plan(marked, *args, cluster="cpu:8", mesh="data=8")
    assert not [note for note in plan.notes if "ignored" in note]
