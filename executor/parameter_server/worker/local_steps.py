"""Several steps between pushes: each worker trains by itself and pushes how far it came.

With an optimizer on the servers, what is pushed is the outer gradient, parameters before less
parameters after, and that optimizer is the outer one (Douillard et al., DiLoCo: distributed
low-communication training of language models, 2023, algorithm 1, whose outer optimizer is SGD of
rate 0.7 with Nesterov momentum 0.9). Without one, the servers add the way that the workers came,
shared among them (the GEO-SGD of PaddlePaddle). The state of the inner optimizer stays with the
worker, as in both.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from executor.parameter_server.worker.worker import ParameterServer
from planner.errors import RequestError


class LocalSteps:
    """Takes the gradients of one worker and pushes every so many steps.

    The inner optimizer may look at whole arrays: it has them.

    Args:
        server: of this worker.
        params: what ``server.init`` returned.
        inner: the optimizer of the steps between pushes.
        push_every: steps from one push to the next.

    Attributes:
        params: the parameters now.

    Raises:
        RequestError: ``push_every`` below 1.
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
        """One step of the inner optimizer; after every ``push_every``-th a push and a pull.

        Returns:
            The parameters to go on with.

        Raises:
            WaitError: as for ``ParameterServer.push_pull``.
        """
        self.params, self._state = self._step(self.params, self._state, gradients)
        self._taken += 1
        return self._exchange() if self._taken == self.push_every else self.params

    def finish(self) -> Any:
        """Push the steps since the last push, if there are any; the parameters after that."""
        return self._exchange() if self._taken else self.params

    def _exchange(self) -> Any:
        self.params = self._server.push_pull(self._way(self._before, self.params))
        self._before, self._taken = self.params, 0
        return self.params
