"""A bare Flax model -> a train step to plan: forward, backward and AdamW, all abstract."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from planner.capture import Call
from planner.errors import RequestError

_STATIC = (bool, int, float, str, type(None))


def model_call(module: ModuleType) -> Call:
    """The train step of ``module.model`` or ``module.make_model()``; computes no arrays.

    The loss is ``module.loss(outputs, inputs)``, or the mean of squares of the float outputs.

    Raises:
        RequestError: flax or optax is missing, or the model is not a Flax module.
    """
    try:
        import optax
        from flax import linen, nnx
    except ImportError as error:
        raise RequestError(
            f"{module.__name__}: planning a bare model needs flax and optax ({error}); install "
            "them, or name a train step: model.py:function"
        ) from error
    given = module.example_inputs()
    inputs = given if isinstance(given, tuple) else (given,)
    static = {k: x for k, x in enumerate(inputs) if isinstance(x, _STATIC)}
    traced = jax.eval_shape(lambda *xs: xs, *(x for k, x in enumerate(inputs) if k not in static))

    def whole(arrays: Any) -> tuple[Any, ...]:
        rest = iter(arrays)
        return tuple(static[k] if k in static else next(rest) for k in range(len(inputs)))

    def loss(outputs: Any, arrays: Any) -> Any:
        own = getattr(module, "loss", None)
        full = whole(arrays)
        if own is not None:
            return own(outputs, full if isinstance(given, tuple) else full[0])
        return _mean_of_squares(outputs)

    model = _model(module, nnx, linen)
    build = _nnx_step if isinstance(model, nnx.Module) else _linen_step
    return build(model, traced, whole, loss, optax.adamw(1e-3))


def _model(module: ModuleType, nnx: Any, linen: Any) -> Any:
    """The model, an NNX one with abstract arrays only."""
    make = getattr(module, "make_model", None)
    name = "model" if make is None else "make_model()"
    if make is None:
        model = module.model
    else:
        made: list[Any] = []

        def probe() -> Any:
            made[:] = [make()]
            return made[0] if isinstance(made[0], nnx.Module) else None

        with _no_eager_sharding(nnx):
            model = nnx.eval_shape(probe)
        if model is None:
            model = make() if isinstance(made[0], linen.Module) else made[0]
    if not isinstance(model, nnx.Module | linen.Module):
        raise RequestError(
            f"{module.__name__}: {name} is a {type(model).__name__}; expected a flax.nnx.Module or "
            "a flax.linen.Module"
        )
    return model


def _no_eager_sharding(nnx: Any) -> Any:
    """Let partitioning metadata be plain metadata: there is no mesh yet."""
    use = getattr(nnx, "use_eager_sharding", None)
    return contextlib.nullcontext() if use is None else use(False)


def _nnx_step(
    model: Any, inputs: Any, whole: Callable[[Any], Any], loss: Callable[..., Any], optimizer: Any
) -> Call:
    from flax import nnx

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    state = jax.eval_shape(
        lambda p, r: {"params": p, "rest": r, "opt": optimizer.init(p)}, params, rest
    )

    def train_step(state: Any, inputs: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            fresh = jax.tree_util.tree_map(lambda x: x, state["rest"])  # of this trace level
            run = nnx.merge(graphdef, params, fresh)
            value = loss(run(*whole(inputs)), inputs)
            return value, nnx.split(run, nnx.Param, ...)[2]

        (value, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = _update(optimizer, grads, state)
        return {"params": params, "rest": rest, "opt": opt}, {"loss": value}

    return Call(train_step, (state, inputs), {})


def _linen_step(
    model: Any, inputs: Any, whole: Callable[[Any], Any], loss: Callable[..., Any], optimizer: Any
) -> Call:
    def init(*arrays: Any) -> Any:
        key = jax.random.key(0)
        variables = dict(model.init({"params": key, "dropout": key}, *whole(arrays)))
        params = variables.pop("params", {})
        return {"params": params, "rest": variables, "opt": optimizer.init(params)}

    state = jax.eval_shape(init, *inputs)

    def train_step(state: Any, inputs: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            outputs, rest = model.apply(
                {"params": params, **state["rest"]},
                *whole(inputs),
                rngs={"dropout": jax.random.key(0)},
                mutable=list(state["rest"]),
            )
            return loss(outputs, inputs), dict(rest)

        (value, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = _update(optimizer, grads, state)
        return {"params": params, "rest": rest, "opt": opt}, {"loss": value}

    return Call(train_step, (state, inputs), {})


def _update(optimizer: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    import optax

    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return optax.apply_updates(state["params"], updates), opt


def _mean_of_squares(outputs: Any) -> Any:
    floats = [
        x for x in jax.tree_util.tree_leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if not floats:
        raise RequestError("the model has no float outputs; define loss(outputs, inputs)")
    return sum(jnp.mean(jnp.square(x.astype(jnp.float32))) for x in floats)
