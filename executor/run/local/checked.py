"""Tests registered rules once on small random arrays: the parts must make up the whole."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planner import compat
from planner.errors import RequestError
from planner.rules.kernels.known import on_shards
from planner.rules.kernels.registered import Dims, Registered

log = logging.getLogger("meshwright")

UNITS = (2, 8, 128)
"""Sizes of dimensions to try, until the kernel accepts one."""
CLOSE = 2e-2
"""Maximum difference from rounding, relative to the largest result."""

_checked: set[tuple[str, str]] = set()

Kernel = Callable[[Sequence[Any], Sequence[tuple[int, ...]]], list[Any]]


def check_rule(rule: Registered, eqn: Any) -> None:
    """Test a registered rule on small arrays, once.

    Args:
        rule: the registered rule.
        eqn: a call that the rule applies to.

    Raises:
        RequestError: results differ where the call is split along a dimension of the rule.
    """
    if (rule.name, rule.text) in _checked:
        return
    run = _runner(rule, eqn)
    for letter in rule.letters:
        problem = "it takes no small arrays"
        for unit in UNITS:
            try:
                with jax.ensure_compile_time_eval():
                    apart = _difference(rule, eqn, run, letter, unit)
            except Exception as error:  # a kernel may refuse sizes, or this backend
                problem = str(error).strip().partition("\n")[0][:120]
                continue
            if not apart <= CLOSE:
                raise RequestError(
                    f"register_rule({rule.name!r}, {rule.text!r}): splitting {letter} changes the "
                    f"results, by {apart:.2g} of the largest (two parts of {unit} each, random "
                    f"numbers); put {letter} into whole="
                )
            break
        else:
            log.warning(
                "register_rule(%r, %r): %s could not be checked here: %s",
                *(rule.name, rule.text, letter, problem),
            )
    _checked.add((rule.name, rule.text))


def _runner(rule: Registered, eqn: Any) -> Kernel:
    """A function that runs the kernel on arrays of any size, for results of given shapes."""
    if rule.local is not None:
        local = rule.local
        return lambda arrays, outs: jax.tree.leaves(local(*arrays))

    def run(arrays: Sequence[Any], outs: Sequence[tuple[int, ...]]) -> list[Any]:
        params = on_shards(eqn, [x.shape for x in arrays], outs, frozenset())
        return compat.evaluate_equation(eqn.replace(params=params), arrays)

    return run


def _difference(rule: Registered, eqn: Any, run: Kernel, letter: str, unit: int) -> float:
    """The largest difference between two parts and the whole, relative to the largest result."""
    every = {x for dims in (*rule.operands, *rule.results) for dim in dims for x in dim}
    half = dict.fromkeys(every, unit)
    for dims in (*rule.operands, *rule.results):
        for dim in dims:  # letters major to the split one have size 1
            if letter in dim:
                half.update(dict.fromkeys(dim[: dim.index(letter)], 1))
    whole = {**half, letter: 2 * half[letter]}
    ones = [compat.aval_shape(v.aval) for v in (*eqn.invars, *eqn.outvars)]
    sides = (*rule.operands, *rule.results)

    def shapes(sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        out = []
        for dims, shape in zip(sides, ones, strict=True):
            pairs = zip(dims, shape, strict=True)
            out.append(tuple(math.prod(sizes[x] for x in dim) if dim else n for dim, n in pairs))
        return out

    count = len(eqn.invars)
    draw = np.random.default_rng(0)
    dtypes = [v.aval.dtype for v in eqn.invars]
    arrays = [_random(draw, s, t) for s, t in zip(shapes(whole)[:count], dtypes, strict=True)]
    want = run(arrays, shapes(whole)[count:])
    parts = []
    for k in range(2):
        halves = [_half(x, dims, letter, k) for x, dims in zip(arrays, rule.operands, strict=True)]
        parts.append(run(halves, shapes(half)[count:]))
    apart = 0.0
    for n, dims in enumerate(rule.results):
        at = next((d for d, dim in enumerate(dims) if letter in dim), None)
        pair = [np.asarray(p[n], np.float64) for p in parts]
        expected = np.asarray(want[n], np.float64)
        joined = pair[0] if at is None else np.concatenate(pair, at)
        size = max(float(np.max(np.abs(expected), initial=0.0)), 1e-30)
        wrong = np.where(np.isnan(joined) & np.isnan(expected), 0.0, np.abs(joined - expected))
        apart = max(apart, float(np.max(wrong, initial=0.0)) / size)
        if np.isnan(wrong).any():
            return math.inf
    return apart


def _half(x: Any, dims: Dims, letter: str, k: int) -> Any:
    """Half ``k`` of an operand along a letter; an operand without the letter stays whole."""
    at = next((d for d, dim in enumerate(dims) if letter in dim), None)
    return x if at is None else jnp.split(x, 2, at)[k]


def _random(draw: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(draw.normal(size=shape), dtype)
    return jnp.asarray(draw.integers(0, 2, size=shape)).astype(dtype)
