"""A loss to train: what a model file gives that has no train step of its own."""

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
    """What placement, or a train step, is made of.

    Attributes:
        function: ``function(params, *batch)``, a scalar.
        params: arrays or ShapeDtypeStructs.
        batch: what the function takes after the parameters, likewise.
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
    """Refuse a function that has no gradient as it is: its result is no loss, or no loss alone.

    Args:
        lookups: what ``find_lookups`` found in ``function(params, *batch)``.
        name: of the function, and where it is.

    Raises:
        RequestError: it does not return one scalar of floating point.
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
