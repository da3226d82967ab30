"""Factor rules: which dimensions of an equation may be sharded together."""
