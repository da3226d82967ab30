"""Products on TPUs whose contraction is split: when, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from planner import make_plan
from planner.step.kernels.split import DRAGS, drag


def seconds(function: Callable[..., Any], *shapes: tuple[int, ...], cluster: str) -> float:
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return make_plan(function, *args, cluster=cluster, memory="1TB").prediction.compute_s


def product(x: Any, w: Any) -> Any:
    return x @ w


def rate(m: int, k: int, n: int, cluster: str) -> float:
    """FLOP per second."""
    return 2 * m * k * n / seconds(product, (m, k), (k, n), cluster=cluster)


# shares of the peak rate, libtpu 0.0.42.1: docs/explanation/compute.md
@pytest.mark.parametrize(
    ("cluster", "fits", "compiled"),
    [("v5p:1x1x1", 4096, 0.87), ("v6e:1x1", 10240, 0.67), ("v5e:1x1", 12288, 0.82)],
)
def test_a_product_is_slower_where_neither_operand_fits_in_fast_memory(
    cluster: str, fits: int, compiled: float
) -> None:
    m, k = 16384, 4096
    fast, slow = rate(m, k, fits, cluster), rate(m, k, 16384, cluster)
    assert slow / fast == pytest.approx(compiled, rel=0.1)


@pytest.mark.parametrize(("m", "k", "n"), [(16384, 2048, 16384), (1024, 8192, 16384)])
def test_short_contractions_and_small_operands_are_not_split(m: int, k: int, n: int) -> None:
    assert rate(m, k, n, "v5p:1x1x1") == pytest.approx(
        rate(16384, 4096, 4096, "v5p:1x1x1"), rel=0.05
    )


def test_gpus_have_no_such_products() -> None:
    big, small = rate(16384, 4096, 16384, "h100:1"), rate(16384, 4096, 4096, "h100:1")
    assert big == pytest.approx(small, rel=0.05)


@pytest.mark.parametrize("cluster", ["v5p:1x1x1", "v6e:1x1"])
def test_further_arrays_make_a_split_product_slower(cluster: str) -> None:
    m, k, n = 16384, 14336, 4096
    shapes = ((m, k), (k, n), (m, n))
    plain = seconds(product, *shapes[:2], cluster=cluster)
    one = seconds(lambda x, w, y: x @ w + y, *shapes, cluster=cluster)
    two = seconds(lambda x, w, y, z: x @ w * y + z, *shapes, (m, n), cluster=cluster)
    assert 1.08 < one / plain < 1.3 < two / plain < 1.6


def test_drags_grow() -> None:
    assert list(DRAGS) == sorted(DRAGS)
    assert drag(7) == DRAGS[-1]


def test_a_split_over_devices_can_make_an_operand_fit() -> None:
    """Columns over 8 devices: an operand of 128 MiB becomes one of 16."""
    m, k, n = 16384, 4096, 16384
    one = seconds(product, (m, k), (k, n), cluster="v5p:1x1x1")
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n))]
    plan = make_plan(
        product,
        *args,
        cluster="v5p:2x2x2",
        mesh={"model": 8},
        shardings={r"\[0\]": P(), r"\[1\]": P(None, "model")},
    )
    assert plan.prediction.compute_s < one / 8.8
