"""How workers and servers exchange values: threads, Ray, shared memory, fewer bits."""
