"""Statistics that each microbatch has of its own, and how they are put together."""
