"""What compilers write to memory, in which order operations run, and when values are alive."""
