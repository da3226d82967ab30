"""The registry of the zoo: small programs that people really write, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

Step = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """A program of the zoo.

    Attributes:
        name: the name of the function that builds it.
        module: the file it stands in.
        build: gives the step and concrete arguments; the same ones at every call.
        tolerance: largest difference from the unsharded result, relative to the largest value of
            a leaf (at least 1). Integers, booleans and random keys must be equal in any case.
        whole: why nothing can be split; empty where something must be.
    """

    name: str
    module: str
    build: Callable[[], tuple[Step, tuple[Any, ...]]]
    tolerance: float
    whole: str


PROGRAMS: dict[str, Program] = {}


def program(*, tolerance: float = 1e-5, whole: str = "") -> Callable[[Any], Any]:
    """Register the function below as the builder of a program."""

    def register(build: Any) -> Any:
        name, module = build.__name__, build.__module__.rpartition(".")[2]
        if name in PROGRAMS:
            raise ValueError(f"two programs are called {name}; rename one")
        PROGRAMS[name] = Program(name, module, build, tolerance, whole)
        return build

    return register


EPS = 1e-3
"""For Adam and the like. Their first step divides each gradient by its own size, and with the usual
1e-8 rounding would decide the sign of a step where a gradient is zero but for rounding."""


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = jnp.float32) -> Any:
    """Normal numbers; another seed gives others."""
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def integers(limit: int, *shape: int, seed: int = 0) -> Any:
    """int32 in [0, limit)."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).integers(0, limit, shape), jnp.int32)


def dense(rows: int, columns: int, *lead: int, seed: int = 0) -> Any:
    """A matrix (or a stack of them) that keeps the scale of what it multiplies."""
    return normal(*lead, rows, columns, seed=seed, scale=rows**-0.5)
