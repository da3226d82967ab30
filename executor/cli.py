"""The ``planner`` command with the subcommands that need a compiler, devices or this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from executor.cli_calibrate import CALIBRATE
from executor.cli_checkpoint import CHECKPOINT
from executor.cli_export import EXPORT
from executor.cli_launch import LAUNCH
from executor.cli_verify import VERIFY
from planner import cli

COMMANDS = (VERIFY, CALIBRATE, LAUNCH, EXPORT, CHECKPOINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `planner.cli.main`."""
    return cli.main(argv, COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
