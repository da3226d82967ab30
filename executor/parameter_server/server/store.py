"""The values and optimizer state of a server, without clocks or waits.

The optimizer runs on flat arrays. In synchronous training the same sums give the same bits however
parameters are cut, for two reasons. The compiler does not fuse products and sums: an FMA rounds
once where the two operations round twice, and fusion would depend on the shapes of the arrays. And
there are always two arrays: what only one array needs, such as the power in Adam's bias correction,
is computed within that array's loop, with another approximation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from executor.parameter_server.placement.elementwise import EXACT
from executor.parameter_server.placement.layout import Array, Flat
from executor.parameter_server.server.tables import Tables, scaled_update, summed
from executor.parameter_server.transport.codec import Coded, decode
from executor.parameter_server.transport.wire import rounded_to
from executor.parameter_server.worker.replica import MEANS
from planner.errors import RequestError

VALUES, STATE, TABLES = "values/", "state/", "tables/"
"""Prefixes of the names of dumped arrays."""
BLOCK = 2**16
"""Elements that are summed at a time."""
ROUNDED = frozenset({"float32", "float64"})
"""Dtypes whose sums XLA rounds after each addition; it may add narrower ones in a wider dtype."""

OTHER = "the folder holds the state of another optimizer: use that optimizer, or another folder"

SECOND = "second"
"""Name of an array of one element that serves only as a second array."""


@dataclass(frozen=True)
class Pushed:
    """A worker's push to one server.

    Attributes:
        dense: gradients of the server's flat arrays, by dtype.
        rows: for each table, numbers of its rows on this server, and their gradients; a table that
            is named without rows counts as updated.
        coded: compressed gradients that are not in ``dense``, by dtype.
        seen: number of updates in the values that the gradients are of; None: the last values read.
        ahead: number of pushes before the one that is computed from the values read with this one.
        dtype: dtype in which the values read with this push are sent, where theirs is wider.
    """

    dense: Mapping[str, Array] = field(default_factory=dict)
    rows: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    coded: Mapping[str, Coded] = field(default_factory=dict)
    seen: int | None = None
    ahead: int = 0
    dtype: str | None = None

    def decoded(self) -> Pushed:
        """This push with all gradients decoded."""
        if not self.coded:
            return self
        dense = {**self.dense, **{d: decode(x) for d, x in self.coded.items()}}
        return replace(self, dense=dense, coded={})


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts", "count"], meta_fields=[])
@dataclass(frozen=True)
class Mean:
    """Flat arrays to be summed from the first on, and divided, within the update. That takes one
    pass over them and the values instead of three memory-bound ones."""

    parts: Sequence[Any]
    count: Any


def _dense(pushes: Sequence[Pushed]) -> dict[str, Any]:
    """Flat gradients of one push, or the mean of several (as a ``Mean`` or computed); arrays that a
    push omits count as zero."""
    if len(pushes) == 1:
        return dict(pushes[0].dense)
    gradients: dict[str, Any] = {}
    for name in dict.fromkeys(name for push in pushes for name in push.dense):
        parts = [push.dense[name] for push in pushes if name in push.dense]
        if name in ROUNDED and len(pushes).bit_count() == 1:
            gradients[name] = Mean(parts, parts[0].dtype.type(len(pushes)))
        else:  # XLA would multiply by the reciprocal
            gradients[name] = _mean(parts, len(pushes))
    return gradients


def _mean(parts: Sequence[Array], count: int) -> Array:
    """The sum of flat arrays divided by ``count``, in blocks that stay in the processor's cache."""
    room = np.empty(parts[0].nbytes + 64, np.uint8)  # XLA:CPU reads multiples of 64 in place
    begin = -room.ctypes.data % 64
    average: Array = room[begin : begin + parts[0].nbytes].view(parts[0].dtype)
    for begin in range(0, average.size, BLOCK):
        out = average[begin : begin + BLOCK]
        out[...] = parts[0][begin : begin + BLOCK]
        for part in parts[1:]:
            out += part[begin : begin + BLOCK]
        np.divide(out, count, out=out, casting="unsafe")
    return average


def _rows(pushes: Sequence[Pushed]) -> Mapping[str, tuple[Array, Array]]:
    """Rows of one push, or the mean of those of several."""
    if len(pushes) == 1:
        return pushes[0].rows
    rows: dict[str, tuple[Array, Array]] = {}
    for name in sorted({name for push in pushes for name in push.rows}):
        parts = [push.rows[name] for push in pushes if name in push.rows]
        ids, total = summed(*(np.concatenate(x) for x in zip(*parts, strict=True)))
        rows[name] = (ids, (total / len(pushes)).astype(total.dtype))
    return rows


def _form(leaf: Any) -> tuple[Any, ...]:
    """Shape and dtype of a leaf of optimizer state, except for the floating-point precision."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.shape, "floating" if floating else leaf.dtype


def _forms(optimizer: optax.GradientTransformation | None, values: Any) -> list[set[Any]]:
    """The forms of the leaves of optimizer state, initially and after an update. After it, momentum
    of integers is floating-point, and under ``inject_hyperparams`` that of bfloat16 is float32."""
    if optimizer is None:
        return []
    first = jax.eval_shape(optimizer.init, values)
    _, then = jax.eval_shape(optimizer.update, values, first, values)
    leaves, later = jax.tree.leaves(first), jax.tree.leaves(then)
    if len(leaves) != len(later):
        raise RequestError(
            f"the optimizer's state has {len(leaves)} arrays at first and {len(later)} after an "
            "update: it can't be kept in snapshots or copies"
        )
    return [{_form(x), _form(y)} for x, y in zip(leaves, later, strict=True)]


def without_prefix(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The dumped arrays whose names begin with ``prefix``, under the names without it."""
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}


def states(arrays: Mapping[str, Array]) -> list[str]:
    """The names of dumped leaves of optimizer state, in order."""
    return [f"{STATE}{k}" for k in sorted(map(int, without_prefix(arrays, STATE)))]


@functools.lru_cache(maxsize=64)
def _update(
    optimizer: optax.GradientTransformation | None, *, exact: bool, donate: bool
) -> Callable[..., Any]:
    """The jitted update; all stores of an optimizer share it, so that it is compiled once."""

    def mean(gradient: Any) -> Any:
        if not isinstance(gradient, Mean):
            return gradient
        return functools.reduce(jnp.add, gradient.parts) / gradient.count

    def updated(values: Any, state: Any, pushed: Any, scale: Any) -> Any:
        pushed = {name: mean(x) for name, x in pushed.items()}
        if optimizer is None:
            updates = pushed
        else:
            updates, state = optimizer.update(pushed, state, values)
        updates = jax.tree.map(lambda u: scaled_update(u, scale, jnp), updates)
        return optax.apply_updates(values, updates), state

    return jax.jit(
        updated,
        donate_argnums=(0, 1) if donate else (),
        compiler_options=EXACT if exact else None,
    )


def _made(
    optimizer: optax.GradientTransformation | None, *, exact: bool, donate: bool
) -> Callable[..., Any]:
    try:
        return _update(optimizer, exact=exact, donate=donate)
    except TypeError:  # an unhashable optimizer
        return _update.__wrapped__(optimizer, exact=exact, donate=donate)


class Store:
    """Values and optimizer state of one server. Not thread-safe: the caller has to hold a lock.

    Args:
        optimizer: applied to the pushed gradients; None adds what is pushed to the values.
        exact: updates do not depend on how arrays are cut, to the last bit.
    """

    def __init__(self, optimizer: optax.GradientTransformation | None, *, exact: bool) -> None:
        self.optimizer = optimizer
        self.values: dict[str, jax.Array] | None = None
        self.state: Any = None
        self.exact = exact
        self._update = _made(optimizer, exact=exact, donate=True)
        second = {SECOND: np.zeros(1, np.float32)} if exact else {}
        self.tables = Tables(optimizer, _made(optimizer, exact=exact, donate=False), second)

    def init(self, values: Mapping[str, Array], tables: Mapping[str, Array] | None = None) -> None:
        """Set the first values and the first rows of tables."""
        self.tables.init(tables or {})
        self.values = {d: jnp.array(x) for d, x in values.items()}
        if self.exact:
            self.values[SECOND] = jnp.zeros(1)
        state = None if self.optimizer is None else self.optimizer.init(self.values)
        self.state = jax.tree.map(jnp.array, state)  # it may be the values themselves

    @property
    def averages(self) -> bool:
        """Whether workers run the updates, with the means that they read here."""
        return bool(self.optimizer == MEANS)

    def check(self, pushed: Pushed) -> None:
        """Raises RequestError for gradients with other dtypes or shapes than the values."""
        for dtype, x in pushed.dense.items():
            held = (self.values or {}).get(dtype)
            if held is None or held.shape != x.shape:
                raise RequestError(
                    f"push: got {dtype}{list(x.shape)}, the server holds "
                    f"{'none' if held is None else list(held.shape)}"
                )

    def apply(self, *pushes: Pushed, scale: float = 1.0) -> None:
        """Make one update with the mean of the pushes, summed in the order that the caller gives.
        The optimizer's update is multiplied by ``scale``."""
        dense = _dense(pushes)
        if dense:
            if self.exact:
                dense[SECOND] = np.zeros(1, np.float32)
            self.values, self.state = self._update(self.values, self.state, dense, scale)
        self.tables.apply(_rows(pushes), scale)

    def read(self, dtype: str | None = None) -> Flat:
        """What workers pull: the flat values, or the last mean if workers run the updates; rounded
        to ``dtype`` where theirs is wider. While a reader holds them, the next update uses other
        memory."""
        held = self.state if self.averages else self.values
        if dtype is None:
            return self._flat(held)
        return rounded_to({d: x for d, x in (held or {}).items() if d != SECOND}, dtype)

    def last(self) -> Flat:
        """The flat values, for callers other than workers."""
        return self._flat(self.values)

    def end(self, values: Flat) -> None:
        """Set the final values, from workers that ran the updates."""
        self.values = {**(self.values or {}), **{d: jnp.array(x) for d, x in values.items()}}

    def _flat(self, held: Mapping[str, Any] | None) -> Flat:
        return {d: np.asarray(x) for d, x in (held or {}).items() if d != SECOND}

    def dump(self) -> dict[str, Array]:
        """Copies of all arrays, by name; ``load`` restores them."""
        leaves = jax.tree.leaves(self.state)
        arrays = {f"{VALUES}{d}": np.array(x) for d, x in (self.values or {}).items()}
        arrays |= {f"{STATE}{k}": np.array(x) for k, x in enumerate(leaves)}
        return arrays | {f"{TABLES}{name}": x for name, x in self.tables.dump().items()}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Restore the result of ``dump``.

        Raises:
            RequestError: it is of another optimizer.
        """
        self.tables.load(without_prefix(arrays, TABLES))
        self.values = {name: jnp.array(x) for name, x in without_prefix(arrays, VALUES).items()}
        leaves = [jnp.array(arrays[key]) for key in states(arrays)]
        forms = _forms(self.optimizer, self.values)
        if len(leaves) != len(forms) or any(_form(x) not in f for x, f in zip(leaves, forms)):  # noqa: B905
            raise RequestError(OTHER)
        form = None if self.optimizer is None else jax.eval_shape(self.optimizer.init, self.values)
        self.state = jax.tree.unflatten(jax.tree.structure(form), leaves)
