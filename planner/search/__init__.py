"""Searches over the planner's optimisation problem: numbers in, a choice and a certificate out."""

from collections.abc import Callable

from planner.search.auto import auto
from planner.search.brute import brute
from planner.search.dynamic_programming import dynamic_programming
from planner.search.ilp import ilp
from planner.search.iopddl import read_iopddl, write_iopddl
from planner.search.problem import (
    Edge,
    Problem,
    Solution,
    Usage,
    evaluate,
    memory_profile,
    verify,
)
from planner.search.recursive_programming import recursive_programming
from planner.search.relax.bound import lower_bound

SEARCHES: dict[str, Callable[..., Solution]] = {
    "auto": auto,
    "brute": brute,
    "dynamic_programming": dynamic_programming,
    "ilp": ilp,
    "recursive_programming": recursive_programming,
}
"""Every search by name; each takes a problem and ``time_limit_s``."""

__all__ = [
    "SEARCHES",
    "Edge",
    "Problem",
    "Solution",
    "Usage",
    "auto",
    "brute",
    "dynamic_programming",
    "evaluate",
    "ilp",
    "lower_bound",
    "memory_profile",
    "read_iopddl",
    "recursive_programming",
    "verify",
    "write_iopddl",
]
