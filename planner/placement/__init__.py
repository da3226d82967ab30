"""Which parameters lie on parameter servers, and which under SPMD."""
