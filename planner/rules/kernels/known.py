"""The kernels that the planner knows: registered ones, cuDNN's attention, and Pallas kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.errors import RequestError
from planner.rules.factor import FactorRule
from planner.rules.kernels import cudnn
from planner.rules.kernels.pallas import grid
from planner.rules.kernels.pallas.local import local_params
from planner.rules.kernels.pallas.work import Work, kernel_work
from planner.rules.kernels.registered import registered
from planner.rules.key import EqnKey, Shape

FFI = "ffi_call"
NAMES = frozenset({grid.NAME, *cudnn.NAMES})
"""Primitives that are kernels without registration."""


def is_kernel(eqn: Any) -> bool:
    """Whether an equation is a kernel that runs on shards if a plan splits it."""
    return eqn.primitive.name in NAMES or registered(eqn) is not None


def kernel_rule(eqn: EqnKey) -> FactorRule | None:
    """The factor rule of a kernel; None if no dimension of it may be split.

    Raises:
        RequestError: a registered rule does not fit the call, or is for a Pallas kernel and has no
            ``local=``.
    """
    entry = registered(eqn)
    if entry is None:
        return cudnn.cudnn_rule(eqn) or grid.grid_rule(eqn)
    if eqn.name == grid.NAME and entry.local is None:
        raise RequestError(
            f"register_rule({entry.name!r}, {entry.text!r}): a rule for a Pallas kernel needs "
            "local=, a function of the operands' shards; without a rule it is split along its grid"
        )
    return entry.rule(eqn)


def work_of(eqn: EqnKey) -> Work:
    """The work of a kernel."""
    entry = registered(eqn)
    if entry is not None and (entry.cost is not None or eqn.name != grid.NAME):
        return entry.work(eqn)
    return kernel_work(eqn.params) if eqn.name == grid.NAME else cudnn.cudnn_work(eqn)


def on_shards(
    eqn: Any, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape], unused: frozenset[int]
) -> dict[str, Any]:
    """The parameters of a call on shards of these shapes."""
    params, name = dict(eqn.params), eqn.primitive.name
    if name == grid.NAME:
        return local_params(params, in_shapes, out_shapes, unused)
    if name == FFI:
        pairs = zip(params["result_avals"], out_shapes, strict=True)
        params["result_avals"] = tuple(aval.update(shape=tuple(s)) for aval, s in pairs)
    return params
