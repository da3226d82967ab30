"""The ``planner`` command with all subcommands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from planner.cli import main as cli
from planner.cli.table import EXECUTOR


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `planner.cli.main.main`."""
    return cli.main(argv, EXECUTOR)


if __name__ == "__main__":
    sys.exit(main())
