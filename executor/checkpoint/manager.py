"""The checkpoints of a run: saved under any plan, restored under any other.

Orbax (orbax.readthedocs.io) writes and reads. Every process writes its shards into a folder that is
renamed once all is written, so an interrupted save leaves the previous checkpoint intact. This
module adds the plan beside the state, names that can't collide, arrays that Orbax can't represent,
and errors that name the leaf.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path as File
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from executor.checkpoint.common import (
    CheckpointError,
    brief,
    leaves_of,
    nested,
    sequences_of,
)
from executor.checkpoint.fields import MAX_STEP, plan_in, read_json, step_of
from executor.checkpoint.files.checksums import add_late, read_sums, seal
from executor.checkpoint.files.orbax_files import (
    DATA_FILE_BYTES,
    Contents,
    StateSave,
    contents,
    notes,
    state_handler,
    stored_tree,
)
from executor.checkpoint.leaves import arrays_to_save, check_holders, stored_struct, wanted
from executor.checkpoint.owner import (
    REMOVED,
    FencedError,
    Owner,
    hold,
    let_go,
    remove,
    workplace,
)
from executor.checkpoint.parts import PART_BYTES, Stored
from executor.checkpoint.restoring import check_leaves, read_leaves
from executor.data.agree import everyones_bytes
from planner.plan.plan import Plan

STATE, PLAN, EXTRA = "state", "plan", "extra"
UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of a run, in one folder, by step. A context manager, which waits on exit for
    the save in progress.

    Args:
        directory: the folder; the same for all processes.
        keep: how many of the latest to keep; None keeps all.
        asynchronous: whether ``save`` returns once the state is copied to host memory.

    Raises:
        CheckpointError: the folder can't be created.
    """

    _owns = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        asynchronous: bool = True,
    ) -> None:
        self.directory = File(directory).absolute()
        self._keep, self._asynchronous = keep, asynchronous
        self._saving: int | None = None
        self._not_made: OSError | None = None
        self._owner: Owner | None = None
        self._owned_as = ""
        try:
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={
                    STATE: self._handler(),
                    PLAN: ocp.JsonCheckpointHandler(),
                    EXTRA: ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    temporary_path_class=self._temporary(),
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._before_commit),
                ),
            )
        except OSError as error:
            raise CheckpointError(f"checkpoints in {directory}: {brief(error)}") from error

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
        """The steps that have a complete checkpoint, in order."""
        return tuple(sorted(k for k in self._manager.all_steps() if k <= MAX_STEP))

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
            step: the number of the step, from 0; a step that exists already is refused.
            state: a pytree of arrays and numbers; each process writes the shards that it holds. For
                typed PRNG keys, the key data is saved. None and empty containers are not saved.
            plan: the plan that it was trained under, saved beside it.
            extra: other JSON data, such as the position in the training data.

        Raises:
            CheckpointError: ``step`` is not such a number, exists already, or would be removed at
                once because later steps exist and ``keep`` is set; a leaf is not an array;
                ``extra`` is not JSON; or the last save failed, which ``wait`` raises at the latest.
            FencedError: another job owns the folder, see ``own``.
        """
        step = step_of(step, self.directory)
        self.own()
        if self._owner is not None:
            self._owner.check()
        leaves = arrays_to_save(leaves_of(state))
        full = {path: x for path, x in leaves.items() if np.prod(x.shape, dtype=np.int64)}
        if not full or () in full:
            raise CheckpointError(
                "a state is a container with arrays in it, such as a dict; nothing was saved"
            )
        check_holders(full)
        empty = {path: x for path, x in leaves.items() if path not in full}
        tree = stored_tree(full)
        items = {
            STATE: StateSave(
                tree,
                save_args=jax.tree.map(_how, tree),
                ocdbt_target_data_file_size=DATA_FILE_BYTES,
                custom_metadata=notes(empty, sequences_of(state), self._owned_as),
            )
        }
        if plan is not None:
            items[PLAN] = ocp.args.JsonSave({"plan": plan.to_json()})
        if extra is not None:
            try:  # a copy: it is written later
                items[EXTRA] = ocp.args.JsonSave(json.loads(json.dumps(dict(extra))))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"extra is no JSON: {brief(error)}; nothing was saved"
                ) from error
        latest = max(self.steps, default=step)
        if self._keep is not None and step < latest:
            raise CheckpointError(
                f"step {step} was not saved: step {latest} is there, and with keep={self._keep} "
                "the older one would make room by removing it; save under a later step"
            )
        self.wait()
        self._saving, self._not_made = step, None
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            if self._owner is not None:
                self._owner.check()
            raise CheckpointError(f"step {step} was not saved: {brief(error)}") from error
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is on disk; raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except FencedError:
            raise
        except Exception as error:
            if self._owner is not None:
                self._owner.check()
            raise CheckpointError(f"a save failed: {brief(error)}") from error
        step, self._saving = self._saving, None
        if step is not None and jax.process_index() == 0:
            if self._owner is not None:
                self._owner.check()
            try:
                add_late(self.directory / str(step))
            except OSError as error:
                raise CheckpointError(f"checksums of step {step}: {brief(error)}") from error

    def close(self) -> None:
        """Wait for the save in progress, and release the folder."""
        try:
            self.wait()
        finally:
            self.disown()
            self._manager.close()

    def own(self) -> Owner | None:
        """Become the owner of the folder; all processes must call it. ``save`` does so too.

        The folder is taken over if its owner has ended, has released it, or has not renewed its
        lease for `LEASE_S` seconds; unfinished files are removed. Readers need not own the folder.

        Returns:
            The lock, in process 0; None in the others.

        Raises:
            FencedError: another job owns the folder; names its host and process, and since when.
        """
        if self._owned_as or not self._owns:
            return self._owner
        identity, refused = "", ""
        if jax.process_index() == 0:
            try:
                self._owner = hold(self.directory)
                identity = str(self._owner.me)
                self._sweep()
            except CheckpointError as error:
                refused = str(error)
        if jax.process_count() > 1:
            identity, refused = json.loads(
                everyones_bytes(json.dumps([identity, refused]).encode())[0]
            )
        if refused:
            raise FencedError(refused)
        self._owned_as = identity
        self._manager.reload()
        return self._owner

    def disown(self) -> None:
        """Release the folder; a save in progress is then not committed."""
        owner, self._owner, self._owned_as = self._owner, None, ""
        if owner is not None:
            let_go(self.directory)

    def shapes(self, step: int | None = None) -> Any:
        """The saved state as ShapeDtypeStructs; sequences are lists, containers are dicts."""
        stored = self._contents(self._step(step))
        return nested({p: stored_struct(x) for p, x in stored.leaves.items()}, stored.sequences)

    def plan(self, step: int | None = None) -> Plan | None:
        """The plan beside a checkpoint, if there is one."""
        return plan_in(self._checked(step, PLAN))

    def extra(self, step: int | None = None) -> dict[str, Any] | None:
        """The data that was saved as ``extra``; None if there is none."""
        return read_json(self._checked(step, EXTRA))

    def restore(
        self,
        like: Any,
        *,
        shardings: Any = None,
        step: int | None = None,
        partial: bool = False,
    ) -> Any:
        """Restore a saved state, also on other devices or under another plan.

        Args:
            like: a pytree of arrays, numbers or ShapeDtypeStructs with the structure of the state.
                Its typed PRNG keys get the saved key data. A Python number, or a dtype that JAX
                does not support here (64 bits), is restored as a Python number or NumPy array.
            shardings: a pytree of the same structure, such as ``compiled.in_shardings[0]``, or one
                sharding for all leaves; None takes those of ``like``, or else the first device.
            step: the step; None takes the latest.
            partial: whether ``like`` may lack leaves that were saved (parameters only, say).

        Raises:
            CheckpointError: there is no checkpoint, it is damaged (raised in all processes if one
                of them compared a damaged file), or a leaf is missing or has another shape or
                dtype; names it.
        """
        at = self._step(step)
        requested = wanted(like, shardings)
        stored = self._contents(at)
        check_leaves(requested, stored, self.directory / str(at), partial)
        leaves = read_leaves(requested, stored, self._folder(at))
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _handler(self) -> Any:
        return state_handler()

    def _checked(self, step: int | None, item: str) -> File:
        """The folder of an item, after its files are compared with their checksums."""
        folder = self.directory / str(self._step(step))
        sums = read_sums(folder)
        if sums is not None:
            sums.check(x for x in sums.files if x.startswith(f"{item}/"))
        return folder / item

    def _before_commit(self) -> None:
        """Runs in process 0, when all is written and before the folder gets its name."""
        if self._not_made is not None:
            raise self._not_made
        if self._owns:
            if self._owner is None:
                raise FencedError(f"{self.directory} was released during a save")
            self._owner.check()
        there = self.directory / str(self._saving)  # if a commit is a file, not a rename
        for folder in (there, *self._place().glob(f"{self._saving}{UNFINISHED}*")):
            if folder.is_dir():
                seal(folder)

    def _folder(self, step: int) -> File:
        return self.directory / str(step) / STATE

    def _contents(self, step: int) -> Contents:
        return contents(self._folder(step))

    def _step(self, step: int | None) -> int:
        steps = self.steps
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        if step is not None and step not in steps:
            steps_text = ", ".join(map(str, steps))
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.directory}; steps: {steps_text}"
            )
        return steps[-1] if step is None else step

    def _sweep(self) -> None:
        """Remove unfinished folders of earlier owners and of other programs."""
        assert self._owner is not None
        active_folder = workplace(self.directory, self._owner.me.number)
        for pattern in (
            f"{workplace(self.directory, '*').name}",
            f"[0-9]*{UNFINISHED}*",
            f"{REMOVED}*",
        ):
            for place in self.directory.glob(pattern):
                if place != active_folder and place.is_dir() and not place.is_symlink():
                    remove(place)

    def _place(self) -> File:
        """The folder for unfinished checkpoints; each owner has a separate one."""
        number = self._owned_as.partition(" ")[0]
        return workplace(self.directory, number) if number else self.directory

    def _temporary(self) -> Any:
        """The class that puts unfinished steps in ``_place``, and items in their step's folder."""

        class Temporary(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
            @classmethod
            def from_final(cls, final: Any, **options: Any) -> Any:
                step = final.parent == self.directory
                place = type(final)(self._place()) if step else final.parent
                return cls(place / f"{final.name}{UNFINISHED}", final, **options)

            async def create(inner) -> Any:
                """Store an error: raised here, it leaves other threads waiting for five minutes."""
                try:
                    return await super().create()
                except OSError as error:
                    self._not_made = error
                    return inner.get()

        return Temporary


class FromDisk(Checkpoints):
    """Checkpoints of states with `Stored` leaves, which are written in parts, to a new folder that
    needs no owner."""

    _owns = False

    def _handler(self) -> Any:
        return state_handler(from_disk=True)


def _how(leaf: Any) -> ocp.SaveArgs:
    """How a leaf is saved: leaves on disk in chunks, so that a process reads only those that it
    needs; arrays in their shards."""
    return ocp.SaveArgs(chunk_byte_size=PART_BYTES) if isinstance(leaf, Stored) else ocp.SaveArgs()
