"""Mixed placement, like MindSpore's ``set_param_ps``: tables on parameter servers, by rows, and the
rest under SPMD on the devices of this process or of all workers (``joined``).

A call determines the rows that its batch uses, pulls them, runs one planned step (loss, gradients,
and the optimizer's update of the SPMD parameters), and pushes the rows' gradients.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from executor.parameter_server.jobs import joined
from executor.processes.bootstrap import agree
from executor.run.compile import CompiledStep
from executor.run.mesh import detect_cluster, spread
from planner.errors import RequestError
from planner.graph.lookups.rows import Ids, padded, unique_rows
from planner.graph.lookups.tables import LookUps, find_lookups
from planner.graph.trace import abstract
from planner.placement.case import AUTO, PS, WHOLE, parse_placement
from planner.placement.choice import Placement, place_and_plan, placement_request, plan_hybrid
from planner.placement.hybrid_step import Split, split_of
from planner.plan.plan import Plan
from planner.request.options import Options, takes_options
from planner.request.parsed import Request

_DEVICES = threading.Lock()
"""Held while the devices compute: otherwise the programs of two workers that are threads of one
process could deadlock, each on some of the devices."""


class Hybrid:
    """A training run with some of its parameters on servers; call it with a batch.

    Create one with ``hybrid``.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Any,
        optimizer: Any,
        server: Any,
        placement: str | Mapping[str, str],
        request: Request,
    ) -> None:
        parse_placement(placement)
        self._parts = joined.JoinedParts() if joined.check_joined(server) > 1 else None
        if self._parts is not None and self._parts.devices != request.cluster.num_devices:
            raise RequestError(
                f"cluster of {request.cluster.num_devices} devices, and {self._parts.devices} are "
                "joined: expected as many, or no cluster="
            )
        self.loss, self.optimizer, self.server = loss, optimizer, server
        self._asked, self._request = placement, request
        self._shapes = abstract((params,))[0]
        self._params: Any = params
        self._state: Any = None
        self._placed: tuple[Placement, Split] | None = None
        self._whole: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._found: dict[Any, tuple[LookUps, Any, tuple[bool, ...]]] = {}
        self._steps: dict[Any, CompiledStep] = {}
        self._current: CompiledStep | None = None

    @property
    def placement(self) -> Placement:
        """Where the parameters lie, and why; raises RequestError before the first call."""
        return self._where[0]

    @property
    def plan(self) -> Plan:
        """The plan in use for the SPMD parameters; raises RequestError before the first call."""
        return self.placement.plan if self._current is None else self._current.plan

    @property
    def params(self) -> Any:
        """The SPMD parameters, in the full pytree with None for the others. The next call donates
        them."""
        return self._params if self._state is None else self._state["params"]

    @property
    def state(self) -> Any:
        """The SPMD state, ``{"params", "opt"}``, as arrays on the devices: save it, and set it to
        resume a run. The next call donates it, also a state that was set: copy what you need later.
        Raises RequestError before ``begin``."""
        _ = self._where
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        _ = self._where
        self._state = _fitting(state, self._state)

    def begin(self, *batch: Any) -> int:
        """Place the parameters, and read the state of the servers; the first call also does this.

        Args:
            batch: a batch with the shapes of the training batches.

        Returns:
            Number of steps of an earlier run that the servers' values include; 0 for a new run.

        Raises:
            RequestError, WaitError: as for a call.
        """
        self._asked_of(batch)
        return int(self.server.clock)

    def __call__(self, *batch: Any) -> jax.Array:
        """Run one step; returns the loss before its update.

        Args:
            batch: with joined devices, the whole batch, as the same NumPy arrays in every process
                or as arrays over all processes.

        Raises:
            RequestError: a table can't have the requested placement; parameters are on servers
                that have no optimizer; the optimizer of the SPMD parameters depends on gradients
                of those on servers, too (``clip_by_global_norm``); the batch has an index outside
                a table that is looked up by ``table[ids]``; ids computed from floating-point
                numbers are rounded differently in the step than before it (nothing is pushed then,
                but the step may have donated the SPMD state: resume from a saved one); or joined
                processes have different batches.
            WaitError: the servers did not answer in time.
        """
        step, ids, room = self._asked_of(batch)
        remote = {**self._whole, **self._pulled(ids, step)}
        with _DEVICES:
            state, out = step(self._state, remote, room, *batch)
            self._check_there(jax.block_until_ready(out)["missing"], batch)
            self._state = state
            gradients = self._here(out["gradients"])
        self._push(ids, gradients)
        loss: jax.Array = out["loss"]
        return loss

    def _asked_of(self, batch: Sequence[Any]) -> tuple[CompiledStep, dict[str, Ids], Any]:
        """The step for a batch, the row ids that the batch uses, and those ids with padding."""
        shapes = _key(batch)
        if shapes not in self._found:
            new_lookups = find_lookups(self.loss, self._shapes, batch)
            wanted = joined.needed(new_lookups.indices, abstract(batch))
            self._found[shapes] = new_lookups, jax.jit(new_lookups.indices), wanted
        lookups, indices, wanted = self._found[shapes]
        if self._parts is not None:
            joined.check_same(batch)
        with jax.default_device(_host()):
            index = jax.device_get(indices(*joined.on_host(batch, wanted)))
        tables = {t.path: t for t in (*lookups.tables, *lookups.unused)}
        batch_ids = {t.path: unique_rows(t, x) for t, x in zip(lookups.tables, index, strict=True)}
        begins = self._placed is None
        if begins:
            self._begin(lookups, batch_ids, batch)
        served = self.placement.at(PS)
        if missing := sorted(served - set(tables)):
            raise RequestError(
                f"{missing[0]} is on servers, by rows, and with a batch of these shapes it can't "
                f"be: {lookups.refused[missing[0]]}"
            )
        ids = {
            p: batch_ids[p] if p in batch_ids else unique_rows(tables[p], ())
            for p in sorted(served)
        }
        room = {p: padded(x, tables[p].rows, self._sizes[p]) for p, x in ids.items()}
        self._sizes.update({path: len(x) for path, x in room.items()})
        with _DEVICES:
            step = self._step(lookups, batch, shapes)
            if begins:
                self._state = jax.tree.map(spread, self._state, step.in_shardings[0])
        return step, ids, room

    def _check_there(self, missing: Mapping[str, jax.Array], batch: Sequence[Any]) -> None:
        """Raises RequestError if the step looked up rows that were not pulled."""
        lost = sorted(path for path, flag in missing.items() if bool(flag))
        if not lost:
            return
        tables = {t.path: t for t in self._found[_key(batch)][0].tables}
        lines = ", ".join(dict.fromkeys(filter(None, tables[lost[0]].sources)))
        raise RequestError(
            f"{lost[0]}: a lookup{f' at {lines}' if lines else ''} has another index in the step "
            "than when its rows were pulled, so its row is not there: indices that come from "
            "floating-point arithmetic are rounded otherwise in another program. Nothing was "
            "pushed; compute the ids before the step, and give them as integers in the batch"
        )

    @property
    def _where(self) -> tuple[Placement, Split]:
        if self._placed is None:
            raise RequestError("the parameters are placed at the first call: call it once")
        return self._placed

    def _begin(self, lookups: LookUps, batch_ids: Mapping[str, Ids], batch: Sequence[Any]) -> None:
        """Place the parameters, and initialize those on servers."""
        self._sizes = {path: len(padded(x, 0)) for path, x in batch_ids.items()}
        counts = {path: len(x) for path, x in batch_ids.items()}
        args = (lookups, self._shapes, batch, self.optimizer, self._asked, self._request)
        with _DEVICES:
            placement = place_and_plan(*args, asked_for=counts, sizes=self._sizes)[0]
        split = split_of(self._shapes, placement.at(PS), placement.at(WHOLE))
        if split.remote and self.server.optimizer is None:
            served = split.paths[min(split.remote)]
            raise RequestError(
                f"{served} is on servers, and train() has no optimizer=: servers would add the "
                "gradients; pass train(..., optimizer=...), which may be another than hybrid's"
            )
        rest = split.rest(self._params)
        alone = self._parts is None and self.server.num_workers > 1
        if alone and jax.tree_util.tree_leaves(rest):
            spmd_path = next(p for k, p in enumerate(split.paths) if k not in split.remote)
            raise RequestError(
                f"there are {self.server.num_workers} workers, each with devices of its own, and "
                f"{spmd_path} is under SPMD: every worker would train another copy of it; make "
                "their devices one mesh (join_devices(server), first in the loop), place the rest "
                "on the servers, too ({..., '': 'ps_whole'}), or use one worker"
            )
        first = self._params if self.server.rank == 0 else self._shapes
        tables, whole = (
            {path: self._first(x) for path, x in split.named(first, which).items()}
            for which in (split.rows, split.whole)
        )
        self._whole = self.server.init(whole, tables=tables)
        if self._parts is not None:
            joined.check_clock(self.server)
        self._state = {"params": rest, "opt": self.optimizer.init(rest)}
        self._placed, self._params = (placement, split), None

    def _first(self, x: Any) -> Any:
        """An initial value in JAX's canonical dtype (by default without 64 bits); or a shape."""
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        return x if is_shape else np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))

    def _part(self, path: str, ids: Ids) -> Ids:
        """The rows of a table that this process pulls and pushes."""
        return ids if self._parts is None else ids[self._parts.mine(self._sizes[path])]

    def _pulled(self, ids: Mapping[str, Ids], step: CompiledStep) -> dict[str, Any]:
        """The pulled rows, padded with zeros to the size of the step."""
        local_ids = {path: self._part(path, x) for path, x in ids.items()}
        out: dict[str, Any] = {}
        for path, values in (self.server.pull_rows(local_ids) if ids else {}).items():
            size = self._sizes[path]
            if self._parts is not None:
                out[path] = self._parts.join(values, size, step.in_shardings[1][path])
                continue
            out[path] = np.zeros((size, *values.shape[1:]), values.dtype)
            out[path][: len(values)] = values
        return out

    def _here(self, gradients: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Gradients in this process's memory; of rows, this process's part."""
        parts = self._parts
        if parts is None:
            host_gradients: dict[str, Any] = jax.device_get(gradients)
            return host_gradients
        whole = {path: x for path, x in gradients.items() if path in self._whole}
        rows = {path: parts.part(x) for path, x in gradients.items() if path not in whole}
        return {**parts.everywhere(whole), **rows}

    def _push(self, ids: Mapping[str, Ids], gradients: Mapping[str, Any]) -> None:
        rows = {}
        for path, x in ids.items():
            local_ids = self._part(path, x)
            change = gradients[path][: len(local_ids)]
            if self._parts is not None:  # servers average, and one process pushes each row
                change = change * np.asarray(self._parts.count, change.dtype)
            rows[path] = local_ids, change
        if self._whole:
            whole = {path: gradients[path] for path in self._whole}
            self._whole = self.server.push_pull(whole, rows=rows or None)
        elif rows:
            self.server.push(None, rows=rows)
        else:  # nothing is on servers, but they count the steps
            self.server.push_pull(None)

    def _step(self, lookups: LookUps, batch: Sequence[Any], shapes: Any) -> CompiledStep:
        """The step for the current numbers of rows; compiled at the first call with them."""
        placement, split = self._where
        key = shapes, tuple(self._sizes[p] for p in sorted(placement.at(PS)))
        if key not in self._steps:
            known = None if self._steps else placement.plan
            args = (lookups, split, self.optimizer, self._shapes, self._sizes, batch, self._request)
            traced, plan = plan_hybrid(*args, plan=known)
            if known is None:
                plan = dataclasses.replace(plan, notes=(*plan.notes, *map(str, placement.leaves)))
            self._steps[key] = CompiledStep(traced, agree(plan), donate_argnums=0)
        self._current = self._steps[key]
        return self._current


@takes_options
def hybrid(
    loss: Callable[..., Any],
    params: Any,
    optimizer: Any,
    *,
    server: Any,
    placement: str | Mapping[str, str] = AUTO,
    cluster: str | None = None,
    **options: Unpack[Options],
) -> Hybrid:
    """Train with some parameters on servers and the rest under SPMD, on this process's devices or,
    after ``join_devices``, on those of all workers.

    Args:
        loss: ``loss(params, *batch)``, a scalar.
        params: the initial values; tables preferably as NumPy arrays, which take no device memory.
        optimizer: an optax transformation for the SPMD parameters. Parameters on servers use
            ``train(optimizer=)``.
        server: this worker's ``ParameterServer``. With several workers that have not joined their
            devices, all parameters must be on servers, and each worker has separate batches.
        placement: ``{"regex over parameter path": place}``; the first match applies: ``"ps"`` (on
            servers, by rows), ``"ps_whole"`` (on servers, pulled and pushed whole), ``"spmd"`` or
            ``"auto"``. Parameters without a match are under SPMD. ``"auto"`` alone: tables of 1 MB
            or more that are only looked up by rows go to the servers where that is predicted to be
            cheaper.
        cluster: the cluster to plan for; None describes the devices present.
        **options: as for ``planner.make_plan``.

    Returns:
        A ``Hybrid``; call it with a batch.

    Raises:
        RequestError: an invalid request.
    """
    request = placement_request(cluster or detect_cluster(), "hybrid", options)
    return Hybrid(loss, params, optimizer, server, placement, request)


def _fitting(state: Any, begin: Any) -> Any:
    """A given state, checked to have the structure, shapes and dtypes of the current one.

    Raises:
        RequestError: it does not have them; names the first array that differs.
    """
    got, want = (
        {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(y)[0]}
        for y in (state, begin)
    )
    for path in dict.fromkeys([*want, *got]):
        ours, expected = (_words(x.get(path)) for x in (got, want))
        if ours != expected:
            raise RequestError(f"state: {path} is {ours}, expected {expected}")
    leaves = [got[path] for path in want]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(begin), leaves)


def _words(x: Any) -> str:
    return "missing" if x is None else f"{jax.numpy.result_type(x)}{list(jax.numpy.shape(x))}"


def _host() -> jax.Device | None:
    """The host's CPU as a device; None (JAX's default device) if JAX may not use it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes it
        return None


def _key(batch: Sequence[Any]) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(abstract(batch))
    return tree, tuple((x.shape, str(x.dtype), x.weak_type) for x in leaves)
