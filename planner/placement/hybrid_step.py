"""The train step of mixed placement: some parameters come with every call, others are its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from planner.errors import RequestError
from planner.graph.jaxpr.depends import NONE, depends
from planner.graph.lookups.rows import on_rows
from planner.graph.lookups.tables import LookUps
from planner.graph.trace import abstract


@dataclass(frozen=True)
class Split:
    """Which parameters come with every call.

    Attributes:
        form: of all parameters.
        paths: of all arrays.
        rows: numbers of the arrays of which rows come.
        whole: numbers of those that come whole.
    """

    form: Any
    paths: tuple[str, ...]
    rows: frozenset[int]
    whole: frozenset[int]

    @property
    def remote(self) -> frozenset[int]:
        """Numbers of all that come."""
        return self.rows | self.whole

    def rest(self, params: Any) -> Any:
        """The parameters without those that come: None stands for them."""
        leaves = jax.tree_util.tree_leaves(params)
        local_leaves = [None if k in self.remote else x for k, x in enumerate(leaves)]
        return jax.tree_util.tree_unflatten(self.form, local_leaves)

    def named(self, params: Any, which: frozenset[int]) -> dict[str, Any]:
        """Some of the parameters by path."""
        leaves = jax.tree_util.tree_leaves(params)
        return {self.paths[k]: leaves[k] for k in sorted(which)}

    def joined(self, rest: Any, remote: Mapping[str, Any]) -> Any:
        """The parameters again, of both parts."""
        local_leaves = iter(jax.tree_util.tree_leaves(rest))
        leaves = [
            remote[path] if k in self.remote else next(local_leaves)
            for k, path in enumerate(self.paths)
        ]
        return jax.tree_util.tree_unflatten(self.form, leaves)


def split_of(params: Any, rows: frozenset[str], whole: frozenset[str]) -> Split:
    """The parameters split by their paths."""
    named, form = jax.tree_util.tree_flatten_with_path(params)
    paths = tuple(jax.tree_util.keystr(path) for path, _ in named)
    return Split(
        form,
        paths,
        frozenset(k for k, path in enumerate(paths) if path in rows),
        frozenset(k for k, path in enumerate(paths) if path in whole),
    )


def hybrid_step(lookups: LookUps, split: Split, optimizer: Any) -> Callable[..., Any]:
    """``(state, remote, ids, *batch) -> (state, {"loss", "gradients", "missing"})``.

    ``state`` has ``params`` and ``opt`` of what stays here; ``remote`` what comes, by path, of
    tables their rows [n, *width]; ``ids`` the rows' numbers, int32 [n], by path. ``gradients`` are
    those of ``remote``, in its form. ``missing`` says by path of a table whether a row that did
    not come was looked up (bool []); state, loss and gradients are wrong then.
    """
    small = on_rows(lookups, split.form)

    def step(state: Any, remote: Any, ids: Any, *batch: Any) -> Any:
        import optax

        def loss(rest: Any, remote: Any) -> Any:
            return small(split.joined(rest, remote), ids, *batch)

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, missing), (here, away) = both(state["params"], remote)
        updates, opt = optimizer.update(here, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        outputs = {"loss": value, "gradients": away, "missing": missing}
        return {"params": params, "opt": opt}, outputs

    return step


def looks_across(split: Split, optimizer: Any, params: Any) -> str | None:
    """The first parameter that stays here whose update, by an optimizer of all parameters, depends
    on gradients or values of those that come, as with a norm of all gradients; None if there is
    none, or the optimizer does not take all parameters."""
    (shapes,) = abstract((params,))
    state = jax.eval_shape(optimizer.init, shapes)
    try:
        closed = jax.make_jaxpr(optimizer.update)(shapes, state, shapes)
    except Exception:  # its mask, for one, is of what stays here alone
        return None
    count = len(split.paths)
    away = [k in split.remote for k in range(count)]
    before = [False] * len(jax.tree_util.tree_leaves(state))
    while True:
        marks = [frozenset({0}) if mark else NONE for mark in (*away, *before, *away)]
        touched = [bool(names) for names in depends(closed, marks)]
        updates, after = touched[:count], touched[count:]
        if after == before or len(after) != len(before):
            break
        before = [a or b for a, b in zip(after, before, strict=True)]
    pairs = zip(split.paths, updates, away, strict=False)
    return next((path for path, looks, gone in pairs if looks and not gone), None)


def check_across(split: Split, optimizer: Any, params: Any) -> None:
    """Refuse an optimizer of all parameters that needs those that come; see ``looks_across``.

    Raises:
        RequestError: names an update that depends on them.
    """
    if split.remote and (path := looks_across(split, optimizer, params)):
        raise RequestError(
            f"optimizer: the update of {path} depends on other arrays, as with "
            f"clip_by_global_norm, and some of these are on servers "
            f"({split.paths[min(split.remote)]}), so that it would be another than that of a run "
            "without servers; clip each array or element (optax.clip_by_block_rms, optax.clip), "
            "use optax.masked for that part of the optimizer, to have it look at what stays here "
            "alone, or keep all parameters here (placement={'': 'spmd'})"
        )


def step_args(
    split: Split, optimizer: Any, params: Any, sizes: Mapping[str, int], batch: Sequence[Any]
) -> tuple[Any, ...]:
    """Shapes of the arguments of ``hybrid_step``'s step, with ``sizes`` rows of each table."""
    (shapes,) = abstract((params,))
    rest = split.rest(shapes)
    state = {"params": rest, "opt": jax.eval_shape(optimizer.init, rest)}
    remote = split.named(shapes, split.whole)
    for path, table in split.named(shapes, split.rows).items():
        remote[path] = jax.ShapeDtypeStruct((sizes[path], *table.shape[1:]), table.dtype)
    at = [split.paths[k] for k in sorted(split.rows)]
    ids = {path: jax.ShapeDtypeStruct((sizes[path],), jax.numpy.int32) for path in at}
    return state, remote, ids, *abstract(batch)
