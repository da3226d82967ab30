"""Rematerialization policies: what is stored for the backward pass, by name or by a price.

A policy determines which values of a block stay in memory; the rest is recomputed. Between "none"
and "full" is a family with one parameter: the price p of a byte, in flop. The values to store in a
block are those of a minimum cut,

    minimize  sum of stored bytes + (sum of recomputed flop) / p,

so nothing is recomputed that costs more than p flop per byte that it frees. Over all p, the cuts
form the lower convex hull of all (stored bytes, recomputed flop) of the block. At any price, stored
values may be in host memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import RequestError

NONE, FULL, DOTS, OFFLOAD = "none", "full", "dots", "offload"
NAMES = (NONE, FULL, DOTS, OFFLOAD)

ON_HOST = f"{OFFLOAD}:"
"""Prefix of a price if stored values are in host memory."""

PRICES = tuple(2.0**k for k in range(5, 17))
"""Prices that the search tries, in flop per byte: from elementwise operations (about 2^5) over
attention scores (2^8) to products of width 16,384 (2^15)."""


@dataclass(frozen=True)
class Policy:
    """What is recomputed.

    Attributes:
        flop_per_byte: most flop to recompute per byte that is freed; 0: nothing is recomputed.
        products: whether products and convolutions are recomputed, too.
        on_host: whether stored values are in host memory.
    """

    flop_per_byte: float
    products: bool = True
    on_host: bool = False


def parse_policy(text: str | float) -> Policy:
    """A policy from its name, or from flop per byte.

    Raises:
        RequestError: the text is neither.

    >>> parse_policy(512)
    Policy(flop_per_byte=512.0, products=True, on_host=False)
    >>> parse_policy("offload:512").on_host
    True
    """
    known = {
        NONE: Policy(0.0),
        FULL: Policy(math.inf),
        DOTS: Policy(math.inf, products=False),
        OFFLOAD: Policy(math.inf, on_host=True),
    }
    if text in known:
        return known[str(text)]
    on_host = isinstance(text, str) and text.startswith(ON_HOST)
    try:
        price = math.nan if isinstance(text, bool) else float(str(text).removeprefix(ON_HOST))
    except (TypeError, ValueError):
        price = math.nan
    if not 0.0 < price < math.inf:
        raise RequestError(
            f"remat={text!r}: expected auto, {', '.join(NAMES)}, or a number of flop that may be "
            f"done again for each byte that it frees, such as 512; {ON_HOST}512 if what is kept "
            "is to wait in host memory"
        )
    return Policy(price, on_host=on_host)


def policy_text(text: str | float) -> str:
    """The policy as plans write it: a name, or a number without unnecessary digits."""
    policy = parse_policy(text)
    if text in NAMES:
        return str(text)
    return f"{ON_HOST if policy.on_host else ''}{policy.flop_per_byte:g}"
