"""Prices: a step on a mesh becomes a `Problem`."""
