"""Stages as separate programs: one for each stage's forward and one for its backward pass."""
