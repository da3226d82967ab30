"""Which optimizers may run on servers: those that do the same on flat parts of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, train
from executor.parameter_server.placement.elementwise import (
    check_elementwise,
    check_form,
    runs_elementwise,
)
from planner.errors import RequestError

TREE = {
    "kernel": np.ones((3, 4), np.float32),
    "bias": np.ones(4, np.float32),
    "half": jnp.ones(5, jnp.bfloat16),
    "scale": np.float32(1),
    "none": np.zeros((0, 3), np.float32),
    "steps": np.ones((), np.int32),
}


def decays(path: Any, _: Any) -> bool:
    return "bias" not in jax.tree_util.keystr(path)


def of_trees(mask: Any) -> Any:
    return lambda tree: jax.tree_util.tree_map_with_path(mask, tree)


WARMUP = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 1000, 10000)
SAME = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 20)),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "adagrad": optax.adagrad(0.1),
    "clip": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "radam": optax.radam(0.01),
    "large rate": optax.adam(1.0),
    "several pushes": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
}
OTHER = {
    "global norm": optax.clip_by_global_norm(1.0),
    "block rms": optax.clip_by_block_rms(1.0),
    "lamb": optax.lamb(0.1),
    "rank": optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)),
    "small decay": optax.adamw(1e-4, mask=lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)),
    "in a warmup": optax.chain(optax.centralize(), optax.sgd(WARMUP)),
    "several pushes": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3)), 4
    ).gradient_transformation(),
    "factored": optax.adafactor(0.1),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "if finite": optax.apply_if_finite(optax.sgd(0.1), 5),
}
OF_NAMES = {
    "small decay by path": optax.adamw(1e-4, mask=of_trees(decays)),
    "frozen in a warmup": optax.partition(
        {"train": optax.adamw(WARMUP), "still": optax.set_to_zero()},
        of_trees(lambda path, _: "train" if decays(path, _) else "still"),
    ),
    "mask by path": optax.adamw(0.1, mask=of_trees(decays)),
    "mask by dict": optax.adamw(0.1, mask={k: k != "bias" for k in TREE}),
    "partition": optax.partition(
        {"train": optax.sgd(0.1), "still": optax.set_to_zero()},
        of_trees(lambda path, _: "train" if decays(path, _) else "still"),
    ),
}


QUICK = {"sgd", "momentum", "adam", "schedule", "clip", "several pushes", "injected"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SAME],
)
def test_what_runs_on_servers(name: str) -> None:
    check_elementwise(SAME[name])
    check_form(SAME[name], TREE, {"rows": np.ones((7, 2), np.float32)})
    assert runs_elementwise(SAME[name], TREE)


@pytest.mark.parametrize("name", OTHER)
def test_what_looks_at_several_elements_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"looks at several elements at once.*on='worker'"):
        check_elementwise(OTHER[name])


@pytest.mark.parametrize("name", OF_NAMES)
def test_what_looks_at_names_is_refused(name: str) -> None:
    if name != "mask by dict":  # which takes no other tree
        check_elementwise(OF_NAMES[name])
    with pytest.raises(RequestError, match=r"names or shapes of arrays|can't take what servers"):
        check_form(OF_NAMES[name], TREE, {})
    assert not runs_elementwise(OF_NAMES[name], TREE)


def of_float32(across: bool) -> optax.GradientTransformation:
    """SGD whose state is float32 whatever the gradients are."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        def one(g: Any, kept: Any) -> Any:
            moved = lambda: 0.9 * kept + 0.1 * (g.mean() if across else g)  # noqa: E731
            return jax.lax.cond(jnp.asarray(True), moved, lambda: kept)

        state = jax.tree.map(one, gradients, state)
        return state, state

    return optax.GradientTransformation(init, update)


def test_what_takes_float32_alone() -> None:
    check_elementwise(of_float32(across=False))
    check_form(of_float32(across=False), TREE, {})
    with pytest.raises(RequestError, match="looks at several elements at once"):
        check_elementwise(of_float32(across=True))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (), (3, 1)])
def test_arrays_of_one_element_have_no_other_roundings(shape: tuple[int, ...]) -> None:
    tree = {"a": np.ones(shape, np.float32), "b": np.ones((), jnp.bfloat16)}
    for optimizer in (optax.adamw(WARMUP), optax.sgd(WARMUP, 0.9), optax.radam(WARMUP)):
        check_form(optimizer, tree, {})
        check_form(optimizer, {"a": tree["a"]}, {})


def test_it_is_tried_while_others_look_for_nans() -> None:
    with jax.debug_nans(True), jax.debug_infs(True):
        check_elementwise(optax.adam(0.1))


def test_names_of_tables_count() -> None:
    tables = {"embed": np.ones((7, 2), np.float32)}
    frozen = optax.partition(
        {"train": optax.sgd(0.1), "still": optax.set_to_zero()},
        of_trees(lambda path, _: "still" if "embed" in str(path) else "train"),
    )
    check_form(frozen, {}, {"other": tables["embed"]})
    with pytest.raises(RequestError, match="names or shapes of arrays"):
        check_form(frozen, {}, tables)


def test_a_mask_by_path_is_refused_at_init_and_runs_in_workers() -> None:
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask=of_trees(decays))

    def loop(server: ParameterServer) -> None:
        params = server.init({"bias": np.ones(3, np.float32), "w": np.ones((2, 3), np.float32)})
        server.push_pull(jax.tree.map(np.zeros_like, params))

    with pytest.raises(RequestError, match=r"names or shapes of arrays.*update_on='worker'"):
        train(loop, workers=1, optimizer=optimizer, backend="local")
    done = train(loop, workers=1, optimizer=optimizer, backend="local", update_on="worker")
    np.testing.assert_array_equal(done.params["bias"], np.ones(3))
    np.testing.assert_allclose(done.params["w"], np.full((2, 3), 0.95), rtol=1e-6)


def test_one_array_keeps_its_tree_in_workers() -> None:
    """Where a second array stands beside it for the same bits, paths would be others."""
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask={"bias": False})

    def loop(server: ParameterServer) -> None:
        server.push_pull({"bias": 0 * server.init({"bias": np.ones(3, np.float32)})["bias"]})

    done = train(loop, workers=1, optimizer=optimizer, backend="local", update_on="worker")
    np.testing.assert_array_equal(done.params["bias"], np.ones(3))


def test_a_function_is_no_optimizer() -> None:
    with pytest.raises(RequestError, match=r"expected an optax\.GradientTransformation"):
        train(lambda server: None, workers=1, optimizer=optax.adam, backend="local")  # type: ignore[arg-type]
