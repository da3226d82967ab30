"""The ``planner`` command: subcommands that need no devices."""
