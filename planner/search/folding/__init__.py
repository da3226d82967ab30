"""Repeated parts of a problem, solved once."""
