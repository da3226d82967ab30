"""Parameter-server jobs under ``planner launch``: options, roles, the launcher."""
