"""The operator graph: IR, tracing, liveness, repeated blocks."""
