"""Parts of a plan's report."""
