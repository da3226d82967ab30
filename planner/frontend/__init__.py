"""Scripts and models in: a step to plan, its arguments, and warnings about it."""
