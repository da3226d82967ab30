"""Processes of a job in actors of Ray."""
