"""Relaxations: lower bounds by message passing and Lagrange multipliers."""
