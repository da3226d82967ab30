"""Exact parts of searches: reductions and variable elimination."""
