"""A normalizing flow of Distrax: masked couplings with rational-quadratic splines."""

from __future__ import annotations

from typing import Any

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
from training import normal, training

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """65,536 points of 64 dimensions, or 32 of 4."""
    rows, size, width, layers, bins = (1 << 16, 64, 1024, 8, 8) if real else (32, 4, 16, 2, 4)

    def density(x: jax.Array) -> jax.Array:
        mask = jnp.arange(size) % 2 == 0
        couplings = []
        for _ in range(layers):
            conditioner = hk.Sequential([
                hk.nets.MLP([width, width, size * (3 * bins + 1)]),
                hk.Reshape((size, 3 * bins + 1)),
            ])  # fmt: skip
            couplings.append(
                distrax.MaskedCoupling(
                    mask,
                    conditioner,
                    lambda p: distrax.RationalQuadraticSpline(p, range_min=-4.0, range_max=4.0),
                )
            )
            mask = ~mask
        base = distrax.Independent(distrax.Normal(jnp.zeros(size), jnp.ones(size)), 1)
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(couplings))).log_prob(x)

    net = hk.without_apply_rng(hk.transform(density))
    make_state, step = training(
        lambda: net.init(jax.random.key(0), jnp.zeros((2, size))),
        lambda params, x: -jnp.mean(net.apply(params, x)),
    )
    return make_state, step, lambda: normal(rows, size)
