"""Into what a batch is cut, and how what its parts made is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shares:
    """Into what a batch is cut: ``turns`` of the loop, in each one share for each of ``replicas``.

    Group g has the g-th of ``replicas`` contiguous ranges of examples, as devices that split the
    batch have them. In turn j it takes the examples j, j + turns, ... of its range.
    """

    turns: int
    replicas: int

    @property
    def count(self) -> int:
        """Of the shares."""
        return self.turns * self.replicas

    def cut(self, x: Any, examples: int) -> Any:
        """[examples, ...] -> [turns, examples / turns, ...]; with more than one group [turns,
        replicas, examples / (turns replicas), ...]. Rows of one example stay together where there
        are more rows than examples, as flattened tokens."""
        rows, groups = _rows(x, examples), () if self.replicas == 1 else (self.replicas,)
        share, n = examples // self.count, len(groups)
        parts = x.reshape(*groups, share, self.turns, *rows, *x.shape[1:])
        parts = jnp.moveaxis(parts, n + 1, 0)
        return parts.reshape(self.turns, *groups, -1, *x.shape[1:]) if rows else parts

    def only(self, x: Any) -> Any:
        """What the only turn takes of [examples, ...]: [replicas, examples / replicas, ...]."""
        return x.reshape(self.replicas, x.shape[0] // self.replicas, *x.shape[1:])

    def part(self, x: Any, examples: int, share: Sequence[Any]) -> Any:
        """What a share takes of [examples, ...]: ``share`` is the number of its turn, with more
        than one group also that of its group."""
        out = self.cut(x, examples)
        for number in share:
            out = jax.lax.dynamic_index_in_dim(out, number, 0, keepdims=False)
        return out

    def joined(self, stack: Any, whole: Sequence[int], d: int, examples: int) -> Any:
        """What all shares made, [turns, (replicas,) ...], with shares in dimension ``d`` of a
        result, as one array of shape ``whole``."""
        lead, tail, each = tuple(whole[:d]), tuple(whole[d + 1 :]), whole[d] // examples
        share = examples // self.count
        replicas = () if self.replicas == 1 else (self.replicas,)
        stack = stack.reshape(self.turns, *replicas, *lead, share, each, *tail)
        n = len(replicas)
        if n:
            stack = jnp.moveaxis(stack, 1, d + 1)
        return jnp.moveaxis(stack, 0, d + 1 + n).reshape(whole)


def _rows(x: Any, examples: int) -> tuple[int, ...]:
    """A dimension for the rows of each example, where it has several: they follow each other."""
    each = x.shape[0] // examples
    return () if each == 1 else (each,)
