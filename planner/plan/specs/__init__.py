"""A plan in the notations of JAX and Flax."""
