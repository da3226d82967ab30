"""A step in pipeline stages: its repeated layers on groups of devices of their own."""
