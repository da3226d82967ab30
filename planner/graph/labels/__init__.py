"""Labels of a step's parts, assigned at tracing: phases, roles of values, repeated segments."""
