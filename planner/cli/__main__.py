"""``python -m planner.cli``: the subcommands that need no devices."""

import sys

from planner.cli.main import main

sys.exit(main())
