"""A graph network of jraph: gathers along edges, segment sums at nodes."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
from training import normal, tokens, training

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """A graph of a quarter million nodes and two million edges, or of 64 and 256."""
    nodes, edges, width, rounds = (1 << 18, 1 << 21, 256, 4) if real else (64, 256, 16, 2)

    def network(graph: jraph.GraphsTuple) -> jax.Array:
        def update(name: str) -> Any:
            mlp = hk.nets.MLP([width, width], name=name)
            return lambda *parts: mlp(jnp.concatenate([p for p in parts if p is not None], -1))

        for n in range(rounds):
            graph = jraph.GraphNetwork(
                update_edge_fn=lambda e, s, r, g, n=n: update(f"edge{n}")(e, s, r),
                update_node_fn=lambda v, s, r, g, n=n: update(f"node{n}")(v, r),
            )(graph)
        return hk.Linear(1)(graph.nodes)[:, 0]

    net = hk.without_apply_rng(hk.transform(network))

    def graph_of(batch: Any) -> jraph.GraphsTuple:
        return jraph.GraphsTuple(
            nodes=batch["nodes"], edges=batch["edges"], senders=batch["from"],
            receivers=batch["to"], globals=None,
            n_node=jnp.array([nodes]), n_edge=jnp.array([edges]),
        )  # fmt: skip

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((net.apply(params, graph_of(batch)) - batch["y"]) ** 2)

    def make_batch() -> Any:
        ends = tokens(edges, 2, nodes)
        return {
            "nodes": normal(nodes, width), "edges": normal(edges, width),
            "from": ends[:, 0], "to": ends[:, 1], "y": normal(nodes, seed=3),
        }  # fmt: skip

    make_state, step = training(lambda: net.init(jax.random.key(0), graph_of(make_batch())), loss)
    return make_state, step, make_batch
