"""Requested uses of mesh axes, as masks of strategies."""
