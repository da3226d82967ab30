"""A step in microbatches: what may be cut, proved from its jaxpr, and the step that is cut."""
