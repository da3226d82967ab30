"""Reads the leaves of a saved state, and checks them against the request and their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as File
from typing import Any

import jax
import orbax.checkpoint as ocp

from executor.checkpoint.common import CheckpointError, Path, brief, path_text
from executor.checkpoint.files.guard import writer_of
from executor.checkpoint.files.orbax_files import Contents, is_description
from executor.checkpoint.leaves import RequestedLeaf
from executor.data.agree import everyones_bytes


def check_leaves(
    requested: Mapping[Path, RequestedLeaf], stored: Contents, where: File, partial: bool
) -> None:
    """Compare the requested leaves with the saved state.

    Args:
        requested: the requested leaves.
        stored: the saved state.
        where: the folder of the step, for messages.
        partial: whether saved leaves may be left out.

    Raises:
        CheckpointError: a leaf is missing, has another shape or dtype, or was not requested.
    """
    for path, leaf in requested.items():
        if path not in stored.leaves:
            near = ", ".join(sorted(path_text(p) for p in stored.leaves)[:3])
            raise CheckpointError(
                f"{where} has no {path_text(path)}; it has {len(stored.leaves)} leaves: {near}"
            )
        got, want = stored.leaves[path], leaf.struct
        if (got.shape, got.dtype) != (want.shape, want.dtype) and not leaf.fits(got):
            raise CheckpointError(
                f"{where}: {path_text(path)} was saved as {got.dtype}{list(got.shape)}, "
                f"expected {want.dtype}{list(want.shape)}"
            )
    left = sorted(path_text(p) for p in stored.leaves.keys() - requested.keys())
    if left and not partial:
        raise CheckpointError(
            f"{where} has {len(left)} leaves that the state does not have, the first {left[0]}; "
            "pass partial=True to leave them"
        )


def read_leaves(
    requested: Mapping[Path, RequestedLeaf], stored: Contents, folder: File
) -> list[Any]:
    """The requested leaves, in their order.

    Args:
        requested: the leaves; each is in ``stored`` (``check_leaves``).
        stored: the saved state.
        folder: the folder of the state.

    Raises:
        CheckpointError: a file is damaged or can't be read.
    """
    flat, form = _flat(stored.tree)
    paths = [path for path, x in stored.leaves.items() if x.size]  # in the order of the tree
    here = {path: x for path, x in requested.items() if not x.is_elsewhere}
    chosen = [here.get(path) for path in paths]
    item = [ocp.PLACEHOLDER if x is None else x.struct for x in chosen]
    how = [ocp.RestoreArgs() if x is None else x.restore_args() for x in chosen]
    assert len(flat) == len(paths)
    args = ocp.args.PyTreeRestore(
        jax.tree.unflatten(form, item), restore_args=jax.tree.unflatten(form, how)
    )
    _compare(stored, [path for path in paths if path in requested])
    read: dict[Path, Any] = {}
    if any(x is not None for x in chosen):
        try:
            with _reader() as reader:
                leaves = form.flatten_up_to(reader.restore(folder, args=args))
        except Exception as error:
            _name_damage(stored, [p for p in paths if p in requested])
            raise CheckpointError(f"{folder} can't be restored: {brief(error)}") from error
        read = dict(zip(paths, leaves, strict=True))
    return [x.made(read.get(path)) for path, x in requested.items()]


def _reader() -> ocp.Checkpointer:
    """A reader for this process alone. It waits for no other process, which may read nothing."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"process{jax.process_index()}",
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _compare(stored: Contents, paths: list[Path]) -> None:
    """Compare the data files of leaves with their checksums. Each process compares a share, if
    possible of files that it wrote. All raise CheckpointError if one detects damage."""
    files = stored.guard.files_of(stored.names[path] for path in paths)
    count, index = jax.process_count(), jax.process_index()
    wrong = ""
    try:
        stored.guard.check(x for x in files if writer_of(x) % count == index)
    except CheckpointError as error:
        wrong = str(error)
        if count == 1:
            _name_damage(stored, paths)
            raise
    if count > 1:
        messages = [text.decode() for text in everyones_bytes(wrong.encode())]
        bad = next(((k, text) for k, text in enumerate(messages) if text), None)
        if bad is not None:
            raise CheckpointError(f"{bad[1]} (compared by process {bad[0]})")


def _name_damage(stored: Contents, paths: list[Path]) -> None:
    """Raise CheckpointError for the first leaf that can't be read, if there is one."""
    for path in paths:
        for index in stored.leaves[path].parts():
            stored.leaves[path].read(index)


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(tree, is_leaf=is_description)
