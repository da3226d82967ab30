"""Multi-layer perceptrons, losses, embeddings, narrow matrix products, ensembles."""

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import EPS, dense, integers, normal, program


def mlp_params(width=64, hidden=128, out=16):
    return {
        "up": {"w": dense(width, hidden, seed=1), "b": jnp.zeros(hidden)},
        "down": {"w": dense(hidden, out, seed=2), "b": jnp.zeros(out)},
    }


def mlp(params, x):
    h = jax.nn.gelu(x @ params["up"]["w"] + params["up"]["b"])
    return h @ params["down"]["w"] + params["down"]["b"]


def squares(params, batch):
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def batch_of(rows=64):
    return {"x": normal(rows, 64, seed=3), "y": normal(rows, 16, seed=4)}


@program()
def mlp_forward():
    return mlp, (mlp_params(), normal(64, 64))


@program()
def mlp_grad():
    return jax.grad(squares), (mlp_params(), batch_of())


@program()
def mlp_train_step():
    optimizer = optax.adamw(1e-2, eps=EPS)

    def step(state, batch):
        loss, grads = jax.value_and_grad(squares)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = mlp_params()
    return step, ({"params": params, "opt": optimizer.init(params)}, batch_of())


@program(tolerance=2e-2)
def mlp_mixed_precision():
    """Parameters in float32, products in bfloat16, a scaled loss."""

    def step(params, batch, scale):
        def loss(params):
            low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            y = mlp(low, batch["x"].astype(jnp.bfloat16)).astype(jnp.float32)
            return scale * jnp.mean((y - batch["y"]) ** 2)

        grads = jax.tree.map(lambda g: g / scale, jax.grad(loss)(params))
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), params, grads)
        return new, jnp.where(finite, scale * 2, scale / 2)

    return step, (mlp_params(), batch_of(), jnp.float32(1024))


def token_batch(rows=16, seq=12, vocab=32):
    return {"ids": integers(vocab, rows, seq, seed=5), "labels": integers(vocab, rows, seq, seed=6)}


@program()
def lm_loss_take_along_axis():
    def loss(params, batch):
        x = params["table"][batch["ids"]]
        logp = jax.nn.log_softmax(x @ params["head"])
        picked = jnp.take_along_axis(logp, batch["labels"][..., None], axis=-1)[..., 0]
        weights = (batch["labels"] != 0).astype(jnp.float32)
        return -jnp.sum(picked * weights) / jnp.maximum(weights.sum(), 1)

    params = {"table": normal(32, 64, scale=0.1), "head": dense(64, 32)}
    return jax.value_and_grad(loss), (params, token_batch())


@program()
def lm_loss_logsumexp():
    def loss(params, batch):
        logits = jnp.take(params["table"], batch["ids"], axis=0) @ params["head"]
        top = jax.nn.logsumexp(logits, axis=-1)
        hit = jnp.sum(logits * jax.nn.one_hot(batch["labels"], 32), axis=-1)
        return jnp.mean(top - hit) + 1e-4 * jnp.mean(top**2)

    params = {"table": normal(32, 64, scale=0.1), "head": dense(64, 32)}
    return jax.value_and_grad(loss), (params, token_batch())


@program()
def lm_loss_optax_with_smoothing():
    def loss(params, batch):
        logits = params["table"][batch["ids"]] @ params["head"]
        labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 32), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean()

    params = {"table": normal(32, 64, scale=0.1), "head": dense(64, 32)}
    return jax.value_and_grad(loss), (params, token_batch())


@program()
def tied_embeddings():
    def step(params, batch):
        def loss(params):
            h = jax.nn.relu(params["table"][batch["ids"]] @ params["w"])
            logits = h @ params["table"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, ({"table": normal(32, 64, scale=0.1), "w": dense(64, 64)}, token_batch())


@program()
def int8_matmul():
    """Weights and activations quantised per channel and per row, accumulated in int32."""

    def quantised(x, axis):
        scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
        return jnp.round(x / scale).astype(jnp.int8), scale

    def step(x, w):
        a, sa = quantised(x, 1)
        b, sb = quantised(w, 0)
        c = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return c * sa * sb, c

    return step, (normal(64, 64), dense(64, 32))


@program(tolerance=1e-4)
def fp8_matmul():
    def step(x, w):
        a, b = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    return step, (normal(64, 64), dense(64, 32))


@program()
def ensemble_vmap():
    """Eight models trained at once on the same batch."""

    def one(params, batch):
        loss, grads = jax.value_and_grad(squares)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = jax.tree.map(lambda p: jnp.stack([p * (1 + k / 10) for k in range(8)]), mlp_params())
    return jax.vmap(one, in_axes=(0, None)), (params, batch_of())


@program()
def per_example_gradients():
    """Clipped one by one, as differentially private training does."""

    def step(params, batch):
        grads = jax.vmap(jax.grad(squares), in_axes=(None, 0))(params, batch)
        squared = sum(jnp.sum(g**2, axis=range(1, g.ndim)) for g in jax.tree.leaves(grads))
        factor = jnp.minimum(1, 1 / jnp.sqrt(squared))
        return jax.tree.map(lambda g: jnp.tensordot(factor, g, 1) / len(factor), grads)

    return step, (mlp_params(), batch_of(32))


@program()
def contrastive_loss():
    """Two towers; every row of the batch against every other."""

    def loss(params, a, b):
        a, b = mlp(params["a"], a), mlp(params["b"], b)
        a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
        b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        logits = 10 * a @ b.T
        logp = jax.nn.log_softmax(logits, 1), jax.nn.log_softmax(logits, 0)
        return -(jnp.trace(logp[0]) + jnp.trace(logp[1])) / (2 * len(a))

    params = {"a": mlp_params(), "b": mlp_params()}
    return jax.value_and_grad(loss), (params, normal(32, 64), normal(32, 64, seed=9))
