"""Stages as programs of their own: one for each stage's forward and backward pass."""
