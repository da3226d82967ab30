"""How XLA:TPU compiles reduce-scatters, depending on the sizes of shards.

Compiled for v5e, v5p and v6e (libtpu 0.0.42.1), sums that were scattered along shards of 96, 128,
192, 288 or 384 lanes of bfloat16, or of 3 x 16 heads, became all-reduces of twice the bytes. They
became reduce-scatters if the shards were a leading dimension. With shards of whole tiles (256 lanes
of bfloat16, 128 of float32, 16 rows), reduce-scatters stay as they are, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from executor.run.local.specs import Spec

LANES = 128
"""Elements of a row in a tile of TPU memory (https://openxla.org/xla/tiled_layout)."""
NARROW = 2
"""Maximum bytes of an element for which two rows share a row of a TPU's tile."""


def in_front(
    shape: Sequence[int], out: Spec, scatter_spec: Spec, itemsize: int, sizes: Mapping[str, int]
) -> frozenset[str]:
    """The axes along which XLA:TPU scatters a sum only if their shards are a leading dimension. It
    all-reduces and slices if shards are not whole tiles, and for dimensions in the middle.

    Args:
        shape: shape of the whole result.
        out, scatter_spec: sharding of the result, and the part along which it is scattered.
        itemsize: bytes of an element.
        sizes: sizes of the axes.
    """
    front_axes: set[str] = set()
    wide = itemsize > NARROW
    split = [tuple(x for x in e if x not in s) for e, s in zip(out, scatter_spec, strict=True)]
    now = [n // math.prod(sizes[x] for x in e) for n, e in zip(shape, split, strict=True)]
    for d, entry in enumerate(scatter_spec):
        for axis in entry:
            now[d] //= sizes[axis]
            dims = [k for k, n in enumerate(now) if n > 1 or k == d]
            shard, at = [now[k] for k in dims], dims.index(d)
            tiled = at != len(dims) - 1 or shard[at - 1] % ROWS == 0
            if len(dims) > 1 and tiled and not _stays(shard, at, wide):
                front_axes.add(axis)
    return frozenset(front_axes)


def _stays(shard: Sequence[int], d: int, wide: bool) -> bool:
    """Whether dimension ``d`` is scattered as it is if shards have these sizes."""
    rank = len(shard)
    if d == rank - 1:
        return shard[d] % (LANES if wide else 2 * LANES) == 0
    if d == rank - 2:
        return shard[d] % ROWS == 0 if rank == 2 else wide or (rank == 3 and shard[d] % ROWS == 0)
    return d == 0


ROWS = 16
"""The number of rows of a shard must be a multiple of this."""
