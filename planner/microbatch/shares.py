"""How a batch is cut into shares, and how their results are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shares:
    """How a batch is cut: in each of the loop's ``turns``, each of ``replicas`` groups has a share.

    Group g has the g-th of ``replicas`` contiguous ranges of examples, as devices that split the
    batch store them. In turn j it takes the examples j, j + turns, ... of its range.
    """

    turns: int
    replicas: int

    @property
    def count(self) -> int:
        """Number of shares."""
        return self.turns * self.replicas

    def cut(self, x: Any, examples: int) -> Any:
        """[examples, ...] -> [turns, examples / turns, ...]; with more than one group [turns,
        replicas, examples / (turns replicas), ...].

        If each example has several rows, such as flattened tokens, they stay together. If the
        number of rows is no multiple of the number of examples, they are dealt out one by one.
        """
        count, *tail = x.shape
        rows = () if count % examples or count == examples else (count // examples,)
        groups = () if self.replicas == 1 else (self.replicas,)
        x = x.reshape(*groups, count // math.prod((self.count, *rows)), self.turns, *rows, *tail)
        x = jnp.moveaxis(x, len(groups) + 1, 0)
        return x.reshape(self.turns, *groups, -1, *tail) if rows else x

    def only(self, x: Any) -> Any:
        """The shares of a single turn: [examples, ...] -> [replicas, examples / replicas, ...]."""
        return x.reshape(self.replicas, x.shape[0] // self.replicas, *x.shape[1:])

    def part(self, x: Any, share: Sequence[Any], examples: int) -> Any:
        """A share of [examples, ...]. ``share`` has the index of its turn and, with more than one
        group, that of its group."""
        out = self.cut(x, examples)
        for number in share:
            out = jax.lax.dynamic_index_in_dim(out, number, 0, keepdims=False)
        return out

    def joined(self, stack: Any, whole: Sequence[int], d: int, examples: int) -> Any:
        """The results of all shares, [turns, (replicas,) ...], as one array of shape ``whole``;
        dimension ``d`` of a result is that of the examples."""
        lead, tail, each = tuple(whole[:d]), tuple(whole[d + 1 :]), whole[d] // examples
        share = examples // self.count
        replicas = () if self.replicas == 1 else (self.replicas,)
        stack = stack.reshape(self.turns, *replicas, *lead, share, each, *tail)
        n = len(replicas)
        if n:
            stack = jnp.moveaxis(stack, 1, d + 1)
        return jnp.moveaxis(stack, 0, d + 1 + n).reshape(whole)
