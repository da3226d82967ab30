"""Compilation of the inner loops, cached on disk after their first use.

Paper: Lam, Pitrou and Seibert, "Numba: a LLVM-based Python JIT compiler", LLVM-HPC 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function of arrays and numbers; it runs without the global interpreter lock."""
    return cast(F, njit(cache=True, nogil=True)(function))
