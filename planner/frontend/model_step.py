"""Make a train step (forward, backward and AdamW) or a loss from a bare Flax model; everything is
abstract."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from planner.errors import RequestError
from planner.frontend.capture import CapturedCall
from planner.frontend.loss import Loss

_STATIC = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Built:
    """A model with the shapes of its traced ``inputs``. ``whole`` maps traced inputs to all inputs;
    ``loss`` is a function of the outputs and the traced inputs."""

    model: Any
    nnx: bool
    inputs: Any
    whole: Callable[[Any], tuple[Any, ...]]
    loss: Callable[[Any, Any], Any]
    optimizer: Any


def model_call(module: ModuleType) -> CapturedCall:
    """The train step of ``module.model`` or ``module.make_model()``; computes no arrays.

    The loss is ``module.loss(outputs, inputs)``, or the mean of squares of the float outputs.

    Raises:
        RequestError: flax or optax is missing, or the model is not a Flax module.
    """
    built = _built(module)
    return _nnx_step(built) if built.nnx else _linen_step(built)


def model_loss(module: ModuleType) -> Loss:
    """The loss of the same model as a function of its parameters and inputs.

    Raises:
        RequestError: as ``model_call``; or the model has state besides parameters, which a loss of
            the parameters can't update.
    """
    built = _built(module)
    function, params, rest = _nnx_loss(built) if built.nnx else _linen_loss(built)
    leaves, _ = jax.tree_util.tree_flatten_with_path(rest)
    if leaves:
        raise RequestError(
            f"{module.__name__}: the model has state besides its parameters, such as "
            f"{jax.tree_util.keystr(leaves[0][0])} (batch statistics, random number generators); "
            "placement is of a loss(params, *batch): define one that does without it, with "
            "example_params(), example_batch() and optimizer"
        )
    return Loss(function, params, (built.inputs,), built.optimizer)


def _built(module: ModuleType) -> _Built:
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
        module_loss = getattr(module, "loss", None)
        full = whole(arrays)
        if module_loss is not None:
            return module_loss(outputs, full if isinstance(given, tuple) else full[0])
        return _mean_of_squares(outputs)

    model = _model(module, nnx, linen)
    of_nnx = isinstance(model, nnx.Module)
    return _Built(model, of_nnx, traced, whole, loss, optax.adamw(1e-3))


def _model(module: ModuleType, nnx: Any, linen: Any) -> Any:
    """The model; if ``make_model`` makes an NNX model, all of its arrays are abstract."""
    make = getattr(module, "make_model", None)
    name = "model" if make is None else "make_model()"
    if make is None:
        model = module.model
    else:
        instances: list[Any] = []

        def probe() -> Any:
            instances[:] = [make()]
            return instances[0] if isinstance(instances[0], nnx.Module) else None

        with _no_eager_sharding(nnx):
            model = nnx.eval_shape(probe)
        if model is None:
            model = make() if isinstance(instances[0], linen.Module) else instances[0]
    if not isinstance(model, nnx.Module | linen.Module):
        raise RequestError(
            f"{module.__name__}: {name} is a {type(model).__name__}; expected a flax.nnx.Module or "
            "a flax.linen.Module"
        )
    return model


def _no_eager_sharding(nnx: Any) -> Any:
    """Treat partitioning metadata as plain metadata: there is no mesh yet."""
    use = getattr(nnx, "use_eager_sharding", None)
    return contextlib.nullcontext() if use is None else use(False)


def _nnx_step(built: _Built) -> CapturedCall:
    from flax import nnx

    graphdef, params, rest = nnx.split(built.model, nnx.Param, ...)
    state = jax.eval_shape(
        lambda p, r: {"params": p, "rest": r, "opt": built.optimizer.init(p)}, params, rest
    )

    def train_step(state: Any, inputs: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            fresh = jax.tree_util.tree_map(lambda x: x, state["rest"])  # of this trace level
            run = nnx.merge(graphdef, params, fresh)
            value = built.loss(run(*built.whole(inputs)), inputs)
            return value, nnx.split(run, nnx.Param, ...)[2]

        (value, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = _update(built.optimizer, grads, state)
        return {"params": params, "rest": rest, "opt": opt}, {"loss": value}

    return CapturedCall(train_step, (state, built.inputs), {})


def _nnx_loss(built: _Built) -> tuple[Callable[..., Any], Any, Any]:
    """The loss, its parameters, and the model's other state."""
    from flax import nnx

    graphdef, params, rest = nnx.split(built.model, nnx.Param, ...)
    params, rest = jax.eval_shape(lambda *both: both, params, rest)

    def loss(params: Any, inputs: Any) -> Any:
        return built.loss(nnx.merge(graphdef, params)(*built.whole(inputs)), inputs)

    return loss, params, rest


def _linen_step(built: _Built) -> CapturedCall:
    def begun(*arrays: Any) -> Any:
        params, rest = _variables(built, arrays)
        return {"params": params, "rest": rest, "opt": built.optimizer.init(params)}

    state = jax.eval_shape(begun, *built.inputs)

    def train_step(state: Any, inputs: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            outputs, rest = built.model.apply(
                {"params": params, **state["rest"]},
                *built.whole(inputs),
                rngs={"dropout": jax.random.key(0)},
                mutable=list(state["rest"]),
            )
            return built.loss(outputs, inputs), dict(rest)

        (value, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = _update(built.optimizer, grads, state)
        return {"params": params, "rest": rest, "opt": opt}, {"loss": value}

    return CapturedCall(train_step, (state, built.inputs), {})


def _linen_loss(built: _Built) -> tuple[Callable[..., Any], Any, Any]:
    """The loss, its parameters, and the model's other variables."""
    params, rest = jax.eval_shape(lambda *arrays: _variables(built, arrays), *built.inputs)

    def loss(params: Any, inputs: Any) -> Any:
        key = jax.random.key(0)
        outputs = built.model.apply({"params": params}, *built.whole(inputs), rngs={"dropout": key})
        return built.loss(outputs, inputs)

    return loss, params, rest


def _variables(built: _Built, arrays: Any) -> tuple[Any, dict[str, Any]]:
    """Fresh parameters and other variables."""
    key = jax.random.key(0)
    variables = dict(built.model.init({"params": key, "dropout": key}, *built.whole(arrays)))
    return variables.pop("params", {}), variables


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
