"""The train step of mixed placement: some parameters are passed to each call, others are state."""

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
    """Which parameters are remote, that is, passed to each call.

    Attributes:
        form: tree structure of all parameters.
        paths: paths of all arrays.
        rows: indices of the arrays of which some rows are passed.
        whole: indices of the arrays that are passed whole.
    """

    form: Any
    paths: tuple[str, ...]
    rows: frozenset[int]
    whole: frozenset[int]

    @property
    def remote(self) -> frozenset[int]:
        """Indices of all remote arrays."""
        return self.rows | self.whole

    def rest(self, params: Any) -> Any:
        """The parameters with None in place of remote ones."""
        leaves = jax.tree_util.tree_leaves(params)
        local_leaves = [None if k in self.remote else x for k, x in enumerate(leaves)]
        return jax.tree_util.tree_unflatten(self.form, local_leaves)

    def named(self, params: Any, which: frozenset[int]) -> dict[str, Any]:
        """Some of the parameters by path."""
        leaves = jax.tree_util.tree_leaves(params)
        return {self.paths[k]: leaves[k] for k in sorted(which)}

    def joined(self, rest: Any, remote: Mapping[str, Any]) -> Any:
        """All parameters, joined from both parts."""
        local_leaves = iter(jax.tree_util.tree_leaves(rest))
        leaves = [
            remote[path] if k in self.remote else next(local_leaves)
            for k, path in enumerate(self.paths)
        ]
        return jax.tree_util.tree_unflatten(self.form, leaves)


def split_of(params: Any, rows: frozenset[str], whole: frozenset[str]) -> Split:
    """Split the parameters by their paths."""
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

    ``state`` has the local ``params`` and their ``opt``. ``remote`` has the remote arrays by path;
    of a table, rows [n, *width]. ``ids`` has the indices of these rows by path, int32 [n].
    ``gradients`` are those of ``remote``, with its structure. ``missing`` has, per path of a table,
    whether a row that was not passed is looked up (bool []). If so, state, loss and gradients are
    wrong.
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
    """The first local parameter whose update, by an optimizer of all parameters, depends on
    gradients or values of remote ones, as with a norm of all gradients. None if there is none, or
    if the optimizer does not take all parameters."""
    (shapes,) = abstract((params,))
    state = jax.eval_shape(optimizer.init, shapes)
    try:
        closed = jax.make_jaxpr(optimizer.update)(shapes, state, shapes)
    except Exception:  # for example, its mask covers only local parameters
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
    """Refuse an optimizer whose local updates depend on remote parameters; see ``looks_across``.

    Raises:
        RequestError: an update depends on them; names it.
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
