"""Kernels written in Pallas: along which dimensions of its grid one may be split, its work."""
