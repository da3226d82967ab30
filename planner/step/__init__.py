"""A traced step without a mesh: work, buffers, reductions, and classes of equal decisions."""
