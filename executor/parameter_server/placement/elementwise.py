"""Check that an optimizer gives the same updates on a pytree and on the servers' flat arrays.

Servers hold parts of arrays, flattened, by dtype. Optimizers are tried in float64, where rounding
errors are far below the smallest change by a mask or a factor; scalars of an optimizer (a rate, a
power) may still be float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from executor.parameter_server.placement.layout import Array
from planner.errors import RequestError

EXACT = {"xla_backend_optimization_level": "0"}
"""Compiler options under which XLA:CPU does not fuse operations that then round differently."""

SIDE = 130
"""Side of the matrix that optimizers are tried on: factored ones do not factor sides below 128."""
LEAST = 2
"""Maximum number of elements that are tried in each dimension of a parameter."""
PUSHES = 13
"""Pushes that are tried: warmups begin with a rate of zero, and some optimizers accumulate
several pushes into one update."""
LOOSE = 1e-3
CLOSE = {np.float64: 1e-5, np.float32: LOOSE}
"""Relative tolerance between updates."""
KEEP = (
    "Apply that part to the gradients in the loop, before they are pushed, or let workers run the "
    "optimizer, on whole arrays: update_on='worker'"
)

Form = Callable[[Sequence[Array]], Any]
"""Builds a pytree from arrays."""


def check_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Try an optimizer on a matrix and a bias, and on their elements as servers may hold them.

    Raises:
        RequestError: the updates differ, also with a NaN in the gradients.
    """
    half = SIDE * (SIDE + 1) // 2

    def flat(arrays: Sequence[Array]) -> Array:
        return np.concatenate([*map(np.ravel, arrays)])

    def server(part: slice, arrays: Sequence[Array]) -> dict[str, Array]:
        return {"float32": flat(arrays)[part]}

    def check(floating: Any) -> None:
        values, pushed = _drawn([((SIDE, SIDE), np.float32), ((SIDE,), np.float32)], floating)
        pushed[9][0][0, 0] = np.nan
        whole = flat(_moved(optimizer, list, values, pushed))
        for part in (slice(half), slice(half, None)):
            moved = _moved(optimizer, partial(server, part), values, pushed)
            _compare(whole[part], moved[0], CLOSE[floating])

    _in_either(check)


def check_form(
    optimizer: optax.GradientTransformation, params: Any, tables: Mapping[str, Any]
) -> None:
    """Try an optimizer on the pytree of the parameters, with a few elements of each, and on the
    same elements as servers hold them.

    Args:
        optimizer: the optimizer that runs on servers.
        params: a pytree of arrays or ShapeDtypeStructs.
        tables: arrays or ShapeDtypeStructs of the tables, by name.

    Raises:
        RequestError: the updates differ, or the optimizer can't take one of the two.
    """
    leaves, form = jax.tree_util.tree_flatten(params)
    flat = partial(_flat, [str(x.dtype) for x in leaves])
    _in_either(partial(_try, optimizer, leaves, partial(jax.tree.unflatten, form), flat))
    for name, table in tables.items():
        named, rows = (lambda x, k=key: {k: x[0]} for key in (name, "rows"))
        _in_either(partial(_try, optimizer, [table], named, rows))


def runs_elementwise(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """Whether servers can run the optimizer, by the checks above."""
    try:
        check_elementwise(optimizer)
        check_form(optimizer, params, {})
    except RequestError:
        return False
    return True


class _RefusedError(RequestError):
    """An optimizer does not accept a pytree."""


def _in_either(check: Callable[[Any], None]) -> None:
    """Run a check in float64, or in float32 if the optimizer does not accept float64."""
    try:
        check(np.float64)
    except _RefusedError:
        try:
            check(np.float32)
        except _RefusedError as error:
            raise RequestError(str(error)) from error.__cause__


def _drawn(
    shapes: Sequence[tuple[Sequence[int], Any]], floating: Any
) -> tuple[list[Array], list[list[Array]]]:
    """Random values, and gradients of each push; floating-point dtypes become ``floating``."""
    draw = np.random.default_rng(0)

    def arrays(scale: float) -> list[Array]:
        drawn = (np.asarray(scale * draw.normal(size=s)) for s, _ in shapes)
        return [
            x.astype(floating if jax.numpy.issubdtype(d, np.inexact) else d)
            for x, (_, d) in zip(drawn, shapes, strict=True)
        ]

    return arrays(1), [arrays(100) for _ in range(PUSHES)]


def _flat(dtypes: Sequence[str], arrays: Sequence[Array]) -> dict[str, Array]:
    """Arrays as servers hold dense parameters: flat, by dtype, in the order of the pytree."""
    by_dtype: dict[str, list[Array]] = {}
    for dtype, x in zip(dtypes, arrays, strict=True):
        by_dtype.setdefault(dtype, []).append(x.ravel())
    return {dtype: np.concatenate(by_dtype[dtype]) for dtype in sorted(by_dtype)}


def _few(shape: Sequence[int]) -> list[int]:
    """The shape with at most ``LEAST`` per dimension; more than one element, unless a scalar."""
    few = [min(n, LEAST) for n in shape]
    return [*few[:-1], LEAST] if few and math.prod(few) == 1 else few


def _try(
    optimizer: optax.GradientTransformation,
    leaves: Sequence[Any],
    user: Form,
    served: Form,
    floating: Any,
) -> None:
    """Compare the updates of a few elements of these leaves in two pytrees."""
    if not leaves:
        return
    values, pushed = _drawn([(_few(x.shape), x.dtype) for x in leaves], floating)
    whole = served(_moved(optimizer, user, values, pushed))
    moved = _moved(optimizer, served, values, pushed)
    # XLA rounds differently what it compiles as a scalar, such as the rate of a schedule
    close = served([np.full(x.shape, LOOSE if x.size == 1 else CLOSE[floating]) for x in values])
    for one, other, within in zip(*map(jax.tree.leaves, (whole, moved, close)), strict=True):
        _compare(one, other, within)


def _moved(
    optimizer: optax.GradientTransformation,
    form: Form,
    values: Sequence[Array],
    pushed: Sequence[Sequence[Array]],
) -> list[Array]:
    """How far an optimizer moves each leaf of a pytree: the sum of its updates."""
    on, options = contextlib.nullcontext(), None
    with contextlib.suppress(RuntimeError):  # there is no CPU among JAX's platforms
        on, options = jax.default_device(jax.local_devices(backend="cpu")[0]), EXACT
    held = form(values)
    total = [np.zeros(np.shape(x)) for x in jax.tree.leaves(held)]
    try:
        with on, jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
            update = jax.jit(optimizer.update, compiler_options=options)
            state = optimizer.init(held)
            for gradients in pushed:
                updates, state = update(form(gradients), state, held)
                held = optax.apply_updates(held, updates)
                for at, x in zip(total, jax.tree.leaves(updates), strict=True):
                    at += np.asarray(x)
    except Exception as error:
        raise _RefusedError(
            "the optimizer can't take what servers hold, one flat array for each dtype, as well as "
            f"the tree of the parameters: {type(error).__name__}: {error}. {KEEP}"
        ) from error
    return total


def _compare(whole: Array, served: Array, close: Any) -> None:
    """Raises RequestError if updates differ by more than ``close`` times their size."""
    most = np.abs(whole[np.isfinite(whole)]).max(initial=0)
    near = np.abs(whole - served) <= close * (np.abs(whole) + 0.1 * most)
    if not np.all(near | (np.isnan(whole) & np.isnan(served))):
        raise RequestError(
            "the optimizer looks at several elements at once, as clip_by_global_norm does, or at "
            "names or shapes of arrays, as a mask that spares biases does: on servers, which hold "
            f"parts of arrays, flat, its updates would differ. {KEEP}"
        )
