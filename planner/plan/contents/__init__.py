"""Parts of a plan that are written from what was chosen."""
