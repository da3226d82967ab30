"""Unrolled programs as loops over their equal blocks, to compare recipes on."""

from planner.rolled.rewrite import Rolled, rolled

__all__ = ["Rolled", "rolled"]
