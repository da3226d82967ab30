"""Recurrent networks, state-space scans, mixtures of experts, graph networks."""

import jax
import jax.numpy as jnp
from flax import linen

from tests.zoo.program import dense, integers, normal, program

BATCH, SEQ, WIDTH, EXPERTS = 16, 12, 64, 8


@program(tolerance=1e-4)
def lstm():
    def loss(p, x):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))
        _, hs = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
        return jnp.mean(hs**2)

    params = {"x": dense(32, 4 * WIDTH), "h": dense(WIDTH, 4 * WIDTH), "b": jnp.zeros(4 * WIDTH)}
    return jax.value_and_grad(loss), (params, normal(BATCH, SEQ, 32))


@program(tolerance=1e-4)
def gru_linen():
    model = linen.RNN(linen.GRUCell(WIDTH), reverse=True, keep_order=True)
    x, lengths = normal(BATCH, SEQ, 32), 1 + integers(SEQ, BATCH)
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params, x, lengths):
        return jnp.mean(model.apply(params, x, seq_lengths=lengths) ** 2)

    return jax.value_and_grad(loss), (params, x, lengths)


def first_order(gates, x):
    """h[t] = gates[t] * h[t - 1] + x[t], along axis 1."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return jax.lax.associative_scan(combine, (gates, x), axis=1)[1]


@program(tolerance=1e-4)
def state_space_associative_scan():
    def loss(p, x):
        u = x @ p["in"]
        gates = jax.nn.sigmoid(x @ p["gate"])
        return jnp.mean((first_order(gates, (1 - gates) * u) @ p["out"]) ** 2)

    params = {"in": dense(32, WIDTH), "gate": dense(32, WIDTH, seed=1), "out": dense(WIDTH, 32)}
    return jax.value_and_grad(loss), (params, normal(BATCH, SEQ, 32))


@program(tolerance=1e-4)
def state_space_selective():
    """A diagonal state per channel, with input-dependent steps, as a plain scan."""

    def loss(p, x):
        delta = jax.nn.softplus(x @ p["delta"])
        into, out = x @ p["b"], x @ p["c"]
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["a"]))

        def body(h, t):
            decay, drive, out = t
            h = decay * h + drive
            return h, jnp.einsum("bdn,bn->bd", h, out)

        drive = (delta * x)[..., None] * into[:, :, None, :]
        xs = tuple(jnp.moveaxis(v, 1, 0) for v in (decay, drive, out))
        _, ys = jax.lax.scan(body, jnp.zeros((BATCH, 32, 8)), xs)
        return jnp.mean(ys**2)

    params = {
        "delta": dense(32, 32),
        "a": normal(32, 8, scale=0.1),
        "b": dense(32, 8),
        "c": dense(32, 8, seed=1),
    }
    return jax.value_and_grad(loss), (params, normal(BATCH, SEQ, 32))


def expert_params():
    return {
        "router": dense(WIDTH, EXPERTS),
        "up": dense(WIDTH, 128, EXPERTS),
        "down": dense(128, WIDTH, EXPERTS),
    }


@program(tolerance=1e-4)
def moe_top2_with_capacity():
    """Dense dispatch and combine, a balancing loss beside the main one."""

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        weights, chosen = jax.lax.top_k(gates, 2)
        picks = jax.nn.one_hot(chosen, EXPERTS)
        queue = picks.reshape(BATCH, -1, EXPERTS)
        places = (jnp.cumsum(queue, axis=1) - 1).reshape(picks.shape).astype(jnp.int32)
        slots = picks[..., None] * jax.nn.one_hot(places, 6)
        combine = jnp.einsum("bst,bstec->bsec", weights, slots)
        into = jnp.einsum("bsec,bsd->ebcd", slots.sum(2), x)
        hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", into, p["up"]))
        out = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"])
        y = jnp.einsum("bsec,ebcd->bsd", combine, out)
        return jnp.mean(y**2) + 0.01 * jnp.sum(picks.mean((0, 1, 2)) * gates.mean((0, 1)))

    return jax.value_and_grad(loss), (expert_params(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def moe_ragged_groups():
    """Tokens sorted by expert, one ragged product for all experts."""

    def loss(p, x):
        x = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jnp.argmax(gates, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["up"], sizes))
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)
        y = jnp.zeros_like(out).at[order].set(out)
        return jnp.mean((y * jnp.take_along_axis(gates, chosen[:, None], axis=1)) ** 2)

    return jax.value_and_grad(loss), (expert_params(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def moe_scatter_dispatch():
    """Tokens scattered into a buffer per expert and gathered back."""

    def loss(p, x):
        x = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(x @ p["router"])
        weight, chosen = jnp.max(gates, -1), jnp.argmax(gates, -1)
        places = jnp.cumsum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=0)
        place = jnp.take_along_axis(places, chosen[:, None], axis=1)[:, 0] - 1
        buffer = jnp.zeros((EXPERTS, 32, WIDTH)).at[chosen, place].set(x, mode="drop")
        out = jnp.einsum("ecd,edf->ecf", buffer, p["up"])
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(out), p["down"])
        y = out.at[chosen, place].get(mode="fill", fill_value=0)
        return jnp.mean((y * weight[:, None]) ** 2)

    return jax.value_and_grad(loss), (expert_params(), normal(BATCH, SEQ, WIDTH))


def edges(nodes=32, count=128):
    return integers(nodes, count, seed=1), integers(nodes, count, seed=2)


@program(tolerance=1e-4)
def graph_network_segment_sum():
    def loss(p, nodes, senders, receivers):
        for w in p["layers"]:
            messages = jax.nn.relu(jnp.concatenate([nodes[senders], nodes[receivers]], -1) @ w)
            total = jax.ops.segment_sum(messages, receivers, num_segments=32)
            count = jax.ops.segment_sum(jnp.ones(128), receivers, num_segments=32)
            nodes = nodes + total / jnp.maximum(count, 1)[:, None]
        return jnp.mean((nodes @ p["out"]) ** 2)

    params = {"layers": [dense(128, 64, seed=s) for s in range(2)], "out": dense(64, 8)}
    return jax.value_and_grad(loss), (params, normal(32, 64), *edges())


@program(tolerance=1e-4)
def graph_attention_segment_softmax():
    def loss(p, nodes, senders, receivers):
        x = nodes @ p["w"]
        score = jax.nn.leaky_relu(x[senders] @ p["a"] + x[receivers] @ p["b"])
        top = jax.ops.segment_max(score, receivers, num_segments=32)
        weight = jnp.exp(score - top[receivers])
        total = jax.ops.segment_sum(weight, receivers, num_segments=32)
        weight = weight / total[receivers]
        y = jax.ops.segment_sum(weight[:, None] * x[senders], receivers, num_segments=32)
        return jnp.mean(y**2)

    params = {"w": dense(64, 64), "a": normal(64, scale=0.1), "b": normal(64, seed=1, scale=0.1)}
    return jax.value_and_grad(loss), (params, normal(32, 64), *edges())
