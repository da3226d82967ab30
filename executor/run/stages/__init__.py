"""A plan whose stages are programs of their own, run from the host."""
