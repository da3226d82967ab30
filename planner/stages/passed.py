"""Passes expensive values of a microbatch that all stages read from stage to stage.

For example, every layer of a decoder attends to an encoder's output. The output is made once per
microbatch, enters the first stage with it, and waits in each stage for the backward pass. Each
stage makes cheap values (masks, positions) from its rows of the batch.
"""

from __future__ import annotations

import dataclasses

from planner.remat.frontier import is_product
from planner.stages.body import Body, closure
from planner.stages.chains.chain import Chain, made_by
from planner.stages.parts import Parts


def passed_along(body: Body, chain: Chain, rest: Parts) -> Chain:
    """The chain, with expensive values that all stages read among those passed between stages."""
    ahead, back = chain.forward, chain.backward
    dear = {v for v in (ahead.shared | back.shared) & body.batch if _is_dear(body, v)}
    middle = made_by(rest.middle) | {r for _, r in ahead.exits}
    first = sorted(dear & ahead.shared - middle)
    second = sorted(back.shared & (middle | dear) - set(first))
    residuals = sorted(back.shared & set(first))
    return dataclasses.replace(
        chain,
        forward=dataclasses.replace(
            ahead,
            carries=(*ahead.carries, *((v, v, v) for v in first)),
            shared=ahead.shared - set(first),
        ),
        backward=dataclasses.replace(
            back,
            carries=(*back.carries, *((v, v, v) for v in second)),
            shared=back.shared - set(first) - set(second),
            residuals=(*back.residuals, *residuals),
        ),
    )


def _is_dear(body: Body, value: int) -> bool:
    """Whether computing a value takes products (``is_product``)."""
    return any(is_product(c.eqn) for c in closure(body.flat.calls, [value]))
