"""Pipeline stages of a step: its repeated layers on separate groups of devices."""
