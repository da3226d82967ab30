"""The launchers, one a file, and what they share: the guard, the supervisor, files of hosts."""
