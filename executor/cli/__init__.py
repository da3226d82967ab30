"""The ``planner`` command with the subcommands that need a compiler, devices or this package."""
