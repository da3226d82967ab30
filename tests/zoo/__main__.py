"""``python -m tests.zoo``: plan, run and compare every program; a table; exit 1 on any fault.

python -m tests.zoo [NAME ...]    only programs of these names or files
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the partitioner's remarks on its own work

from rich.console import Console
from rich.table import Table

from tests.zoo.running import SEARCHES, Outcome, load, outcome


def row(outcomes: list[Outcome]) -> list[str]:
    """The cells of a program: one outcome per search."""
    first = outcomes[0]
    return [
        first.program,
        str(first.ops),
        str(len(first.fallbacks)),
        "  ".join(f"{o.split[0]}/{o.split[1]}+{o.inside}" for o in outcomes),
        "  ".join(f"{o.gap:.0e}" if o.gap > 5e-10 else "0" for o in outcomes),
        "; ".join(dict.fromkeys(o.fault for o in outcomes if o.fault))
        or f"yes, {max(o.error for o in outcomes):.0e}",
        "  ".join(f"{o.planning_s:.1f}" for o in outcomes),
    ]


def main(names: list[str]) -> int:
    """Run the programs and print the table."""
    chosen = [p for p in load().values() if not names or {p.name, p.module} & set(names)]
    if not chosen:
        print(f"no program or file is called {' or '.join(names)}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table(
        title="The zoo on 8 virtual devices",
        caption="split: arguments split / array arguments + values held split inside; "
        f"split, gap, planning: {' and '.join(SEARCHES)}",
    )
    for title in ("program", "operations", "fallbacks", "split", "gap", "equal", "planning, s"):
        table.add_column(title, justify="left" if title in ("program", "equal") else "right")
    good = 0
    with console.status("") as status:
        for n, program in enumerate(chosen):
            status.update(f"{n} of {len(chosen)}: {program.name}")
            outcomes = [outcome(program, search) for search in SEARCHES]
            good += not any(o.fault for o in outcomes)
            table.add_row(*row(outcomes))
    console.print(table)
    console.print(f"{good} of {len(chosen)} planned, run and equal")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
