"""The ``planner`` command with the subcommands that need a compiler, devices or this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from executor.cli.calibrate import CALIBRATE
from executor.cli.checkpoint import CHECKPOINT
from executor.cli.export import EXPORT
from executor.cli.launch import LAUNCH
from executor.cli.verify import VERIFY
from planner.cli import main as cli

COMMANDS = (VERIFY, CALIBRATE, LAUNCH, EXPORT, CHECKPOINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `planner.cli.main.main`."""
    return cli.main(argv, COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
