"""Updates on the workers: servers only average, and every worker has the parameters.

As in MXNet's KVStore with ``update_on_kvstore=False``, a worker pulls the mean of the pushes and
applies it with its own optimizer. All workers begin with the same values and apply the same means,
so they stay equal without sending parameters. Every worker must get every mean exactly once, so
this requires synchronous training in which all pushes count.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from executor.parameter_server.placement.elementwise import runs_elementwise
from executor.parameter_server.server.clock import Rule
from planner.errors import RequestError

UPDATE_ON = ("server", "worker")


def _begin(values: Any) -> Any:
    return jax.tree.map(jnp.array, values)


def _keep(mean: Any, state: Any, values: Any = None) -> Any:
    return jax.tree.map(jnp.zeros_like, mean), mean


MEANS = optax.GradientTransformation(_begin, _keep)
"""The servers' optimizer in this mode: values stay, and the state is the last mean (at first, the
values)."""


def check_update_on(
    update_on: str,
    rule: Rule,
    optimizer: optax.GradientTransformation | None,
    **others: object,
) -> None:
    """Refuse updates on the workers if the workers would not stay equal.

    Args:
        update_on: "server" or "worker".
        rule: how far apart workers may be.
        optimizer: the optimizer to run.
        others: options that need the parameters on the servers during the run; a true value is
            refused.

    Raises:
        RequestError: an unknown name, or updates on workers that may miss some.
    """
    if update_on not in UPDATE_ON:
        raise RequestError(f"update_on={update_on!r}: expected 'server' or 'worker'")
    if update_on == "server":
        return
    if rule.mode != "sync" or rule.aggregate is not None:
        raise RequestError(
            f"update_on='worker' in mode {rule.mode!r} with aggregate={rule.aggregate}: workers "
            "that do not all get the same means would come to have different parameters; expected "
            "mode 'sync' without backup workers"
        )
    if optimizer is None:
        raise RequestError("update_on='worker' without an optimizer: nothing is to run there")
    refused = [name for name, value in others.items() if value]
    if refused:
        raise RequestError(
            f"{', '.join(refused)} with update_on='worker': the servers do not have the parameters "
            "while the job runs; expected update_on='server'"
        )


class Replica:
    """A worker's own parameters and optimizer state.

    Args:
        optimizer: applied to every mean; it runs on whole arrays, so it need not be elementwise.
        options: compiler options.
    """

    def __init__(
        self, optimizer: optax.GradientTransformation, options: dict[str, Any] | None
    ) -> None:
        self.optimizer, self.version = optimizer, 0
        self.held: Any = None
        self.state: Any = None
        self.alone = False

        def update(held: Any, state: Any, mean: Any) -> Any:
            updates, state = optimizer.update(mean, state, held)
            return optax.apply_updates(held, updates), state

        self._update = jax.jit(update, compiler_options=options)

    @property
    def params(self) -> Any:
        """The parameters, jax Arrays."""
        return self.held[0] if self.alone else self.held

    def take(self, version: int, pulled: Any) -> Any:
        """Apply what was pulled and return the parameters: version 0 brings the first values, then
        means.

        Raises:
            RequestError: a mean was missed.
        """
        if self.held is None and version == 0:
            one = len(jax.tree.leaves(pulled)) == 1
            self.alone = one and runs_elementwise(self.optimizer, pulled)
            self.held = self._paired(jax.tree.map(jnp.array, pulled))
            self.state = self.optimizer.init(self.held)
        elif self.held is None or version not in (self.version, self.version + 1):
            raise RequestError(
                f"update_on='worker': this worker is at update {self.version} and the servers are "
                f"at {version}; it has to be there from the beginning"
            )
        elif version > self.version:
            self.held, self.state = self._update(self.held, self.state, self._paired(pulled))
            self.version = version
        return self.params

    def _paired(self, tree: Any) -> Any:
        """Add a second array if there is only one and servers could run the optimizer too: the
        docstring of ``server.store`` explains how results depend on that."""
        return (tree, jnp.zeros(1)) if self.alone else tree
