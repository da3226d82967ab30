"""Loops, branches, custom derivatives, derivatives of derivatives."""

import functools

import jax
import jax.numpy as jnp

from tests.zoo.program import dense, integers, normal, program

ROWS, WIDTH = 32, 64


@program(tolerance=1e-4)
def while_loop_conjugate_gradient():
    def step(a, b):
        def apply(x):
            return a @ x + 4 * x

        def unfinished(state):
            _, r, _, n = state
            return (jnp.vdot(r, r) > 1e-8) & (n < 40)

        def advance(state):
            x, r, p, n = state
            q = apply(p)
            alpha = jnp.vdot(r, r) / jnp.vdot(p, q)
            new = r - alpha * q
            beta = jnp.vdot(new, new) / jnp.vdot(r, r)
            return x + alpha * p, new, new + beta * p, n + 1

        return jax.lax.while_loop(unfinished, advance, (jnp.zeros_like(b), b, b, 0))[0]

    a = dense(WIDTH, WIDTH)
    return step, ((a @ a.T) / 4, normal(WIDTH))


@program()
def fori_loop_jacobi():
    def step(a, b):
        diagonal = 4.0
        return jax.lax.fori_loop(0, 10, lambda _, x: (b - a @ x) / diagonal, jnp.zeros_like(b))

    return step, (dense(WIDTH, WIDTH), normal(WIDTH, 16))


@program()
def fori_loop_writes_rows():
    """A buffer that is filled row by row, and a loop index that is traced."""

    def step(x, w, count):
        def body(i, buffer):
            row = jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(buffer, jnp.tanh(row @ w), i, axis=1)

        return jax.lax.fori_loop(0, count, body, jnp.zeros_like(x))

    return step, (normal(ROWS, 6, WIDTH), dense(WIDTH, WIDTH), jnp.int32(4))


@program()
def cond_both_branches():
    def loss(w, x, flag):
        y = jax.lax.cond(flag, lambda x: jax.nn.relu(x @ w), lambda x: jnp.sin(x) @ w, x)
        return jnp.mean(y**2)

    return jax.value_and_grad(loss), (dense(WIDTH, WIDTH), normal(ROWS, WIDTH), jnp.bool_(True))


@program()
def cond_switch():
    def step(w, x, which):
        branches = [lambda x: x @ w, lambda x: x * 2, lambda x: jnp.flip(x, 0)]
        return jax.lax.switch(which, branches, x)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH), jnp.int32(2))


@program()
def cond_vmapped():
    """A condition per row becomes a select."""

    def one(w, x, flag):
        return jax.lax.cond(flag, lambda x: x @ w, lambda x: -x, x)

    step = jax.vmap(one, in_axes=(None, 0, 0))
    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH), integers(2, ROWS).astype(bool))


@program()
def newton_vmapped_while():
    """Each row stops at its own iteration."""

    def root(a):
        def unfinished(state):
            return (jnp.abs(state[0] ** 2 - a) > 1e-4) & (state[1] < 30)

        def advance(state):
            x, n = state
            return 0.5 * (x + a / x), n + 1

        return jax.lax.while_loop(unfinished, advance, (a, 0))

    return jax.vmap(root), (1 + jnp.abs(normal(ROWS)),)


@program()
def custom_vjp_clipped_gradient():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def clipped(x, limit):
        return x

    def forward(x, limit):
        return x, None

    def backward(limit, _, g):
        return (jnp.clip(g, -limit, limit),)

    clipped.defvjp(forward, backward)

    def loss(w, x):
        return jnp.sum(clipped(jnp.tanh(x @ w), 0.01) ** 2)

    return jax.value_and_grad(loss), (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program(tolerance=1e-4)
def custom_vjp_recompute():
    """The layer keeps its input only, and makes the rest again."""

    def layer(x, w):
        return jax.nn.gelu(x @ w)

    @jax.custom_vjp
    def frugal(x, w):
        return layer(x, w)

    frugal.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda saved, g: jax.vjp(layer, *saved)[1](g))

    def loss(ws, x):
        for w in ws:
            x = frugal(x, w)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss), (
        [dense(WIDTH, WIDTH, seed=s) for s in (0, 1)],
        normal(ROWS, WIDTH),
    )


@program()
def custom_jvp_log1pexp():
    @jax.custom_jvp
    def log1pexp(x):
        return jnp.log1p(jnp.exp(x))

    @log1pexp.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return log1pexp(x), jax.nn.sigmoid(x) * t

    def loss(w, x):
        return jnp.mean(log1pexp(x @ w))

    return jax.value_and_grad(loss), (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def straight_through_estimator():
    def loss(w, x):
        y = x @ w
        return jnp.mean((y + jax.lax.stop_gradient(jnp.round(y) - y)) ** 2)

    return jax.value_and_grad(loss), (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


def net(ws, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)


@program(tolerance=1e-4)
def grad_of_grad():
    """A gradient penalty."""

    def loss(ws, x):
        slope = jax.grad(net, argnums=1)(ws, x)
        return jnp.mean((jnp.sqrt(jnp.sum(slope**2, -1) + 1e-6) - 1) ** 2)

    return jax.value_and_grad(loss), ([dense(WIDTH, 32), dense(32, 8)], normal(ROWS, WIDTH))


@program(tolerance=1e-4)
def hessian_vector_product():
    def step(ws, x, v):
        return jax.jvp(jax.grad(functools.partial(net, x=x)), (ws,), (v,))[1]

    ws = [dense(WIDTH, 32), dense(32, 8)]
    return step, (ws, normal(ROWS, WIDTH), jax.tree.map(jnp.ones_like, ws))


@program(tolerance=1e-4)
def hessian_full():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    return jax.hessian(loss), (normal(16, scale=0.2), normal(ROWS, 16))


@program(tolerance=1e-4)
def inner_loop_meta_gradient():
    """The gradient through three steps of training."""

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def outer(w, x, y):
        adapted = jax.lax.fori_loop(0, 3, lambda _, w: w - 0.1 * jax.grad(loss)(w, x, y), w)
        return loss(adapted, x, y)

    return jax.value_and_grad(outer), (dense(WIDTH, 16), normal(ROWS, WIDTH), normal(ROWS, 16))


@program()
def implicit_custom_root():
    """The derivative of a fixed point, by a linear solve in place of the loop."""

    def loss(w, x):
        def fixed(z):
            return jnp.tanh(z @ w + x) - z

        def solve(f, z):
            return jax.lax.fori_loop(0, 20, lambda _, z: z + f(z), z)

        def tangent(g, y):
            return jax.lax.fori_loop(0, 20, lambda _, z: z + g(z) - y, -y)

        return jnp.mean(jax.lax.custom_root(fixed, jnp.zeros_like(x), solve, tangent) ** 2)

    return jax.value_and_grad(loss), (0.3 * dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def map_over_rows():
    def step(w, x):
        return jax.lax.map(lambda row: jnp.sort(jnp.tanh(row @ w)), x, batch_size=8)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))
