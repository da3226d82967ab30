"""What is kept for the backward pass: a choice of the user's, or a price.

A policy says which values of a block stay in memory; the rest is computed again. Between "none" and
"full" lies a family of one number: the price p of a byte, in flop. For each block the values to
keep are those of a minimum cut,

    minimize  sum of bytes kept + (sum of flop done again) / p,

so that nothing is computed again that costs more than p flop per byte that it frees. Along p the
cuts are the lower convex hull of all (bytes kept, flop again) of the block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import RequestError

NONE, FULL, DOTS, OFFLOAD = "none", "full", "dots", "offload"
NAMES = (NONE, FULL, DOTS, OFFLOAD)

PRICES = tuple(2.0**k for k in range(5, 17))
"""Flop per byte at which the search looks: from elementwise operations (about 2^5) over attention
scores (2^8) to products of width 16,384 (2^15)."""


@dataclass(frozen=True)
class Policy:
    """What is computed again.

    Attributes:
        flop_per_byte: at most so many flop for each byte that is freed; 0: nothing.
        products: whether products and convolutions are computed again, too.
        on_host: whether what is kept waits in host memory.
    """

    flop_per_byte: float
    products: bool = True
    on_host: bool = False


def parse_policy(text: str | float) -> Policy:
    """A policy from its name, or from flop per byte.

    Raises:
        RequestError: it is neither.

    >>> parse_policy(512)
    Policy(flop_per_byte=512.0, products=True, on_host=False)
    """
    known = {
        NONE: Policy(0.0),
        FULL: Policy(math.inf),
        DOTS: Policy(math.inf, products=False),
        OFFLOAD: Policy(math.inf, on_host=True),
    }
    if text in known:
        return known[str(text)]
    try:
        price = math.nan if isinstance(text, bool) else float(text)
    except (TypeError, ValueError):
        price = math.nan
    if not 0.0 < price < math.inf:
        raise RequestError(
            f"remat={text!r}: expected auto, {', '.join(NAMES)}, or a number of flop that may be "
            "done again for each byte that it frees, such as 512"
        )
    return Policy(price)


def policy_text(text: str | float) -> str:
    """The policy as plans write it: a name, or a number without needless digits."""
    parse_policy(text)
    return str(text) if text in NAMES else f"{float(text):g}"
