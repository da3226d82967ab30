"""Starts the processes of a job: launchers, restarts, the guard of each process."""
