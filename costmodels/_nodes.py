"""Collectives on nodes: fast links inside a node, a network between nodes, as NCCL runs them.

Steps and bytes of the ring and the double binary tree after NCCL's tuning model
(src/graph/tuning.cc) and Sanders, Speck and Traeff 2009 ("Two-tree algorithms for full bandwidth
broadcast, reduction and scan"). NCCL takes the algorithm and protocol that suits a size. One
latency and one rate stand for all sizes here, so the latency is that of the fastest algorithm for
small messages and the rate that of the fastest one for large messages. Both levels work at once
(chunks are pipelined), so the slower one counts.
"""

from __future__ import annotations

from .hardware import Cluster, Link

_TREE_SHARE = 0.92
"""Part of the links' rate that a tree reaches. Source: NCCL tuning model."""


def nodes_coefficients(
    cluster: Cluster, kind: str, inside: int, across: int
) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of a group with `inside` members in each of `across` nodes.

    Every device of a node drives its own share of the network at once. `kind` is a `Collective`.
    """
    fast, slow = cluster.link, cluster.network or cluster.link
    startup_s = fast.startup_s + (slow.startup_s if across > 1 else 0.0)
    if kind == "permute":
        used = slow if across > 1 else fast
        return startup_s + used.latency_s, 1.0 / _rate(used, 2)
    size = inside * across
    fast_s = 1.0 / _rate(fast, inside) if inside > 1 else 0.0
    slow_s = 1.0 / slow.bytes_per_s if across > 1 else 0.0
    if kind == "all_to_all":
        steps_s = _steps(inside) * fast.latency_s + _steps(across) * slow.latency_s
        inner, outer = (inside - 1) / size * fast_s, (size - inside) / size * slow_s
        return startup_s + steps_s, max(inner, outer)
    ring_s = (size - across) * fast.latency_s + (across - 1) * slow.latency_s
    ring_beta = (size - 1) / size * max(fast_s, slow_s / inside)
    if kind != "all_reduce":
        return startup_s + ring_s, ring_beta
    tree_s = (inside - 1) * fast.latency_s + _steps(across) * slow.latency_s
    up_and_down = (1.0 if across == 2 else 2.0) / inside * slow_s
    betas = [2.0 * ring_beta, max(2.0 * fast_s / _TREE_SHARE, up_and_down)]
    if fast.reduce_bytes_per_s and inside > 1:
        betas.append(max((1.0 + 1.0 / inside) / fast.reduce_bytes_per_s, up_and_down))
    return startup_s + 2.0 * min(ring_s, tree_s), min(betas)


def _steps(members: int) -> int:
    """Levels of a binary tree of `members`."""
    return (members - 1).bit_length()


def _rate(link: Link, members: int) -> float:
    """bytes/s of a device towards `members` - 1 others: links to single peers are not shared."""
    return link.bytes_per_s * (min(1.0, (members - 1) / link.peers) if link.peers else 1.0)
