"""cuDNN's fused attention, as ``jax.nn.dot_product_attention(implementation="cudnn")`` calls it.

Batch and heads may be split; keys and values may have fewer heads than queries. Split calls run on
shards.
"""

from __future__ import annotations

import math

from planner.rules.factor import FactorRule
from planner.rules.kernels.pallas.work import Work
from planner.rules.key import EqnKey
from planner.rules.labels import Label, build

FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"
NAMES = frozenset({FORWARD, BACKWARD})

_BIAS, _LENGTHS = 3, (4, 5)
"""Operands that may be empty: a bias for the scores, lengths of queries and keys."""
_PLAIN = 10
"""Number of operands before those that only the backward pass has: residual, result, gradient."""


def cudnn_rule(eqn: EqnKey) -> FactorRule | None:
    """The rule of a call; None with dropout, and for packed or paged sequences."""
    if eqn.name not in NAMES or float(eqn.params.get("dropout_rate", 0.0)) > 0:
        return None
    shapes = eqn.in_shapes
    if len(shapes) < _PLAIN or any(0 not in s for s in shapes[6:_PLAIN]):
        return None
    last = int(eqn.params["layout"]) == 1  # [batch, heads, tokens, depth]
    query, key = shapes[0], shapes[1]
    heads, groups = (query[1], key[1]) if last else (query[2], key[2])
    sizes: dict[Label, int] = {"g": groups}
    many: Label | list[Label] = "g"
    if heads != groups:
        if not groups or heads % groups:
            return None
        many, sizes["r"] = ["g", "r"], heads // groups

    def attended(h: Label | list[Label]) -> list[Label | list[Label]]:
        return ["b", h, None, None] if last else ["b", None, h, None]

    operands: list[list[Label | list[Label]]] = [attended(many), attended("g"), attended("g")]
    bias = shapes[_BIAS]
    if 0 in bias:
        operands.append([None] * len(bias))
    elif len(bias) == 4 and bias[0] in (1, query[0]) and bias[1] in (1, heads):
        operands.append(["b" if bias[0] > 1 else None, many if bias[1] > 1 else None, None, None])
    else:
        return None
    for k in _LENGTHS:
        operands.append([None if 0 in shapes[k] else "b"])
    operands += [[None] * len(s) for s in shapes[6:_PLAIN]]
    if eqn.name == BACKWARD:
        operands += [["b", many, None], attended(many), attended(many)]
    results: list[list[Label | list[Label]]] = [attended(many)]
    if eqn.name == BACKWARD:
        results += [attended("g"), attended("g")]
        if len(eqn.out_shapes) > 3:  # a bias's gradient sums over the batch
            return None
    elif len(eqn.out_shapes) > 1:
        results.append(["b", many, None])
    rule = build(operands, results, shapes, eqn.out_shapes, sizes=sizes)
    inner = {dim[1] for v in (*rule.operands, *rule.results) for dim in v if len(dim) > 1}
    return FactorRule(
        rule.operands,
        rule.results,
        rule.sizes,
        frozenset(),
        rule.replicated | frozenset(inner),
        "fallback",
    )


def cudnn_work(eqn: EqnKey) -> Work:
    """Two products forward, five backward; half of each with a causal mask."""
    query, key = eqn.in_shapes[0], eqn.in_shapes[1]
    tokens = 2 if int(eqn.params["layout"]) == 1 else 1
    product = 2.0 * math.prod(query) * key[tokens]
    causal = "CAUSAL" in str(eqn.params.get("mask_type", "")).upper()
    count = 5 if eqn.name == BACKWARD else 2
    return (("attention", product * count * (0.5 if causal else 1.0), 0.0),)
