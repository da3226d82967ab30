"""Stochastic variational inference of NumPyro: a Bayesian regression with a guide made for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from training import normal

CLUSTER = "cpu:8"


def model(x: jax.Array, y: jax.Array, hidden: int) -> None:
    """A perceptron with normal priors."""
    width = x.shape[1]
    up = numpyro.sample("up", dist.Normal(0, 1).expand([width, hidden]).to_event(2))
    down = numpyro.sample("down", dist.Normal(0, 1).expand([hidden]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ up) @ down, scale), obs=y)


def build(real: bool) -> Any:
    """A million rows, or 64."""
    rows, width, hidden = (1 << 20, 256, 512) if real else (64, 8, 16)
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-3), Trace_ELBO())

    def make_state() -> Any:
        x = jnp.zeros((8, width))
        return svi.init(jax.random.key(0), x, x[:, 0], hidden)

    def step(state: Any, batch: Any) -> Any:
        return svi.update(state, batch["x"], batch["y"], hidden)

    make_state()  # the guide is set up with real numbers
    return make_state, step, lambda: {"x": normal(rows, width), "y": normal(rows)}
