"""``python -m planner_command``: the ``planner`` command."""

import sys

from planner_command import main

sys.exit(main())
