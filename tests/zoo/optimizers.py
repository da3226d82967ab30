"""Optimizers: accumulation, clipping, factored and preconditioned ones, LoRA, averages."""

import functools

import jax
import jax.numpy as jnp
import optax

from tests.zoo.dense import batch_of, mlp, mlp_params, squares
from tests.zoo.program import EPS, dense, program


def training(optimizer):
    """A train step of the perceptron, and its arguments."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(squares)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = mlp_params()
    return step, ({"params": params, "opt": optimizer.init(params)}, batch_of())


@program()
def sgd_momentum_schedule():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    return training(optax.sgd(schedule, momentum=0.9, nesterov=True))


@program()
def gradient_accumulation_multisteps():
    return training(optax.MultiSteps(optax.adam(1e-2, eps=EPS), every_k_schedule=4))


@program()
def gradient_accumulation_scan():
    """Microbatches in a scan, one update."""
    optimizer = optax.adam(1e-2, eps=EPS)

    def step(state, batch):
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)

        def micro(total, part):
            loss, grads = jax.value_and_grad(squares)(state["params"], part)
            return jax.tree.map(jnp.add, total, grads), loss

        zero = jax.tree.map(jnp.zeros_like, state["params"])
        total, losses = jax.lax.scan(micro, zero, parts)
        grads = jax.tree.map(lambda g: g / 4, total)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, losses.mean()

    params = mlp_params()
    return step, ({"params": params, "opt": optimizer.init(params)}, batch_of())


@program()
def global_norm_clipping():
    return training(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=EPS)))


@program(tolerance=1e-4)
def adafactor():
    return training(optax.adafactor(1e-2, min_dim_size_to_factor=16))


@program()
def lion():
    return training(optax.lion(1e-3))


@program(tolerance=1e-4)
def lamb():
    return training(optax.lamb(1e-2, eps=EPS))


@program()
def masked_weight_decay():
    masked = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    decay = optax.masked(optax.add_decayed_weights(0.1), masked)
    return training(optax.chain(optax.scale_by_adam(eps=EPS), decay, optax.scale(-1e-2)))


@program(tolerance=2e-3)
def shampoo_like():
    """Two preconditioners per matrix, inverse roots by eigendecomposition."""

    def root(matrix):
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def step(state, batch):
        grads = jax.grad(squares)(state["params"], batch)

        def one(p, g, left, right):
            if p.ndim < 2:
                return p - 0.1 * g, left, right
            left, right = left + g @ g.T, right + g.T @ g
            return p - 0.1 * root(left) @ g @ root(right), left, right

        made = jax.tree.map(one, state["params"], grads, state["left"], state["right"])
        new = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), made)
        return dict(zip(("params", "left", "right"), new, strict=True))

    params = mlp_params(32, 32, 16)
    batch = jax.tree.map(lambda x: x[:, :32], batch_of())
    left = jax.tree.map(lambda p: jnp.eye(p.shape[0]), params)
    right = jax.tree.map(lambda p: jnp.eye(p.shape[-1]), params)
    return step, ({"params": params, "left": left, "right": right}, batch)


@program(tolerance=1e-3)
def muon_newton_schulz():
    """The momentum of a matrix is orthogonalised by a short loop of products."""

    def orthogonal(g):
        x = g / (jnp.linalg.norm(g) + 1e-7)

        def body(_, x):
            a = x @ x.T
            return 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x

        return jax.lax.fori_loop(0, 5, body, x)

    def step(params, momentum, batch):
        grads = jax.grad(squares)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        updates = jax.tree.map(lambda m: orthogonal(m) if m.ndim == 2 else m, momentum)
        return jax.tree.map(lambda p, u: p - 0.02 * u, params, updates), momentum

    params = mlp_params()
    return step, (params, jax.tree.map(jnp.zeros_like, params), batch_of())


@program()
def lora_frozen_parameters():
    """The base stays as it is; only the thin factors have gradients and moments."""
    optimizer = optax.adam(1e-2, eps=EPS)

    def step(frozen, state, batch):
        def loss(lora):
            merged = {
                name: {"w": p["w"] + lora[name]["a"] @ lora[name]["b"], "b": p["b"]}
                for name, p in frozen.items()
            }
            return jnp.mean((mlp(merged, batch["x"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["lora"])
        updates, opt = optimizer.update(grads, state["opt"])
        return {"lora": optax.apply_updates(state["lora"], updates), "opt": opt}, value

    lora = {
        "up": {"a": dense(64, 4), "b": jnp.zeros((4, 128))},
        "down": {"a": dense(128, 4), "b": jnp.zeros((4, 16))},
    }
    return step, (mlp_params(), {"lora": lora, "opt": optimizer.init(lora)}, batch_of())


@program()
def multi_transform():
    """Matrices by one rule, biases frozen."""
    labels = functools.partial(jax.tree.map, lambda p: "train" if p.ndim > 1 else "freeze")
    rules = {"train": optax.adam(1e-2, eps=EPS), "freeze": optax.set_to_zero()}
    return training(optax.multi_transform(rules, labels))


@program()
def ema_copies():
    """A second copy of the parameters that follows the first."""

    def step(params, average, batch):
        grads = jax.grad(squares)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, optax.incremental_update(params, average, 0.01)

    return step, (mlp_params(), mlp_params(), batch_of())


@program()
def distillation_with_target_network():
    """A student learns from a teacher that is copied from it now and then."""

    def step(student, teacher, batch, count):
        target = jax.lax.stop_gradient(mlp(teacher, batch["x"]))
        grads = jax.grad(lambda p: jnp.mean((mlp(p, batch["x"]) - target) ** 2))(student)
        student = jax.tree.map(lambda p, g: p - 0.1 * g, student, grads)
        copy = optax.periodic_update(student, teacher, count, 10)
        return student, copy, count + 1

    return step, (
        mlp_params(),
        jax.tree.map(lambda p: 2 * p, mlp_params()),
        batch_of(),
        jnp.int32(9),
    )


@program(tolerance=1e-4)
def lbfgs_update():
    return training(optax.scale_by_lbfgs(memory_size=3))


@program()
def sharpness_aware():
    """A second gradient at the worst neighbour."""

    def step(params, batch):
        grads = jax.grad(squares)(params, batch)
        norm = optax.global_norm(grads)
        near = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        grads = jax.grad(squares)(near, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step, (mlp_params(), batch_of())
