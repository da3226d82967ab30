"""Runs a plan: the same step with the sharding constraints of the plan, compiled once."""
