"""Runs training with parameter servers: in threads, on Ray, and beside SPMD."""
