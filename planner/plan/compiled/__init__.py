"""Lowering options of a plan, and results of compiling it."""
