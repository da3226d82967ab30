"""Decoder blocks in NNX and Linen, scans over layers, rematerialisation."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from tests.zoo.attention import self_attention, weights
from tests.zoo.program import EPS, dense, integers, normal, program

WIDTH, HEADS, SEQ, BATCH, VOCAB = 64, 4, 16, 8, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)])
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


@functools.cache
def block():
    graphdef, params = nnx.split(Block(nnx.Rngs(0)), nnx.Param)
    return graphdef, params


def nnx_loss(params, x):
    return jnp.mean(nnx.merge(block()[0], params)(x) ** 2)


@program()
def decoder_nnx_forward():
    graphdef, params = block()
    return lambda params, x: nnx.merge(graphdef, params)(x), (params, normal(BATCH, SEQ, WIDTH))


@program()
def decoder_nnx_grad():
    return jax.grad(nnx_loss), (block()[1], normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def decoder_nnx_train_step():
    optimizer = optax.adamw(1e-3, eps=EPS)

    def step(params, opt, x):
        loss, grads = jax.value_and_grad(nnx_loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    params = block()[1]
    return step, (params, optimizer.init(params), normal(BATCH, SEQ, WIDTH))


class LinenBlock(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train=False):
        y = linen.LayerNorm()(x)
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + linen.MultiHeadDotProductAttention(num_heads=HEADS)(y, y, mask=mask)
        y = linen.gelu(linen.Dense(2 * WIDTH)(linen.RMSNorm()(x)))
        y = linen.Dropout(self.rate, deterministic=not train)(y)
        return x + linen.Dense(WIDTH)(y)


@functools.cache
def linen_params():
    return jax.jit(LinenBlock().init)(jax.random.key(0), jnp.zeros((1, SEQ, WIDTH)))


def linen_loss(params, x):
    return jnp.mean(LinenBlock().apply(params, x) ** 2)


@program()
def decoder_linen_forward():
    return LinenBlock().apply, (linen_params(), normal(BATCH, SEQ, WIDTH))


@program()
def decoder_linen_grad():
    return jax.grad(linen_loss), (linen_params(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def decoder_linen_train_step():
    """With dropout; the key of a step is folded from its number."""
    optimizer = optax.adam(1e-3, eps=EPS)
    model = LinenBlock(rate=0.1)

    def step(state, x):
        key = jax.random.fold_in(jax.random.key(1), state["step"])

        def loss_fn(params):
            return jnp.mean(model.apply(params, x, train=True, rngs={"dropout": key}) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, loss

    state = {"params": linen_params(), "opt": optimizer.init(linen_params()), "step": jnp.int32(3)}
    return step, (state, normal(BATCH, SEQ, WIDTH))


def layers(count=4):
    one = {**weights(), "up": dense(WIDTH, 128), "down": dense(128, WIDTH)}
    return jax.tree.map(lambda p: jnp.stack([p * (1 - k / 20) for k in range(count)]), one)


def layer(x, p):
    x = x + self_attention(p, x)
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def stacked(params, x, wrap=lambda f: f):
    body = wrap(lambda x, p: (layer(x, p), None))
    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


@program(tolerance=1e-4)
def scan_over_layers():
    return jax.value_and_grad(stacked), (layers(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def scan_over_layers_remat():
    wrap = functools.partial(jax.checkpoint, prevent_cse=False)
    loss = functools.partial(stacked, wrap=wrap)
    return jax.value_and_grad(loss), (layers(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def remat_dots_policy():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    loss = functools.partial(stacked, wrap=functools.partial(jax.checkpoint, policy=policy))
    return jax.value_and_grad(loss), (layers(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def remat_named_policy():
    def loss(params, x):
        def one(x, p):
            h = checkpoint_name(jax.nn.relu(x @ p["up"]), "hidden")
            return x + h @ p["down"]

        keep = jax.checkpoint(one, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
        for k in range(4):
            x = keep(x, jax.tree.map(lambda p, k=k: p[k], params))
        return jnp.mean(x**2)

    return jax.value_and_grad(loss), (layers(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def remat_offload_policy():
    """Nothing saved of the inner blocks; a remat inside a remat."""

    def loss(params, x):
        inner = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)

        @jax.checkpoint
        def two(x, a, b):
            return inner(inner(x, a), b)

        parts = [jax.tree.map(lambda p, k=k: p[k], params) for k in range(4)]
        return jnp.mean(two(two(x, *parts[:2]), *parts[2:]) ** 2)

    return jax.value_and_grad(loss), (layers(), normal(BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def nested_scan():
    """Microbatches outside, layers inside; gradients are summed."""

    def step(params, x):
        def micro(total, x):
            loss, grads = jax.value_and_grad(stacked)(params, x)
            return jax.tree.map(jnp.add, total, grads), loss

        zero = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(micro, zero, x.reshape(2, BATCH, SEQ, WIDTH))

    return step, (layers(2), normal(2 * BATCH, SEQ, WIDTH))


@program(tolerance=1e-4)
def linen_scan_with_remat():
    class Body(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(x))), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            x = linen.Embed(VOCAB, WIDTH)(ids)
            scanned = linen.scan(
                linen.remat(Body, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = scanned()(x, None)
            return linen.Dense(VOCAB)(linen.LayerNorm()(x))

    model, ids = Model(), integers(VOCAB, BATCH, SEQ)
    params = jax.jit(model.init)(jax.random.key(0), ids)

    def loss(params, ids):
        logits = model.apply(params, ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    return jax.value_and_grad(loss), (params, ids)


@program(tolerance=1e-4)
def nnx_scan_over_layers():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + nnx.gelu(self.linear(self.norm(x)))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Layer(rngs)

    graphdef, params = nnx.split(make(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return layer(x)

        return jnp.mean(forward(x, nnx.merge(graphdef, params)) ** 2)

    return jax.value_and_grad(loss), (params, normal(BATCH, SEQ, WIDTH))
