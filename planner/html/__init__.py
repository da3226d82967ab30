"""The report as one HTML file."""

from planner.html.page import write_report

__all__ = ["write_report"]
