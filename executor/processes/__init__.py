"""Several processes as one job: who they are, how they join, and which one failed."""
