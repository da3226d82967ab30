"""What mixed placement takes for a loss."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor.parameter_server import ParameterServer, hybrid, train
from planner.errors import RequestError

pytestmark = pytest.mark.devices


@pytest.mark.parametrize(
    ("more", "got"),
    [
        ({}, r"float32\[\] in .*\(\*, \{\}\)\)"),
        (1, r"float32\[\], .*32\[\] in .*\(\*, \*\)\)"),
    ],
)
def test_a_loss_is_a_scalar_and_nothing_besides(more: Any, got: str) -> None:
    def loss(params: Any, ids: Any) -> Any:
        return jnp.sum(params["embed"][ids]), more

    def loop(server: ParameterServer) -> None:
        params = {"embed": np.zeros((50, 4), np.float32)}
        run = hybrid(
            loss, params, optax.sgd(1.0), server=server, placement={"": "ps"}, cluster="cpu:8"
        )
        run(np.arange(3, dtype=np.int32))

    with pytest.raises(RequestError, match=rf"loss\(params, \*batch\) returns {got}; expected one"):
        train(loop, optimizer=optax.sgd(1.0), backend="local", wait_s=20)
