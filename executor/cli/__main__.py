"""``python -m executor.cli``: the ``planner`` command."""

import sys

from executor.cli.main import main

sys.exit(main())
