"""The files that a step passes on its way from ``parallelize`` to the compiled call.

Functions of this project are counted in the order of their first call, under ``sys.setprofile``,
while one small step is planned and run. Printed: files, rooms (packages), and how often the order
returns to a room that it had left.

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


def main() -> None:
    files: dict[str, int] = {}

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.setdefault(frame.f_code.co_filename, len(files))

    params = {"a": jnp.ones((64, 128)), "b": jnp.ones((128, 64))}
    run = parallelize(step)
    sys.setprofile(seen)
    run(params, jnp.ones((32, 64)))
    sys.setprofile(None)
    names = [Path(x) for x in files if x.startswith(str(ROOT))]
    ours = [x.relative_to(ROOT) for x in names]
    ours = [x for x in ours if x.parts[0] in PACKAGES]
    rooms = ["/".join(x.parts[:2]) if len(x.parts) > 2 else x.parts[0] for x in ours]
    visits = [room for k, room in enumerate(rooms) if not k or rooms[k - 1] != room]
    print(f"{len(ours)} files, {len(set(rooms))} rooms, {len(visits) - len(set(visits))} returns")
    for k, room in enumerate(visits):
        print(f"{k:3} {room}")


if __name__ == "__main__":
    main()
