"""Rental prices of devices, from the catalog or a user's file."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from costmodels.hardware import ClusterError, known_kinds

MOST_BYTES = 1 << 20
"""Maximum size of a price file, in bytes."""


@dataclass(frozen=True)
class Price:
    """The price of one device.

    Attributes:
        dollars_per_hour: dollars per hour for one device, not for a node.
        source: the provider, and the date of the price.
    """

    dollars_per_hour: float
    source: str


def load_prices(path: str | Path | None = None) -> dict[str, Price]:
    """Prices by device kind: those of the catalog, overridden by those of a file.

    Args:
        path: a TOML file with lines ``h100 = 2.50``, or tables ``[h100]`` with ``dollars_per_hour``
            and, where known, ``source``. None: the catalog alone.

    Raises:
        ClusterError: the file can't be read, or an entry is not a price of a known device.
    """
    text = resources.files("costmodels").joinpath("prices.toml").read_text(encoding="utf-8")
    catalog_prices = _prices(tomllib.loads(text), "the catalog")
    if path is None:
        return catalog_prices
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ClusterError(f"prices {path}: larger than {MOST_BYTES} bytes")
        given = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read prices {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"prices {path}: {error}") from error
    return {**catalog_prices, **_prices(given, str(path))}


def _prices(entries: Mapping[str, object], where: str) -> dict[str, Price]:
    known = known_kinds()
    out = {}
    for kind, entry in entries.items():
        if kind not in known:
            kind = kind.lower() if kind.lower() in known else kind
        if kind not in known:
            near = difflib.get_close_matches(kind, known, 1)
            more = f"; did you mean {near[0]}" if near else ""
            raise ClusterError(
                f"prices of {where}: unknown device {kind!r}{more}; known devices: "
                f"{', '.join(sorted(known))}"
            )
        table = entry if isinstance(entry, dict) else {"dollars_per_hour": entry}
        if extra := sorted(set(table) - {"dollars_per_hour", "source"}):
            raise ClusterError(
                f"prices of {where}: {kind} has an unknown key {extra[0]!r}; expected "
                "dollars_per_hour, and source where there is one"
            )
        dollars = table.get("dollars_per_hour")
        if isinstance(dollars, bool) or not isinstance(dollars, int | float):
            raise ClusterError(
                f"prices of {where}: {kind}: expected dollars per device and hour, got {dollars!r}"
            )
        if not 0 < dollars < math.inf:
            raise ClusterError(f"prices of {where}: {kind}: expected more than 0, got {dollars!r}")
        out[kind] = Price(float(dollars), str(table.get("source", where)))
    return out
