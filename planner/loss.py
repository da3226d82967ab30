"""A loss to train: what a model file gives that has no train step of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from planner.capture import Call
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

    def train_step(self) -> Call:
        """``(state, *batch) -> (state, {"loss"})`` with ``state`` of ``params`` and ``opt``."""
        (params,) = abstract((self.params,))
        state = {"params": params, "opt": jax.eval_shape(self.optimizer.init, params)}

        def train_step(state: Any, *batch: Any) -> Any:
            import optax

            value, gradients = jax.value_and_grad(self.function)(state["params"], *batch)
            updates, opt = self.optimizer.update(gradients, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": value}

        return Call(train_step, (state, *self.batch), {})
