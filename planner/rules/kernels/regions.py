"""``shard_map`` regions: per-shard programs on the user's mesh, with fixed specs.

Arrays enter a region sharded by its ``in_specs`` and leave it sharded by its ``out_specs``. So each
of these arrays passes through a separate mark (``annotate.EDGE``), and the region between the marks
is one operation that the planner does not plan further.
"""

from __future__ import annotations

import math
from typing import Any

from planner import compat
from planner.annotate import FREE

REGION = "shard_map"
"""The primitive."""


def is_region(eqn: Any) -> bool:
    """Whether an equation is a ``shard_map`` over several devices."""
    mesh = eqn.params.get("mesh") if eqn.primitive.name == REGION else None
    return mesh is not None and math.prod(dict(mesh.shape).values()) > 1


def region_axes(eqn: Any) -> dict[str, int]:
    """The axes of a region's mesh."""
    return {str(name): int(size) for name, size in eqn.params["mesh"].shape.items()}


def edge_entries(eqn: Any) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The sharding of each operand and each result of a region, as entries of a mark.

    A dimension that a spec omits is unsharded, or free for the planner if some axes of the mesh
    stay automatic inside the region.
    """
    axes, params = region_axes(eqn), eqn.params
    manual = {str(a) for a in params.get("newly_manual_axes", params.get("manual_axes", axes))}
    rest = None if manual >= {a for a, size in axes.items() if size > 1} else FREE

    def entries(spec: Any, atom: Any) -> tuple[Any, ...]:
        dims = [e if isinstance(e, tuple) else () if e is None else (e,) for e in spec]
        real = [tuple(str(a) for a in dim if axes[str(a)] > 1) for dim in dims]
        real += [()] * (len(compat.aval_shape(atom.aval)) - len(real))
        return tuple((d if len(d) > 1 else d[0]) if d else rest for d in real)

    return (
        [entries(s, v) for s, v in zip(params["in_specs"], eqn.invars, strict=True)],
        [entries(s, v) for s, v in zip(params["out_specs"], eqn.outvars, strict=True)],
    )
