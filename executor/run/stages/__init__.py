"""A plan whose stages are separate programs, run from the host."""
