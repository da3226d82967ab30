"""Servers hold parts of arrays, flat, by dtype: which optimizers do there as they do on a tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from executor.parameter_server.layout import Array
from planner.errors import RequestError

SIDE = 130
"""Of the matrix that optimizers are tried on: factored ones leave those below 128 whole."""
LEAST = 2
"""Of a parameter as many in each dimension are tried."""
KEEP = (
    "Apply that part to the gradients in the loop, before they are pushed, or let workers run the "
    "optimizer, on whole arrays: update_on='worker'"
)


def check_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Try an optimizer on a matrix and a bias, and on their elements as servers may hold them.

    Raises:
        RequestError: the updates differ, also where an element is not a number.
    """
    draw = np.random.default_rng(0)
    shapes = ((SIDE, SIDE), (SIDE,))
    values, *pushed = (
        [scale * draw.normal(size=shape).astype(np.float32) for shape in shapes]
        for scale in (1, 100, 100, 100)
    )
    pushed[-1][0][0, 0] = np.nan
    size = SIDE * (SIDE + 1)
    edges = (0, 5, SIDE * 7, size)

    def whole(arrays: Sequence[Array]) -> dict[str, Array]:
        return {"w": arrays[0], "x": arrays[1]}

    def server(begin: int, end: int) -> Array:
        def part(arrays: Sequence[Array]) -> dict[str, Array]:
            return {"float32": np.concatenate([*map(np.ravel, arrays)])[begin:end]}

        return _after(optimizer, part, values, pushed)

    expected = _after(optimizer, whole, values, pushed)
    _compare(expected, server(0, size))
    _compare(expected, np.concatenate([server(*e) for e in itertools.pairwise(edges)]))


def check_form(
    optimizer: optax.GradientTransformation, params: Any, tables: Mapping[str, Any]
) -> None:
    """Try an optimizer on the tree of the parameters, a few elements of each, and on the same
    elements as servers hold them.

    Args:
        optimizer: that is to run on servers.
        params: a pytree of arrays or ShapeDtypeStructs.
        tables: the same, by name.

    Raises:
        RequestError: the updates differ, or one of the two it can't take.
    """
    leaves, form = jax.tree_util.tree_flatten(params)
    _try(optimizer, leaves, partial(jax.tree.unflatten, form), _flat)
    for name, table in tables.items():
        named, rows = (lambda x, k=key: {k: x[0]} for key in (name, "rows"))
        _try(optimizer, [table], named, rows)


def is_elementwise(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """Whether servers could run it: what the checks above say."""
    try:
        check_elementwise(optimizer)
        check_form(optimizer, params, {})
    except RequestError:
        return False
    return True


def _flat(arrays: Sequence[Array]) -> dict[str, Array]:
    """As servers hold dense parameters, in the order of the tree within each dtype."""
    found: dict[str, list[Array]] = {}
    for x in arrays:
        found.setdefault(str(x.dtype), []).append(x.ravel())
    return {dtype: np.concatenate(parts) for dtype, parts in found.items()}


def _try(
    optimizer: optax.GradientTransformation,
    leaves: Sequence[Any],
    user: Callable[[Sequence[Array]], Any],
    served: Callable[[Sequence[Array]], Any],
) -> None:
    """Compare an update of a few elements of these leaves in two trees."""
    if not leaves:
        return
    draw = np.random.default_rng(0)
    values, gradients = (
        [
            np.asarray(draw.uniform(0.5, 1.5, [min(n, LEAST) for n in x.shape])).astype(x.dtype)
            for x in leaves
        ]
        for _ in range(2)
    )
    found = _after(optimizer, served, values, [gradients])
    by_dtype = _flat(jax.tree.leaves(_tree_after(optimizer, user, values, [gradients])))
    _compare(np.concatenate([by_dtype[d].astype(np.float32) for d in sorted(by_dtype)]), found)


def _after(
    optimizer: optax.GradientTransformation,
    form: Callable[[Sequence[Array]], Any],
    values: Sequence[Array],
    pushed: Sequence[Sequence[Array]],
) -> Array:
    """All elements of the values after the updates, in the order of the form."""
    held = jax.tree.leaves(_tree_after(optimizer, form, values, pushed))
    return np.concatenate([np.ravel(x).astype(np.float32) for x in held])


def _tree_after(
    optimizer: optax.GradientTransformation,
    form: Callable[[Sequence[Array]], Any],
    values: Sequence[Array],
    pushed: Sequence[Sequence[Array]],
) -> Any:
    held = form(values)
    try:
        state = optimizer.init(held)
        for gradients in pushed:
            updates, state = optimizer.update(form(gradients), state, held)
            held = optax.apply_updates(held, updates)
    except Exception as error:
        raise RequestError(
            "the optimizer can't take what servers hold, one flat array for each dtype, as well as "
            f"the tree of the parameters: {type(error).__name__}: {error}. {KEEP}"
        ) from error
    return held


def _compare(whole: Array, served: Array) -> None:
    if not np.allclose(whole, served, rtol=1e-5, atol=1e-7, equal_nan=True):
        raise RequestError(
            "the optimizer looks at several elements at once, as clip_by_global_norm does, or at "
            "names or shapes of arrays, as a mask that spares biases does: on servers, which hold "
            f"parts of arrays, flat, its updates would differ. {KEEP}"
        )
