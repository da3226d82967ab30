"""Searches over the planner's optimisation problem: numbers in, a choice and a certificate out."""

from planner.search.iopddl import read_iopddl, write_iopddl
from planner.search.problem import (
    Edge,
    Problem,
    Solution,
    Usage,
    Verdict,
    evaluate,
    memory_profile,
    verify,
)
from planner.search.registry import SEARCHES, Search
from planner.search.relax.bound import lower_bound
from planner.search.searches.auto import auto
from planner.search.searches.brute import brute
from planner.search.searches.dynamic_programming import dynamic_programming
from planner.search.searches.ilp import ilp
from planner.search.searches.recursive_programming import recursive_programming

__all__ = [
    "SEARCHES",
    "Edge",
    "Problem",
    "Search",
    "Solution",
    "Usage",
    "Verdict",
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
