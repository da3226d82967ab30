"""A loss to train, from a model file without a train step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.errors import RequestError
from planner.frontend.capture import CapturedCall
from planner.graph.lookups.tables import LookUps
from planner.graph.trace import abstract


@dataclass(frozen=True)
class Loss:
    """The parts that placement, or a train step, is built from.

    Attributes:
        function: ``function(params, *batch)``, a scalar.
        params: arrays or ShapeDtypeStructs.
        batch: the arguments after the parameters, likewise.
        optimizer: an optax transformation.
    """

    function: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    optimizer: Any

    def train_step(self) -> CapturedCall:
        """``(state, *batch) -> (state, {"loss"})`` with ``state`` of ``params`` and ``opt``."""
        (params,) = abstract((self.params,))
        state = {"params": params, "opt": jax.eval_shape(self.optimizer.init, params)}

        def train_step(state: Any, *batch: Any) -> Any:
            import optax

            value, gradients = jax.value_and_grad(self.function)(state["params"], *batch)
            updates, opt = self.optimizer.update(gradients, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": value}

        return CapturedCall(train_step, (state, *self.batch), {})


def check_scalar(lookups: LookUps, name: str = "loss") -> None:
    """Reject a function without a gradient: its result is not a loss, or not a loss alone.

    Args:
        lookups: the result of ``find_lookups`` for ``function(params, *batch)``.
        name: of the function, and where it is.

    Raises:
        RequestError: the function does not return one floating-point scalar.
    """
    results = [v.aval for v in compat.body(lookups.jaxpr).outvars]
    alone = lookups.out_tree == jax.tree_util.tree_structure(0)
    if alone and not results[0].shape and jnp.issubdtype(results[0].dtype, jnp.floating):
        return
    got = ", ".join(x.str_short() for x in results) or "nothing"
    raise RequestError(
        f"{name}(params, *batch) returns {got}{'' if alone else f' in {lookups.out_tree}'}; "
        "expected one scalar of floating point, the loss, and nothing besides"
    )
