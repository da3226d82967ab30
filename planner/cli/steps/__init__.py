"""The subcommands that plan a step, or read plans."""
