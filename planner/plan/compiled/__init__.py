"""How a plan is said to a compiler, and what that made of it."""
