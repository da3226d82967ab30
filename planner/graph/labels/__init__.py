"""What the parts of a step are: phases, roles of values, repeated segments; told at tracing."""
