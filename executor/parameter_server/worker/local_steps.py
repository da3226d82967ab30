"""Local steps: each worker trains for several steps between pushes and pushes the change.

With an optimizer on the servers, a push is the outer gradient (parameters before minus parameters
after), and that optimizer is the outer one (Douillard et al., DiLoCo: distributed low-communication
training of language models, 2023, algorithm 1, whose outer optimizer is SGD of rate 0.7 with
Nesterov momentum 0.9). Without one, the servers add the change of the parameters, averaged over the
workers (GEO-SGD of PaddlePaddle). The state of the inner optimizer stays with the worker, as in
both.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from executor.parameter_server.worker.worker import ParameterServer
from planner.errors import RequestError


class LocalSteps:
    """Takes the gradients of one worker and pushes every ``push_every`` steps.

    The inner optimizer runs on whole arrays, so it need not be elementwise.

    Args:
        server: the worker's ``ParameterServer``.
        params: the parameters that ``server.init`` returned.
        inner: the optimizer of the steps between pushes.
        push_every: number of steps from one push to the next.

    Attributes:
        params: the current parameters.

    Raises:
        RequestError: ``push_every`` is below 1.
    """

    def __init__(
        self,
        server: ParameterServer,
        params: Any,
        *,
        inner: optax.GradientTransformation,
        push_every: int,
    ) -> None:
        if push_every < 1:
            raise RequestError(f"push_every={push_every}: expected at least 1")
        self.params, self.push_every = params, push_every
        self._server, self._before, self._taken = server, params, 0
        self._state = inner.init(params)
        share = 1.0 if server.rule.mode == "sync" else 1.0 / server.num_workers
        factor = -share if server.optimizer is None else 1.0

        def step(params: Any, state: Any, gradients: Any) -> Any:
            updates, state = inner.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        def way(before: Any, after: Any) -> Any:
            return jax.tree.map(lambda b, a: ((b - a) * factor).astype(b.dtype), before, after)

        self._step, self._way = jax.jit(step), jax.jit(way)

    def step(self, gradients: Any) -> Any:
        """Take one step of the inner optimizer; every ``push_every``-th step also pushes and pulls.

        Returns:
            The parameters for the next step.

        Raises:
            WaitError: as for ``ParameterServer.push_pull``.
        """
        self.params, self._state = self._step(self.params, self._state, gradients)
        self._taken += 1
        return self._exchange() if self._taken == self.push_every else self.params

    def finish(self) -> Any:
        """Push the steps since the last push, if any, and return the parameters after that."""
        return self._exchange() if self._taken else self.params

    def _exchange(self) -> Any:
        self.params = self._server.push_pull(self._way(self._before, self.params))
        self._before, self._taken = self.params, 0
        return self.params
