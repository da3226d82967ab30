"""Train steps of ``compiled_unseen.py`` without attention: graphs, tables, recurrences, images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled_models import (
    DATA,
    ManualPlan,
    Model,
    Named,
    _norm,
    bf16,
    data_parallel,
    hint,
    tensor_parallel,
)


def picked(plans: Mapping[str, ManualPlan], *names: str) -> dict[str, ManualPlan]:
    """Some of the plans."""
    return {name: plans[name] for name in names}


def graph_network() -> Model:
    """Three rounds of messages, width 256, over 131,072 nodes and a million edges, in float32."""
    nodes, edges, features, width, layers = 131072, 1048576, 128, 256, 3
    layer = {
        "message": [Named((width, width), "width wide"), Named((width, width), "wide width")],
        "update": [Named((2 * width, width), "width wide"), Named((width, width), "wide width")],
    }
    params = {
        "encode": Named((features, width), "none width"),
        "layers": [layer] * layers,
        "out": Named((width, 1), "width none"),
    }
    batch = {
        "nodes": Named((nodes, features), "nodes none"),
        "senders": Named((edges,), "batch", jnp.int32),
        "receivers": Named((edges,), "batch", jnp.int32),
        "targets": Named((nodes,), "nodes"),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = hint(jax.nn.relu(batch["nodes"] @ params["encode"]), "nodes none")
        for p in params["layers"]:
            first, second = p["message"]
            sent = hint(x[batch["senders"]], "batch none")
            sent = hint(jax.nn.relu(sent @ first), "batch a_wide")
            sent = hint(jax.nn.relu(sent @ second), "batch none")
            received = jax.ops.segment_sum(sent, batch["receivers"], nodes)
            first, second = p["update"]
            h = jnp.concatenate([x, hint(received, "nodes none")], -1)
            h = hint(jax.nn.relu(h @ first), "nodes a_wide")
            x = hint(x + h @ second, "nodes none")
        predicted = (x @ params["out"])[:, 0]
        return jnp.mean(jnp.square(predicted - batch["targets"]))

    split = {**DATA, "nodes": ("data",)}
    plans = picked(data_parallel(16), "dp") | {
        "nodes": ManualPlan({"data": 16}, split),
        "nodes_tp4": ManualPlan(
            {"data": 4, "model": 4}, {**split, "wide": ("model",), "a_wide": ("model",)}
        ),
    }
    return Model("graph_network", "v5e:4x4", params, batch, loss, plans)


def mixer() -> Model:
    """An MLP-Mixer of eight blocks on 512 images, each 196 patches of 768 numbers."""
    layers, images, patches, width, token, wide = 8, 512, 196, 768, 384, 3072
    block = {
        "norm1": Named((width,), "none"),
        "norm2": Named((width,), "none"),
        "token_up": Named((patches, token), "none width"),
        "token_down": Named((token, patches), "width none"),
        "up": Named((width, wide), "width wide"),
        "down": Named((wide, width), "wide width"),
    }
    params = {
        "patches": Named((768, width), "none width"),
        "blocks": [block] * layers,
        "norm": Named((width,), "none"),
        "head": Named((width, 1000), "width none"),
    }
    batch = (
        Named((images, patches, 768), "batch none none", jnp.bfloat16),
        Named((images,), "batch", jnp.int32),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        x = hint(x @ params["patches"].astype(jnp.bfloat16), "batch none none")
        for p in bf16(params["blocks"]):
            h = _norm(x, p["norm1"]).swapaxes(1, 2)
            h = jax.nn.gelu(h @ p["token_up"]) @ p["token_down"]
            x = hint(x + h.swapaxes(1, 2), "batch none none")
            h = hint(jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]), "batch none a_wide")
            x = hint(x + h @ p["down"], "batch none none")
        pooled = _norm(x, params["norm"]).mean(1)
        logits = (pooled @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Model("mixer", "v5e:4x4", params, batch, loss, data_parallel(16))


def _state_space_layer(x: jax.Array, p: Any, rank: int, state: int) -> jax.Array:
    u, gate = jnp.einsum("bsd,dkc->kbsc", _norm(x, p["norm"]), p["in"].astype(jnp.bfloat16))
    u = hint(jax.nn.silu(u), "batch none a_wide")
    chosen = (u @ p["select"].astype(jnp.bfloat16)).astype(jnp.float32)
    low, write, read = jnp.split(chosen, (rank, rank + state), -1)
    u = u.astype(jnp.float32)
    rate = jax.nn.softplus(low @ p["rate"] + p["rate_bias"])
    decay = jnp.exp(-rate[:, :, None] * jnp.exp(p["decay"]))
    entering = (rate * u)[:, :, None] * write[..., None]

    def joined(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    _, states = jax.lax.associative_scan(joined, (decay, entering), axis=1)
    states = hint(states, "batch none none a_wide")
    y = (states * read[..., None]).sum(2) + u * p["skip"]
    y = hint(y.astype(jnp.bfloat16) * jax.nn.silu(gate), "batch none a_wide")
    return hint(x + y @ p["out"].astype(jnp.bfloat16), "batch none none")


def state_space() -> Model:
    """Four gated layers of a diagonal state space, 16 x 512, scanned over 32 x 2,048 bytes."""
    rows, seq, layers, width, channels, state, rank = 32, 2048, 4, 512, 512, 16, 32
    layer = {
        "norm": Named((width,), "none"),
        "in": Named((width, 2, channels), "width none wide"),
        "select": Named((channels, rank + 2 * state), "wide none"),
        "rate": Named((rank, channels), "none wide"),
        "rate_bias": Named((channels,), "wide"),
        "decay": Named((state, channels), "none wide"),
        "skip": Named((channels,), "wide"),
        "out": Named((channels, width), "wide width"),
    }
    params = {
        "embedding": Named((256, width), "none width"),
        "layers": [layer] * layers,
        "norm": Named((width,), "none"),
        "head": Named((width, 256), "width none"),
    }
    batch = Named((rows, seq + 1), "batch none", jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = hint(x, "batch none none")
        for p in params["layers"]:
            x = _state_space_layer(x, p, rank, state)
        logits = _norm(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        ).mean()

    plans = data_parallel(16) | tensor_parallel(16, (4,))
    plans = picked(plans, "dp", "zero1", "tp4")
    return Model("state_space", "v5e:4x4", params, batch, loss, plans)


def two_towers() -> Model:
    """Tables of 1,000,003 and 524,288 rows under two towers; a softmax over 8,192 pairs."""
    users, items, dim, pairs = 1000003, 524288, 128, 8192
    tower = [
        Named((dim, 1024), "width wide"),
        Named((1024, 512), "wide width"),
        Named((512, dim), "width none"),
    ]
    params = {
        "users": Named((users, dim), "rows dim"),
        "items": Named((items, dim), "rows dim"),
        "user_tower": tower,
        "item_tower": tower,
    }
    ids = Named((pairs,), "batch", jnp.int32)

    def tower_of(table: jax.Array, weights: Any, ids: jax.Array) -> jax.Array:
        x = hint(table[ids], "batch none").astype(jnp.bfloat16)
        for k, w in enumerate(bf16(weights)):
            x = x @ w if k == 2 else jax.nn.relu(x @ w)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
        return hint(x.astype(jnp.bfloat16), "batch none")

    def loss(params: Any, batch: Any) -> jax.Array:
        user = tower_of(params["users"], params["user_tower"], batch[0])
        item = tower_of(params["items"], params["item_tower"], batch[1])
        scores = hint((user @ item.T).astype(jnp.float32) / 0.05, "batch none")
        right = jnp.arange(pairs)
        return optax.softmax_cross_entropy_with_integer_labels(scores, right).mean()

    plans = picked(data_parallel(16), "dp") | {
        "dim": ManualPlan({"data": 16}, {**DATA, "dim": ("data",)}),
        # The first table's rows do not divide, so that one is split by columns.
        "rows_dim": ManualPlan({"data": 16}, {**DATA, "rows": ("data",), "dim": ("data",)}),
    }
    return Model("two_towers", "v5e:4x4", params, (ids, ids), loss, plans)


def _channel_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return (y * gain).astype(jnp.bfloat16)


def _conv(x: jax.Array, w: jax.Array, stride: int, groups: int = 1) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x,
        w.astype(jnp.bfloat16),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    return hint(y, "batch none none none")


def convnext() -> Model:
    """A ConvNeXt of four stages, 96 to 768 channels, on 512 images of 224 x 224."""
    channels, depths, images = (96, 192, 384, 768), (2, 2, 4, 2), 512

    def block(c: int) -> dict[str, Named]:
        return {
            "depthwise": Named((7, 7, 1, c), "none none none wide"),
            "norm": Named((c,), "none"),
            "up": Named((c, 4 * c), "width wide"),
            "down": Named((4 * c, c), "wide width"),
            "scale": Named((c,), "none"),
        }

    def stage(a: int, b: int, depth: int) -> dict[str, Any]:
        return {
            "norm": Named((a,), "none"),
            "shrink": Named((2, 2, a, b), "none none width wide"),
            "blocks": [block(b)] * depth,
        }

    first = {"shrink": Named((4, 4, 3, 96), "none none none wide"), "blocks": [block(96)] * 2}
    rest = zip(channels[:-1], channels[1:], depths[1:], strict=True)
    params = {
        "stages": [first, *(stage(*sizes) for sizes in rest)],
        "norm": Named((768,), "none"),
        "head": Named((768, 1000), "width none"),
    }
    batch = (
        Named((images, 224, 224, 3), "batch none none none", jnp.bfloat16),
        Named((images,), "batch", jnp.int32),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        for level, stage in enumerate(params["stages"]):
            if level:
                x = _channel_norm(x, stage["norm"])
            x = _conv(x, stage["shrink"], 2 if level else 4)
            for p in stage["blocks"]:
                h = _conv(x, p["depthwise"], 1, x.shape[-1])
                h = _channel_norm(h, p["norm"]) @ p["up"].astype(jnp.bfloat16)
                h = jax.nn.gelu(h) @ p["down"].astype(jnp.bfloat16)
                x = hint(x + h * p["scale"].astype(jnp.bfloat16), "batch none none none")
        pooled = _channel_norm(x.mean((1, 2)), params["norm"])
        logits = (pooled @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    plans = data_parallel(16, {"wide": ("data",)})
    return Model("convnext", "v5e:4x4", params, batch, loss, plans)


def _lstm_layer(xs: jax.Array, p: Any) -> jax.Array:
    weights = bf16({"input": p["input"], "hidden": p["hidden"]})

    def cell(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        gates = jnp.einsum("bd,dkw->kbw", x, weights["input"])
        gates += jnp.einsum("bd,dkw->kbw", h, weights["hidden"])
        gates = hint(gates.astype(jnp.float32) + p["bias"][:, None], "none batch a_wide")
        enter, keep, new, leave = gates
        c = jax.nn.sigmoid(keep + 1) * c + jax.nn.sigmoid(enter) * jnp.tanh(new)
        h = (jax.nn.sigmoid(leave) * jnp.tanh(c)).astype(jnp.bfloat16)
        return (h, c), h

    start = jnp.zeros(xs.shape[1:], jnp.bfloat16)
    _, out = jax.lax.scan(cell, (start, start.astype(jnp.float32)), xs)
    return hint(out, "none batch none")


def lstm() -> Model:
    """A language model of two LSTM layers, width 1024, on 512 x 128 tokens."""
    layers, width, vocab, rows, seq = 2, 1024, 32000, 512, 128
    layer = {
        "input": Named((width, 4, width), "width none wide"),
        "hidden": Named((width, 4, width), "width none wide"),
        "bias": Named((4, width), "none wide"),
    }
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "layers": [layer] * layers,
        "head": Named((width, vocab), "width vocab"),
    }
    batch = Named((rows, seq + 1), "batch none", jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1].T]
        x = hint(x, "none batch none")
        for p in params["layers"]:
            x = _lstm_layer(x, p)
        logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        logits = hint(logits, "none batch a_vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].T).mean()

    plans = data_parallel(8) | tensor_parallel(8, (2,))
    plans = picked(plans, "dp", "zero1", "tp2_zero1")
    return Model("lstm", "v5e:2x4", params, batch, loss, plans)


def dlrm() -> Model:
    """26 tables of 200,000 x 64, dots of every two of 27 vectors, 65,536 samples."""
    tables, rows, dim, dense, samples = 26, 200000, 64, 13, 65536
    pairs = (tables + 1) * tables // 2
    params = {
        "tables": [Named((rows, dim), "rows dim")] * tables,
        "bottom": [
            Named((dense, 512), "none wide"),
            Named((512, 256), "wide width"),
            Named((256, dim), "width none"),
        ],
        "top": [
            Named((pairs + dim, 1024), "none wide"),
            Named((1024, 1024), "wide width"),
            Named((1024, 512), "width wide"),
            Named((512, 1), "wide none"),
        ],
    }
    batch = (
        Named((samples, dense), "batch none"),
        Named((samples, tables), "batch none", jnp.int32),
        Named((samples,), "batch"),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x, ids, clicked = batch
        x = x.astype(jnp.bfloat16)
        for w in bf16(params["bottom"]):
            x = jax.nn.relu(x @ w)
        found = [hint(t[ids[:, k]], "batch none") for k, t in enumerate(params["tables"])]
        vectors = hint(jnp.stack([x, *bf16(found)], 1), "batch none none")
        dots = jnp.einsum("bie,bje->bij", vectors, vectors)
        left, right = np.tril_indices(tables + 1, -1)
        x = hint(jnp.concatenate([x, dots[:, left, right]], -1), "batch none")
        for k, w in enumerate(bf16(params["top"])):
            x = x @ w if k == 3 else jax.nn.relu(x @ w)
        logits = x[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()

    plans = picked(data_parallel(16), "dp") | {
        "dim": ManualPlan({"data": 16}, {**DATA, "dim": ("data",)}),
        "rows": ManualPlan({"data": 16}, {**DATA, "rows": ("data",)}),
    }
    return Model("dlrm", "v6e:4x4", params, batch, loss, plans)
