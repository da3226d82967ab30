"""Which temporaries a TPU keeps in the memory of its core, for all of their life.

XLA:TPU gives a kernel's result a place beside the core where there is room from its kernel to its
last reader; such a value takes none of the memory that is counted. What lives long is written out
(XLA's memory space assignment). docs/explanation/memory.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.space.buffer import Buffer

SHARE = 1 / 3
"""How much of that memory lowers the peak; operands that are copied in ahead take the rest
(XLA:TPU, libtpu 0.0.42: thirteen modules, between none and 0.8)."""


def beside_the_core(
    buffers: Sequence[Buffer], sizes: Sequence[float], free: Sequence[bool], room: float
) -> list[bool]:
    """Per buffer, whether the core's memory has it: the shortest lives first, while there is room.

    Args:
        buffers: what a device holds.
        sizes: bytes of each.
        free: per buffer, whether it may be: a temporary.
        room: bytes of that memory; ``SHARE`` of them is used.

    O(buffers * moments) at worst; lives that find room are short.
    """
    out = [False] * len(buffers)
    if room <= 0 or not buffers:
        return out
    left = np.full(max(b.end for b in buffers) + 1, SHARE * room)
    order = sorted(
        (k for k in range(len(buffers)) if free[k] and sizes[k] <= SHARE * room),
        key=lambda k: (buffers[k].end - buffers[k].start, -sizes[k], k),
    )
    for k in order:
        life = left[buffers[k].start : max(buffers[k].end, buffers[k].start + 1)]
        if sizes[k] <= life.min():
            life -= sizes[k]
            out[k] = True
    return out
