"""Saved states in all forms: a run's folder, one step of it, an Orbax folder, safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Any

import numpy as np

from executor.checkpoint.common import CheckpointError, Path, nested, path_text, taken
from executor.checkpoint.fields import (
    keys_of,
    object_of,
    parsed,
    paths_of,
    plan_in,
    plan_of,
    read_json,
    separator_of,
    step_name,
    step_of,
)
from executor.checkpoint.files.checksums import verified
from executor.checkpoint.files.orbax_files import contents
from executor.checkpoint.files.tensor_files import (
    INDEX,
    NOTES,
    read_tensors,
    tensor_files,
    write_tensors,
)
from executor.checkpoint.manager import EXTRA, PLAN, STATE, FromDisk
from executor.checkpoint.parts import Stored
from planner.plan.plan import Plan

_ITEMS = (STATE, "default", "params", "items")
"""Folders of a step that may hold a state; all but the first are conventions of other programs."""


@dataclass(frozen=True)
class Saved:
    """A saved state whose data has not been read yet.

    Attributes:
        where: the folder or file.
        leaves: the leaves by path.
        sequences: the paths of lists.
        step: its number, None if it has none.
        steps: the steps of the run.
        plan: the plan under which it was trained, if it is stored beside the state.
        extra: other data saved with it.
        form: "orbax" or "safetensors".
        owner: owner of the run's folder when the state was saved, as text.
    """

    where: File
    leaves: Mapping[Path, Stored]
    sequences: tuple[Path, ...] = ()
    step: int | None = None
    steps: tuple[int, ...] = ()
    plan: Plan | None = None
    extra: dict[str, Any] | None = None
    form: str = "orbax"
    owner: str = ""


def open_state(where: File, step: int | None = None, separator: str | None = None) -> Saved:
    """Open a saved state; reads no data.

    Args:
        where: a folder of checkpoints by step, one step's folder, a folder that Orbax wrote, a
            ``.safetensors`` file, its ``.index.json``, or a folder of such files.
        step: which step of a run; None takes the latest.
        separator: joins keys in the names of safetensors; None is "/". The separator that
            `write_state` stores in a file takes precedence.

    Raises:
        CheckpointError: there is no state, it is damaged, or there is no such step.
    """
    where = where.absolute()
    files = tensor_files(where)
    if files:
        _no_step(where, step)
        return _from_tensors(where, files, separator)
    if (where / "_METADATA").exists():
        _no_step(where, step)
        stored = contents(where)
        return Saved(where, stored.leaves, stored.sequences)
    if _state_in(where) is not None:
        _no_step(where, step)
        return _of_step(where, step_name(where.name), ())
    steps = steps_in(where)
    if not steps:
        raise CheckpointError(
            f"no checkpoint at {where}: expected a folder of steps, of Orbax, or safetensors"
        )
    if step is not None and step not in steps:
        steps_text = ", ".join(map(str, steps))
        raise CheckpointError(f"no checkpoint of step {step} in {where}; steps: {steps_text}")
    at = steps[-1] if step is None else step
    return _of_step(where / str(at), at, steps)


def steps_in(where: File) -> tuple[int, ...]:
    """The complete steps of a run, in order."""
    if not where.is_dir():
        return ()
    folders = {step_name(x.name): x for x in where.iterdir()}
    return tuple(
        sorted(k for k, x in folders.items() if k is not None and _state_in(x) is not None)
    )


def verify_saved(where: File, step: int | None = None) -> list[tuple[File, int, int, list[str]]]:
    """Compare all files of a saved state, or of all states of a run, with their checksums.

    Returns:
        For each state: its folder or file, the number of files that were compared, their bytes, and
        the files that have no checksum.

    Raises:
        CheckpointError: files are missing or damaged, or there are no checksums.
    """
    where = where.absolute()
    files = tensor_files(where)
    if files:
        _no_step(where, step)
        return [(where, *_verified_tensors(where, files))]
    steps = steps_in(where)
    if (where / "_METADATA").exists():
        where = where.parent
    if _state_in(where) is not None:
        _no_step(where, step)
        return [(where, *verified(where))]
    if not steps:
        open_state(where, step)  # raises
    chosen = steps if step is None else [step]
    for k in chosen:
        if k not in steps:
            open_state(where, k)  # raises
    return [(where / str(k), *verified(where / str(k))) for k in chosen]


def _verified_tensors(where: File, files: Sequence[File]) -> tuple[int, int, list[str]]:
    for leaf in read_tensors(files, verify=True)[0].values():
        leaf.read(tuple(slice(0, 0) for _ in leaf.shape))
    indices = where.glob(f"*{INDEX}") if where.is_dir() else [where]
    all_files = {*files, *indices}
    return len(all_files), sum(x.stat().st_size for x in all_files), []


def write_state(saved: Saved, to: File, *, form: str, separator: str, max_bytes: int) -> list[File]:
    """Write a state somewhere else, in parts.

    Args:
        saved: the state.
        to: the destination; for safetensors a file that ends in ``.safetensors``, or a folder.
        form: "orbax" or "safetensors".
        separator: joins keys in the names of safetensors.
        max_bytes: the size above which safetensors are split into several files.

    Returns:
        The files that were written, or the folder of the step.

    Raises:
        CheckpointError: the destination exists already or can't be written, or a leaf can't be read
            or has no counterpart in the form; no files are left in that case.
    """
    separator = separator_of(separator, "the names to write")
    if to.is_dir() and any(to.iterdir()):
        raise CheckpointError(f"{to} is there already, and not empty")
    if form == "safetensors":
        note_fields = {
            "sequences": [list(path) for path in saved.sequences],
            "separator": separator,
            "step": saved.step,
            "plan": None if saved.plan is None else saved.plan.to_json(),
            "extra": saved.extra,
        }
        return write_tensors(
            saved.leaves, to, separator, max_bytes, {NOTES: json.dumps(note_fields)}
        )
    step = 0 if saved.step is None else step_of(saved.step, saved.where)
    tree = nested(saved.leaves, saved.sequences)
    with FromDisk(to, keep=None, asynchronous=False) as out:
        out.save(step, tree, plan=saved.plan, extra=saved.extra)
        out.wait()
    return [to / str(step)]


def only(saved: Saved, prefixes: Sequence[Path]) -> Saved:
    """The leaves below some paths.

    Raises:
        CheckpointError: there are no leaves below one of them.
    """
    for prefix in prefixes:
        if not any(path[: len(prefix)] == prefix for path in saved.leaves):
            tops = ", ".join(sorted({path[0] for path in saved.leaves})[:5])
            raise CheckpointError(
                f"{saved.where} has nothing below {path_text(prefix)}; it has {tops}"
            )

    def wanted(path: Path) -> bool:
        return any(path[: len(prefix)] == prefix for prefix in prefixes)

    return replace(saved, leaves={p: x for p, x in saved.leaves.items() if wanted(p)})


def cast(saved: Saved, dtype: np.dtype[Any]) -> Saved:
    """All leaves of floating-point numbers rounded to one type; others as they are."""
    return replace(
        saved,
        leaves={
            path: leaf.cast(dtype) if is_float(leaf.dtype) and leaf.dtype != dtype else leaf
            for path, leaf in saved.leaves.items()
        },
    )


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether these are real floating-point numbers, including types that NumPy does not know."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def merged(parts: Sequence[Saved]) -> Saved:
    """The leaves of several states as one; step, plan and extra are those of the first that has
    them.

    Raises:
        CheckpointError: two states have a leaf with the same path, or a leaf of one has the path of
            a container in another.
    """
    leaves: dict[Path, Stored] = {}
    of: dict[Path, File] = {}
    for part in parts:
        for path, leaf in part.leaves.items():
            if path in leaves:
                raise CheckpointError(
                    f"{path_text(path)} is in {of[path]} and in {part.where}; choose what is taken "
                    "of each, as in RUN:params"
                )
            leaves[path], of[path] = leaf, part.where
    nested(leaves)
    return replace(
        parts[0],
        leaves=leaves,
        sequences=tuple(sorted({s for part in parts for s in part.sequences})),
        step=next((p.step for p in parts if p.step is not None), None),
        plan=next((p.plan for p in parts if p.plan is not None), None),
        extra=next((p.extra for p in parts if p.extra is not None), None),
    )


def _no_step(where: File, step: int | None) -> None:
    if step is not None:
        raise CheckpointError(f"{where} is one state, it has no step {step} to choose")


def _state_in(folder: File) -> File | None:
    folders = [folder / name for name in _ITEMS if (folder / name / "_METADATA").exists()]
    return folders[0] if folders else None


def _of_step(folder: File, step: int | None, steps: tuple[int, ...]) -> Saved:
    state = _state_in(folder)
    assert state is not None
    stored = contents(state)
    return Saved(
        folder,
        stored.leaves,
        stored.sequences,
        step,
        steps,
        plan_in(folder / PLAN),
        read_json(folder / EXTRA),
        owner=stored.owner,
    )


def _from_tensors(where: File, files: Sequence[File], separator: str | None) -> Saved:
    named, metadata = read_tensors(files)
    notes = f"the notes of {where}"
    note_fields = object_of(parsed(metadata.get(NOTES, "{}"), notes), notes)
    separator = separator_of(note_fields.get("separator", separator or "/"), notes)
    leaves = {}
    for name, leaf in named.items():
        path = keys_of(taken(name, separator), where)
        leaves[path] = replace(leaf, path=path)
    step, extra = note_fields.get("step"), note_fields.get("extra")
    return Saved(
        where,
        leaves,
        paths_of(note_fields.get("sequences", []), notes),
        None if step is None else step_of(step, notes),
        (),
        plan_of(note_fields.get("plan"), where),
        None if extra is None else object_of(extra, f"extra of {where}"),
        "safetensors",
    )
