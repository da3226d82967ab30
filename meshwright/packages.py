"""Whether the packages that Python finds under meshwright's names are meshwright's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAMES = ("planner", "executor", "costmodels")
HERE = Path(__file__).resolve().parents[1]


def check_packages() -> None:
    """Refuse packages or folders of these names that are not meshwright's; imports nothing.

    Raises:
        ImportError: a name is not meshwright's; the message says what Python found instead.
    """
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        places = () if spec is None else (spec.origin, *(spec.submodule_search_locations or ()))
        origin = next((place for place in places if place), "nothing")
        if not Path(origin).resolve().is_relative_to(HERE / name):
            raise ImportError(
                f"import {name}: Python found {origin}, which is not meshwright's {HERE / name}; "
                f"uninstall that distribution, rename that file or folder, or put {HERE} first on "
                "sys.path",
                name=name,
                path=origin,
            )
