"""The checkpoints of a run: any plan to any plan.

Orbax writes and reads (orbax.readthedocs.io): every process its own shards, into a folder that is
put in place when all is written, so that an interrupted save leaves the last one as it was. Here:
the plan beside the state, names that can't collide, arrays that Orbax has no place for, and what is
wrong said by leaf.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path as File
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from executor.checkpoint.common import (
    CheckpointError,
    Path,
    leaves_of,
    nested,
    read_json,
    sequences_of,
    shown,
)
from executor.checkpoint.leaves import Wanted, arrays_to_save, shape_of, wanted
from executor.checkpoint.orbax_files import (
    DATA_FILE_BYTES,
    Contents,
    contents,
    is_description,
    notes,
    state_handler,
    stored_tree,
)
from executor.checkpoint.parts import PART_BYTES, Stored
from planner.plan import Plan, plan_from_json

STATE, PLAN, EXTRA = "state", "plan", "extra"
UNFINISHED = ".orbax-checkpoint-tmp"


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
        self.directory = File(directory).absolute()
        try:
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={
                    STATE: self._handler(),
                    PLAN: ocp.JsonCheckpointHandler(),
                    EXTRA: ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep, enable_async_checkpointing=asynchronous
                ),
            )
        except OSError as error:
            raise CheckpointError(f"checkpoints in {directory}: {error}") from error
        self._keep, self._swept = keep, False

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
            state: a pytree of arrays and numbers; each process writes the shards that it holds. Of
                typed PRNG keys the data is saved; None and empty containers are the form's affair.
            plan: what it was trained under, kept beside it.
            extra: anything else that is JSON, such as the position in the data.

        Raises:
            CheckpointError: that step is there already, or would be removed at once since later
                ones are there and ``keep`` is set; a leaf is no array, ``extra`` is no JSON, or the
                last save failed; then no later than with ``wait``.
        """
        leaves = arrays_to_save(leaves_of(state))
        full = {path: x for path, x in leaves.items() if np.prod(x.shape, dtype=np.int64)}
        if not full or () in full:
            raise CheckpointError(
                "a state is a container with arrays in it, such as a dict; nothing was saved"
            )
        empty = {path: x for path, x in leaves.items() if path not in full}
        tree = stored_tree(full)
        items = {
            STATE: ocp.args.PyTreeSave(
                tree,
                save_args=jax.tree.map(_how, tree),
                ocdbt_target_data_file_size=DATA_FILE_BYTES,
                custom_metadata=notes(empty, sequences_of(state)),
            )
        }
        if plan is not None:
            items[PLAN] = ocp.args.JsonSave({"plan": plan.to_json()})
        if extra is not None:
            try:  # as it is now: it is written later
                items[EXTRA] = ocp.args.JsonSave(json.loads(json.dumps(dict(extra))))
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"extra is no JSON: {error}; nothing was saved") from error
        latest = max(self.steps, default=step)
        if self._keep is not None and step < latest:
            raise CheckpointError(
                f"step {step} was not saved: step {latest} is there, and with keep={self._keep} "
                "the older one would make room by removing it; save under a later step"
            )
        self._sweep()
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
        try:
            self.wait()
        finally:
            self._manager.close()

    def shapes(self, step: int | None = None) -> Any:
        """The saved state as ShapeDtypeStructs; sequences are lists, containers are dicts."""
        found = self._contents(self._step(step))
        return nested({p: shape_of(x) for p, x in found.leaves.items()}, found.sequences)

    def plan(self, step: int | None = None) -> Plan | None:
        """The plan beside a checkpoint, if there is one."""
        raw = read_json(self.directory / str(self._step(step)) / PLAN)
        return None if raw is None else plan_from_json(raw["plan"], f"plan of {self.directory}")

    def extra(self, step: int | None = None) -> dict[str, Any] | None:
        """What was saved as ``extra``, if anything was."""
        return read_json(self.directory / str(self._step(step)) / EXTRA)

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
            like: a pytree of arrays, numbers or ShapeDtypeStructs of the state's form. Where it has
                typed PRNG keys, keys of that kind are made of the saved data; where it has a
                number of Python or a dtype that JAX does not hold here (64 bits), the leaf is one
                of Python or NumPy.
            shardings: of the same form, such as ``compiled.in_shardings[0]``, or one for all; None
                takes those of ``like``, and the first device where it has none.
            step: which; None takes the latest.
            partial: whether ``like`` may lack leaves that were saved (parameters only, say).

        Raises:
            CheckpointError: there is none, it is damaged, or a leaf is missing or has another shape
                or dtype; names the leaf.
        """
        at = self._step(step)
        asked = wanted(like, shardings)
        found = self._contents(at)
        self._check(asked, found, at, partial)
        return jax.tree.unflatten(jax.tree.structure(like), self._read(asked, found, at))

    def _handler(self) -> Any:
        return state_handler()

    def _read(self, asked: Mapping[Path, Wanted], found: Contents, step: int) -> list[Any]:
        """The leaves that are asked for, in their order."""
        flat, form = _flat(found.tree)
        paths = [path for path, x in found.leaves.items() if x.size]  # in the order of the tree
        chosen = [asked.get(path) for path in paths]
        item = [ocp.PLACEHOLDER if x is None else x.struct for x in chosen]
        how = [ocp.RestoreArgs() if x is None else x.restore_args() for x in chosen]
        assert len(flat) == len(paths)
        args = ocp.args.PyTreeRestore(
            jax.tree.unflatten(form, item), restore_args=jax.tree.unflatten(form, how)
        )
        folder = self._folder(step)
        read: dict[Path, Any] = {}
        if any(x is not None for x in chosen):
            try:
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                    leaves = form.flatten_up_to(reader.restore(folder, args=args))
            except Exception as error:
                self._name_damage(found, [p for p in paths if p in asked])
                raise CheckpointError(f"{folder} can't be restored: {error}") from error
            read = dict(zip(paths, leaves, strict=True))
        return [x.made(read.get(path)) for path, x in asked.items()]

    def _name_damage(self, found: Contents, paths: list[Path]) -> None:
        """Raise CheckpointError for the first leaf that can't be read, if there is one."""
        for path in paths:
            for index in found.leaves[path].parts():
                found.leaves[path].read(index)

    def _check(
        self, asked: Mapping[Path, Wanted], found: Contents, step: int, partial: bool
    ) -> None:
        """Compare leaves with what was saved."""
        where = self.directory / str(step)
        for path, leaf in asked.items():
            if path not in found.leaves:
                near = ", ".join(sorted(shown(p) for p in found.leaves)[:3])
                raise CheckpointError(
                    f"{where} has no {shown(path)}; it has {len(found.leaves)} leaves: {near}"
                )
            got, want = found.leaves[path], leaf.struct
            if (got.shape, got.dtype) != (want.shape, want.dtype) and not leaf.fits(got):
                raise CheckpointError(
                    f"{where}: {shown(path)} was saved as {got.dtype}{list(got.shape)}, expected "
                    f"{want.dtype}{list(want.shape)}"
                )
        left = sorted(shown(p) for p in found.leaves.keys() - asked.keys())
        if left and not partial:
            raise CheckpointError(
                f"{where} has {len(left)} leaves that were not asked for, the first {left[0]}; "
                "pass partial=True to leave them"
            )

    def _folder(self, step: int) -> File:
        return self.directory / str(step) / STATE

    def _contents(self, step: int) -> Contents:
        return contents(self._folder(step))

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

    def _sweep(self) -> None:
        """Before the first save, remove what interrupted ones left; readers remove nothing."""
        if self._swept or jax.process_index():
            return
        self._swept = True
        for folder in self.directory.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)


class FromDisk(Checkpoints):
    """Checkpoints whose state has `Stored` leaves; they are written part by part."""

    def _handler(self) -> Any:
        return state_handler(from_disk=True)


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(tree, is_leaf=is_description)


def _how(leaf: Any) -> ocp.SaveArgs:
    """Leaves that are on disk as a whole are written in chunks, of which a process reads its own;
    arrays have their shards."""
    return ocp.SaveArgs(chunk_byte_size=PART_BYTES) if isinstance(leaf, Stored) else ocp.SaveArgs()
