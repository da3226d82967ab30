"""Checkpoints that fit any plan: sharded, asynchronous saves, restored under other shardings.

Orbax writes and reads (orbax.readthedocs.io): every process its own shards, into a folder that is
put in place when all is written, so that an interrupted save leaves the last one as it was. Here:
the plan beside the state, and what is wrong said by leaf, before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from planner.errors import RequestError
from planner.plan import Plan, plan_from_json

STATE, PLAN, EXTRA = "state", "plan", "extra"


class CheckpointError(RequestError):
    """No checkpoint, one that is damaged, or one of another state; names the leaf."""


class Checkpoints:
    """The checkpoints of a run, in one folder, by step. A context manager: leaving waits for the
    save that is under way.

    Args:
        directory: the folder; the same for all processes.
        keep: how many of the latest to keep; None keeps all.
        asynchronous: whether ``save`` returns once the state is copied to host memory.

    Raises:
        CheckpointError: the folder can't be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        asynchronous: bool = True,
    ) -> None:
        self.directory = Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous
        )
        try:
            self._manager = ocp.CheckpointManager(
                self.directory, item_names=(STATE, PLAN, EXTRA), options=options
            )
        except OSError as error:
            raise CheckpointError(f"checkpoints in {directory}: {error}") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a whole checkpoint, in order."""
        return tuple(sorted(self._manager.all_steps()))

    def save(
        self,
        step: int,
        state: Any,
        *,
        plan: Plan | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state.

        Args:
            step: its number; one that is there already is refused.
            state: a pytree of arrays; each process writes the shards that it holds.
            plan: what it was trained under, kept beside it.
            extra: anything else that is JSON, such as the position in the data.

        Raises:
            CheckpointError: that step is there already, or the last save failed.
        """
        items = {STATE: ocp.args.StandardSave(state)}
        if plan is not None:
            items[PLAN] = ocp.args.JsonSave({"plan": plan.to_json()})
        if extra is not None:
            items[EXTRA] = ocp.args.JsonSave(dict(extra))
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            raise CheckpointError(f"step {step} was not saved: {error}") from error

    def wait(self) -> None:
        """Wait until the save that is under way is on disk; raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"a save failed: {error}") from error

    def close(self) -> None:
        """Wait, and let go of the folder."""
        self.wait()
        self._manager.close()

    def shapes(self, step: int | None = None) -> Any:
        """The saved state as ShapeDtypeStructs; sequences are lists, containers are dicts."""
        at = self._step(step)
        try:
            with ocp.StandardCheckpointer() as reader:
                saved = reader.metadata(self.directory / str(at) / STATE)
            found = saved.item_metadata.tree
        except Exception as error:
            raise CheckpointError(
                f"{self.directory / str(at)} is damaged, or not a checkpoint: {error}"
            ) from error
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found, is_leaf=_is_array
        )

    def plan(self, step: int | None = None) -> Plan | None:
        """The plan beside a checkpoint, if there is one."""
        raw = self._json(self._step(step), PLAN)
        return None if raw is None else plan_from_json(raw["plan"], f"plan of {self.directory}")

    def extra(self, step: int | None = None) -> dict[str, Any] | None:
        """What was saved as ``extra``, if anything was."""
        return self._json(self._step(step), EXTRA)

    def restore(
        self,
        like: Any,
        *,
        shardings: Any = None,
        step: int | None = None,
        partial: bool = False,
    ) -> Any:
        """A saved state, on other devices or under another plan if so wanted.

        Args:
            like: a pytree of arrays or ShapeDtypeStructs of the state's form.
            shardings: of the same form, such as ``compiled.in_shardings[0]``, or one for all; None
                takes those of ``like``, and the first device where it has none.
            step: which; None takes the latest.
            partial: whether ``like`` may lack leaves that were saved (parameters only, say).

        Raises:
            CheckpointError: there is none, it is damaged, or a leaf is missing or has another shape
                or dtype; names the leaf.
        """
        at = self._step(step)
        wanted = _wanted(like, shardings)
        self._check(wanted, at, partial)
        args = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=partial,
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(self.directory / str(at) / STATE, args=args)
        except Exception as error:
            raise CheckpointError(
                f"{self.directory / str(at)} is damaged, or not a checkpoint: {error}"
            ) from error

    def _check(self, wanted: Any, step: int, partial: bool) -> None:
        """Compare leaves with what was saved."""
        saved = dict(_leaves(self.shapes(step)))
        asked = dict(_leaves(wanted))
        where = self.directory / str(step)
        for path, leaf in asked.items():
            if path not in saved:
                near = ", ".join(sorted(saved)[:3])
                raise CheckpointError(f"{where} has no {path}; it has {len(saved)} leaves: {near}")
            got = saved[path]
            if (got.shape, got.dtype) != (leaf.shape, leaf.dtype):
                raise CheckpointError(
                    f"{where}: {path} was saved as {got.dtype}{list(got.shape)}, expected "
                    f"{leaf.dtype}{list(leaf.shape)}"
                )
        left = sorted(saved.keys() - asked.keys())
        if left and not partial:
            raise CheckpointError(
                f"{where} has {len(left)} leaves that were not asked for, the first {left[0]}; "
                "pass partial=True to leave them"
            )

    def _step(self, step: int | None) -> int:
        steps = self.steps
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        if step is not None and step not in steps:
            told = ", ".join(map(str, steps))
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.directory}; steps: {told}"
            )
        return steps[-1] if step is None else step

    def _json(self, step: int, item: str) -> dict[str, Any] | None:
        if not (self.directory / str(step) / item).exists():
            return None
        try:
            found = self._manager.restore(
                step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()})
            )
        except Exception as error:
            raise CheckpointError(f"{self.directory / str(step) / item}: {error}") from error
        raw: dict[str, Any] = found[item]
        return raw


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves by path; dicts, sequences and named tuples of the same form have the same paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array):
        yield "/".join(_key(k) for k in path), leaf


def _key(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def _wanted(like: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs with shardings."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if shardings is not None:
        shardings = jax.tree_util.tree_broadcast(
            shardings, like, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding)
        )

    def one(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype, sharding=sharding or default)

    if shardings is None:
        return jax.tree.map(lambda x: one(x, getattr(x, "sharding", None)), like)
    return jax.tree.map(one, like, shardings)
