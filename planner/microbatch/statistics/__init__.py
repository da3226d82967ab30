"""Per-microbatch statistics, and how they are combined."""
