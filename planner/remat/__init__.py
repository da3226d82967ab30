"""Rematerialization after the fact: what the forward pass leaves, computed again."""
