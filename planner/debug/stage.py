"""The stages of planning."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """The stages of planning, in order, and the values that each hands to `stages.passed`."""

    GRAPH = "graph"
    """The ``Graph`` of the step."""
    GROUPS = "groups"
    """Its ``Groups``, and the ``Graph``."""
    ANALYSIS = "analysis"
    """The ``Analysis`` of the whole step."""
    CLASSES = "classes"
    """Its ``Quotient``."""
    PROBLEM = "problem"
    """The chosen mesh as a ``Priced`` of what was searched, and one of the whole step."""
    SOLUTION = "solution"
    """As for the problem, with the ``Solution`` behind each."""
    PLAN = "plan"
    """The ``Plan``, and the ``Graph``."""
