"""Local moves over a choice, under a memory limit."""
