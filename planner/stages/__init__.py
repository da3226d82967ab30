"""A step in pipeline stages: its repeated layers on groups of devices, microbatches passing through."""
