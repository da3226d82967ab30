"""The public name of `planner.html.write_report`."""

from planner.html.page import write_report

__all__ = ["write_report"]
