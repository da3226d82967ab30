"""Measures the devices present: small programs, their times, and samples for the cost model."""
