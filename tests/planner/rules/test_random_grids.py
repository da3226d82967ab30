"""Random kernels: wherever a grid is said to be split, the parts make up the whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from planner.graph.trace import trace
from planner.rules.kernels.pallas.grid import grid_axes
from planner.rules.kernels.pallas.local import local_params
from planner.rules.key import EqnKey

BLOCK = 2


class Kernel:
    """A kernel over two or three dimensions, with up to two operands and results and scratch."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.grid = tuple(draw.choice((2, 2, 4)) for _ in range(draw.choice((2, 2, 3))))
        self.sources = [self.array(plain=0.75) for _ in range(draw.choice((1, 2)))]
        self.results = [self.array(plain=0.95) for _ in range(draw.choice((1, 1, 2)))]
        self.scratch = draw.random() < 0.4
        self.begins = draw.choice(("never", "flag", *range(len(self.grid))))
        self.scales = draw.choice((None, None, None, *range(len(self.grid))))
        self.modulo = draw.random() < 0.5
        self.adds = draw.random() < 0.15
        self.dropped = len(self.results) > 1 and draw.random() < 0.5

    def array(self, plain: float) -> tuple[tuple[int, ...], Callable[..., Any]]:
        """The shape of a two-dimensional array, and its index map."""
        sizes, places = [], []
        for _ in range(2):
            dim = self.draw.randrange(len(self.grid))
            n = self.grid[dim]
            kind = (
                "same"
                if self.draw.random() < plain
                else self.draw.choice(("same", "half", "first", "turn", "back", "sum"))
            )
            sizes.append(BLOCK * (max(1, n // 2) if kind == "half" else n))
            places.append((kind, dim, n))

        def index(*at: Any) -> tuple[Any, ...]:
            out = []
            for kind, dim, n in places:
                i = at[dim]
                other = at[(dim + 1) % len(at)]
                out.append(
                    {
                        "same": i,
                        "half": i // 2 if n > 1 else 0,
                        "first": 0,
                        "turn": (i + 1) % n,
                        "back": n - 1 - i,
                        "sum": (i + other) % n,
                    }[kind]
                )
            return tuple(out)

        return tuple(sizes), index

    def body(self, *refs: Any) -> None:
        """Sums the operands, scales by a place, adds to what lies there or to scratch memory."""
        count = len(self.sources)
        sources, results = refs[:count], refs[count : count + len(self.results)]
        value = sum(r[...] for r in sources[1:]) + sources[0][...]
        if self.scales is not None:
            place = pl.program_id(self.scales)
            value = value * (1 + (jax.lax.rem(place, 2) if self.modulo else place))
        if self.scratch:
            held = refs[-1]
            if self.begins != "never":
                flag = self.begins == "flag"
                start = sources[0][0, 0] > 0 if flag else pl.program_id(self.begins) == 0

                @pl.when(start)
                def _() -> None:
                    held[...] = jnp.zeros((BLOCK, BLOCK))

            held[...] += value
            value = held[...]
        for k, out in enumerate(results):
            out[...] = out[...] + value if self.adds else value * (k + 1)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        specs = [pl.BlockSpec((BLOCK, BLOCK), index) for _, index in self.sources]
        outs = [pl.BlockSpec((BLOCK, BLOCK), index) for _, index in self.results]
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s, _ in self.results]
        square = jax.core.ShapedArray((BLOCK, BLOCK), jnp.dtype("float32"))
        scratch = [pl.MemoryRef(square, pl.ANY)] if self.scratch else []
        made = pl.pallas_call(
            self.body,
            grid=self.grid,
            in_specs=specs,
            out_specs=outs,
            out_shape=shapes,
            scratch_shapes=scratch,
            interpret=True,
        )(*arrays)
        return list(made[:1] if self.dropped else made)


def parts_equal_the_whole(seed: int) -> int:
    """How many dimensions of a random kernel are split; fails where the parts differ.

    Results that are nowhere defined (blocks that are never written, memory that is read before it
    is) say nothing: only kernels whose results are finite count.
    """
    kernel = Kernel(seed)
    draw = np.random.default_rng(seed)
    arrays = [draw.normal(size=s).astype(np.float32) for s, _ in kernel.sources]
    traced = trace(kernel, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    (eqn,) = [e for e in traced.eqns if isinstance(e, EqnKey) and e.name == "pallas_call"]
    whole = [np.asarray(x) for x in eqn.primitive.bind(*map(jnp.asarray, arrays), **eqn.params)]
    used = [k for k in range(len(whole)) if k not in eqn.unused]
    count = 0
    for axis in grid_axes(eqn.params, eqn.unused):
        sites = dict(axis.sites)
        for parts in {2, axis.parts}:
            if axis.parts % parts:
                continue
            shards = [
                np.split(x, parts, sites[k]) if k in sites else [x] * parts
                for k, x in enumerate(arrays)
            ]
            outs = []
            for part in zip(*shards, strict=True):
                made = [list(x.shape) for x in whole]
                for k in range(len(whole)):
                    if len(arrays) + k in sites:
                        made[k][sites[len(arrays) + k]] //= parts
                shapes = [x.shape for x in part]
                local = local_params(eqn.params, shapes, list(map(tuple, made)), eqn.unused)
                outs.append(eqn.primitive.bind(*map(jnp.asarray, part), **local))
            for k in used:
                got = np.concatenate([o[k] for o in outs], sites[len(arrays) + k])
                if np.isfinite(whole[k]).all():
                    np.testing.assert_allclose(got, whole[k], rtol=1e-5, err_msg=f"seed {seed}")
                    count += 1
    return count


@pytest.mark.long
def test_random_kernels() -> None:
    assert sum(map(parts_equal_the_whole, range(30))) >= 8


@pytest.mark.slow
def test_many_random_kernels() -> None:
    assert sum(map(parts_equal_the_whole, range(1000, 2000))) >= 300
