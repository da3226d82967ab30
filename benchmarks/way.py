"""The files that a step passes on its way from ``parallelize`` to the compiled call.

Functions of this project are counted in the order of their first call, under ``sys.setprofile``,
while one small step is planned and run. Printed: files, rooms (layers of the import contract), how
often the order returns to a room that it had left, and how many files are doors: called from
another room.

    python benchmarks/way.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import common  # noqa: F401
import jax
import jax.numpy as jnp

from executor import parallelize

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "executor", "costmodels")


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """Two products and a gradient step."""

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def room_of(path: Path) -> str:
    """The layer of the import contract that a file belongs to: its package, or itself where it lies
    flat in ``planner``; costmodels is one."""
    if path.parts[0] == "planner":
        return "/".join(path.with_suffix("").parts[:2])
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def main() -> None:
    files: dict[str, int] = {}
    callers: dict[Path, set[str]] = {}

    def seen(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or frame.f_code.co_name == "<module>" or not name.startswith(str(ROOT)):
            return
        files.setdefault(name, len(files))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(ROOT)):
            caller = caller.f_back
        if caller is not None:
            known = callers.setdefault(Path(name), set())
            known.add(room_of(Path(caller.f_code.co_filename).relative_to(ROOT)))

    params = {"a": jnp.ones((64, 128)), "b": jnp.ones((128, 64))}
    run = parallelize(step)
    sys.setprofile(seen)
    run(params, jnp.ones((32, 64)))
    sys.setprofile(None)
    names = [Path(x) for x in files if x.startswith(str(ROOT))]
    ours = [x.relative_to(ROOT) for x in names]
    names = [x for x, own in zip(names, ours, strict=True) if own.parts[0] in PACKAGES]
    ours = [x for x in ours if x.parts[0] in PACKAGES]
    rooms = [room_of(x) for x in ours]
    visits = [room for k, room in enumerate(rooms) if not k or rooms[k - 1] != room]
    doors = {ours[k] for k in range(len(ours)) if callers[names[k]] - {rooms[k]}}
    print(f"{len(ours)} files, {len(set(rooms))} rooms, {len(visits) - len(set(visits))} returns")
    print(f"{len(doors)} files are called from another room, the others only from their own")
    for k, room in enumerate(visits):
        print(f"{k:3} {room}")


if __name__ == "__main__":
    main()
