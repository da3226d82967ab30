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

LIFE = 0.1
"""Of all moments of a step, how many such a value lives at most: what lives longer is written out
even where there is room (dumps of the same modules)."""


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
    last = max(b.end for b in buffers)
    left = np.full(last + 1, SHARE * room)
    lives = [b.end - b.start for b in buffers]
    order = sorted(
        (k for k, n in enumerate(lives) if free[k] and n <= LIFE * last),
        key=lambda k: (lives[k], -sizes[k], k),
    )
    for k in order:
        life = left[buffers[k].start : max(buffers[k].end, buffers[k].start + 1)]
        if sizes[k] <= life.min():
            life -= sizes[k]
            out[k] = True
    return out
