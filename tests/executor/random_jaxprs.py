"""Random programs: instructions drawn as data, run on whatever arrays there are by then.

An instruction is ``(name, a, b, n, body)``: an operation, two numbers that pick operands among the
arrays made so far, a number for everything else, and instructions inside it if it is a region.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from tests.executor.random_operations import FLOAT_OPS, INT_OPS, MIXED_OPS, fit, ranked

Instruction = tuple[str, int, int, int, tuple[Any, ...]]
LIMIT = 2048
"""Most elements of a value."""


@dataclass
class Arrays:
    """The arrays made so far; lists only grow."""

    floats: list[Any]
    ints: list[Any]

    def copy(self, change: Callable[[Any], Any] = lambda x: x) -> Arrays:
        return Arrays([change(x) for x in self.floats], [change(x) for x in self.ints])

    def float_at(self, k: int) -> Any:
        return self.floats[k % len(self.floats)]

    def int_at(self, k: int) -> Any:
        return self.ints[k % len(self.ints)]

    def add(self, value: Any) -> None:
        """Keep a result: floats squeezed into [-1, 1], integers into [0, 64); none without
        elements."""
        if not value.size:
            return
        if value.size > LIMIT:
            value = value.reshape(-1)[:LIMIT].reshape(-1, 64)
        if jnp.issubdtype(value.dtype, jnp.inexact):
            self.floats.append(jnp.tanh(value.astype(jnp.float32)))
        else:
            self.ints.append(jnp.mod(value.astype(jnp.int32), 64))


def run(arrays: Arrays, instructions: Sequence[Instruction]) -> None:
    """Run instructions; their results are added to ``arrays``."""
    for name, a, b, n, body in instructions:
        if name in FLOAT_OPS:
            arrays.add(FLOAT_OPS[name](arrays.float_at(a), arrays.float_at(b), n))
        elif name in MIXED_OPS:
            arrays.add(MIXED_OPS[name](arrays.float_at(a), arrays.int_at(b), n))
        elif name in INT_OPS:
            arrays.add(INT_OPS[name](arrays.int_at(a), arrays.int_at(b), n))
        else:
            for value in REGIONS[name](arrays, a, b, n, body):
                arrays.add(value)


def inside(arrays: Arrays, body: Sequence[Instruction], *new: Any) -> Arrays:
    """The arrays after a body that sees all arrays so far and some new ones."""
    found = arrays.copy()
    for x in new:
        (found.floats if jnp.issubdtype(x.dtype, jnp.inexact) else found.ints).append(x)
    run(found, body)
    return found


def _scan(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    carry, xs = arrays.float_at(a), ranked(arrays.float_at(b), 1)[:6]

    def step(carry: Any, x: Any) -> Any:
        floats, i = carry
        made = inside(arrays, body, floats, x, i)
        out = fit(made.floats[-1], floats.shape) * 0.5 + floats * 0.5
        return (out, i + 1), (made.floats[-1], made.ints[-1])

    (out, count), (ys, numbers) = lax.scan(
        step, (carry, arrays.int_at(a)), xs, reverse=bool(n % 2), unroll=1 + n // 2 % 2
    )
    return [out, count, ys, numbers]


def _fori(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    def step(k: Any, x: Any) -> Any:
        return fit(inside(arrays, body, x).floats[-1], x.shape)

    return [lax.fori_loop(0, 1 + n % 3, step, arrays.float_at(a))]


def _while(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    held = arrays.copy(lax.stop_gradient)

    def step(state: Any) -> Any:
        x, i, k = state
        made = inside(held, body, x, i)
        return fit(made.floats[-1], x.shape), fit(made.ints[-1], i.shape), k + 1

    def more(state: Any) -> Any:
        return (state[2] < 1 + n % 3) & (jnp.sum(state[1]) != 7)

    return list(lax.while_loop(more, step, (held.float_at(a), held.int_at(b), 0))[:2])


def _cond(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    x, i = arrays.float_at(a), arrays.int_at(b)

    def left(x: Any) -> Any:
        return fit(inside(arrays, body, x).floats[-1], x.shape)

    if n % 2:
        return [lax.cond(jnp.sum(i) % 2 == 0, left, lambda x: x * 0.5, x)]
    return [lax.switch(i.reshape(-1)[0] % 3, [left, jnp.sin, lambda x: jnp.flip(x)], x)]


def _called(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., list[Any]]:
    """A region that calls a wrapped function of one float array."""

    def region(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
        @wrap
        def function(x: Any, y: Any) -> Any:
            return inside(arrays, body, x, y).floats[-1]

        return [function(arrays.float_at(a), arrays.float_at(b))]

    return region


POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
)


def _remat(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    wrap = functools.partial(jax.checkpoint, policy=POLICIES[n % 3], prevent_cse=n % 2 == 0)
    return _called(wrap)(arrays, a, b, n, body)


def alone(body: Sequence[Instruction], x: Any, i: Any) -> Any:
    """A float array of the shape of ``x``, by a body that sees nothing else."""
    made = Arrays([x], [i])
    run(made, body)
    return fit(made.floats[-1], x.shape)


def _custom_vjp(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    function = jax.custom_vjp(lambda x, i: alone(body, x, i))
    function.defvjp(lambda x, i: (alone(body, x, i), x), lambda x, g: (g * jnp.cos(x), None))
    return [function(arrays.float_at(a), arrays.int_at(b))]


def _custom_jvp(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    function = jax.custom_jvp(lambda x, i: alone(body, x, i))
    function.defjvp(lambda xs, ts: (alone(body, *xs), ts[0] * jnp.sin(xs[0])))
    return [function(arrays.float_at(a), arrays.int_at(b))]


def _vmap(arrays: Arrays, a: int, b: int, n: int, body: Any) -> list[Any]:
    x = ranked(arrays.float_at(a), 2)
    return [jax.vmap(lambda row: inside(arrays, body, row).floats[-1])(x)]


REGIONS: dict[str, Callable[[Arrays, int, int, int, Any], list[Any]]] = {
    "scan": _scan,
    "fori": _fori,
    "while": _while,
    "cond": _cond,
    "jit": _called(jax.jit),
    "remat": _remat,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "vmap": _vmap,
}
"""Operations with a body."""


def program(instructions: Sequence[Instruction], grad: bool) -> Callable[..., Any]:
    """A function of float arrays and integer arrays: its last values, or a gradient step."""

    def forward(floats: list[Any], ints: list[Any]) -> tuple[list[Any], list[Any]]:
        arrays = Arrays(list(floats), list(ints))
        run(arrays, instructions)
        return arrays.floats[len(floats) :][-4:], arrays.ints[len(ints) :][-4:]

    if not grad:
        return forward

    def train(floats: list[Any], ints: list[Any]) -> Any:
        def loss(floats: list[Any]) -> Any:
            made, aux = forward(floats, ints)
            return sum((jnp.mean(x**2) for x in made), jnp.float32(0)), aux

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(floats)
        return [x - g for x, g in zip(floats, grads, strict=True)], value, aux

    return train


def arguments(shapes: Sequence[tuple[int, ...]]) -> tuple[list[Any], list[Any]]:
    """A float array of each shape and two integer arrays."""
    rng = np.random.default_rng([math.prod(s) for s in shapes])
    floats = [jnp.asarray(rng.uniform(-1, 1, s), jnp.float32) for s in shapes]
    ints = [jnp.asarray(rng.integers(0, 64, s), jnp.int32) for s in ((16,), (8, 8))]
    return floats, ints


numbers = st.integers(0, 11)
leaves = st.tuples(
    st.sampled_from([*FLOAT_OPS, *MIXED_OPS, *INT_OPS]), numbers, numbers, numbers, st.just(())
)


def regions(inner: st.SearchStrategy[Instruction]) -> st.SearchStrategy[Instruction]:
    """Operations whose bodies are lists of ``inner``."""
    bodies = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.tuples(st.sampled_from([*REGIONS]), numbers, numbers, numbers, bodies)


instructions = st.recursive(leaves, lambda inner: inner | regions(inner), max_leaves=4)


def outcomes_of(
    check: Callable[..., str], seed: int, count: int, **strategies: st.SearchStrategy[Any]
) -> Counter[str]:
    """Call ``check`` with ``count`` random sets of arguments; count what it returns."""
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(**strategies)
    def counted(**arguments: Any) -> None:
        outcomes[check(**arguments)] += 1

    counted()
    return outcomes
