"""Rare primitives: composites, custom batching, references, exported calls, sparse matrices,
solvers of scipy, platform branches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, sparse

from tests.zoo.program import dense, integers, normal, program

ROWS, WIDTH = 32, 64


@program()
def composite_function():
    @functools.partial(jax.lax.composite, name="zoo.gelu")
    def gelu(x):
        return 0.5 * x * (1 + jnp.tanh(0.8 * x))

    return lambda w, x: gelu(x @ w) @ w, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def custom_vmap_rule():
    @jax.custom_batching.custom_vmap
    def scaled(x):
        return jnp.sin(x) * 2

    @scaled.def_vmap
    def _(size, batched, x):
        return jnp.sin(x) * 2, batched[0]

    return lambda w, x: scaled(x @ w) + jax.vmap(scaled)(x), (
        dense(WIDTH, WIDTH),
        normal(ROWS, WIDTH),
    )


@program()
def platform_branches():
    def step(w, x):
        y = jax.lax.platform_dependent(x @ w, cpu=jnp.tanh, default=jnp.sin)
        return y @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def mutable_references():
    """An accumulator that is written in place inside the step."""

    def step(w, x):
        total = jax.new_ref(jnp.zeros((ROWS, WIDTH)))

        def body(k, _):
            total[...] += jnp.tanh(x @ w) * k
            return _

        jax.lax.fori_loop(0, 3, body, None)
        total[0] = jnp.ones(WIDTH)
        return total[...] @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def exported_call():
    """A function that was exported, as a deserialised one is."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, WIDTH), (WIDTH, WIDTH))]
    exported = jax.export.export(jax.jit(lambda x, w: jnp.tanh(x @ w)), platforms=["cpu"])(*shapes)
    return lambda w, x: exported.call(x, w) @ w, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def host_counter():
    """A callback with a side effect."""

    def step(w, x):
        y = jnp.tanh(x @ w)
        io_callback(lambda m: None, None, y.mean())
        return y

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def sparse_matrix_product():
    matrix = np.asarray(normal(ROWS, ROWS)) * (np.arange(ROWS)[:, None] % 4 == np.arange(ROWS) % 4)
    bcoo = sparse.BCOO.fromdense(jnp.asarray(matrix))

    def step(m, x, w):
        return m @ (x @ w)

    return step, (bcoo, normal(ROWS, WIDTH), dense(WIDTH, WIDTH))


@program()
def reduce_of_own_making():
    """A reduction over two arrays at once: the largest and where it stands."""

    def pick(a, b):
        first = a[0] >= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    def step(x):
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jax.lax.reduce((x, places), (-jnp.inf, jnp.int32(0)), pick, (1,))

    return step, (normal(ROWS, WIDTH),)


@program()
def vmapped_axis_names():
    def one(x):
        return (
            x - jax.lax.pmean(x, "rows"),
            jax.lax.all_gather(x.sum(), "rows"),
            jax.lax.axis_index("rows"),
        )

    return jax.vmap(one, axis_name="rows"), (normal(ROWS, WIDTH),)


@program(tolerance=1e-3)
def scipy_conjugate_gradient():
    def loss(scale, b):
        x, _ = jax.scipy.sparse.linalg.cg(lambda v: v * (1 + scale**2), b, maxiter=5)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss), (normal(WIDTH, scale=0.1), normal(ROWS, WIDTH))


@program(tolerance=1e-3)
def linear_solve_batched():
    """``custom_linear_solve`` and its transpose, a matrix per row."""

    def loss(a, b):
        return jnp.mean(jnp.linalg.solve(a + 4 * jnp.eye(8), b) ** 2)

    return jax.value_and_grad(loss), (normal(ROWS, 8, 8), normal(ROWS, 8, 2))


@program(tolerance=1e-3)
def matrix_functions():
    def step(a):
        return jax.scipy.linalg.expm(a / 8), jnp.linalg.pinv(a), jnp.linalg.matrix_power(a / 4, 3)

    return step, (normal(16, 8, 8),)


@program(tolerance=1e-3)
def ordinary_differential_equation():
    from jax.experimental.ode import odeint

    def loss(w, x):
        path = odeint(lambda x, t: jnp.tanh(x @ w) - x, x, jnp.linspace(0.0, 1.0, 3))
        return jnp.mean(path[-1] ** 2)

    return jax.value_and_grad(loss), (dense(16, 16), normal(ROWS, 16))


@program(tolerance=1e-3)
def minimise_bfgs():
    from jax.scipy.optimize import minimize

    def step(a, b):
        def objective(x):
            return jnp.sum((a @ x - b) ** 2)

        return minimize(objective, jnp.zeros(8), method="BFGS", options={"maxiter": 5}).x

    return step, (dense(ROWS, 8), normal(ROWS))


@program()
def sizes_fixed_by_hand():
    """Functions whose results would have data-dependent sizes."""

    def step(x):
        n = jnp.round(x[:, 0] * 3).astype(jnp.int32)
        return jnp.unique(n, size=12), jnp.nonzero(n, size=12), jnp.where(n > 0, size=8)

    return step, (normal(ROWS, WIDTH),)


@program()
def integer_gradients():
    """Integer arguments have gradients of dtype float0; they are dropped by the step."""

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"])[p["rows"]] ** 2)

    def step(p, x):
        return jax.grad(loss, allow_int=True)(p, x)["w"]

    return step, ({"w": dense(WIDTH, WIDTH), "rows": integers(ROWS, 16)}, normal(ROWS, WIDTH))


@program()
def empty_arrays():
    def step(x, w):
        none = x[:0]
        return jnp.concatenate([none, x]) @ w, none @ w, jnp.sum(none, axis=0)

    return step, (normal(ROWS, WIDTH), dense(WIDTH, WIDTH))


@program()
def approximate_top_k():
    def step(w, x):
        return jax.lax.approx_max_k(x @ w, 4)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def named_scopes_and_calls():
    @jax.named_call
    def inner(x, w):
        with jax.named_scope("inside"):
            return jnp.tanh(x @ w)

    def step(w, x):
        with jax.named_scope("outside"):
            return inner(inner(x, w), w)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def closed_over_constants():
    """Weights that are not arguments."""
    w, table = dense(WIDTH, WIDTH), np.asarray(normal(16, WIDTH))

    def step(x, ids):
        return jnp.tanh(x @ w) + jnp.asarray(table)[ids]

    return step, (normal(ROWS, WIDTH), integers(16, ROWS))


@program()
def jaxpr_with_jit_inside():
    inner = jax.jit(lambda x, w, flag: jnp.tanh(x @ w) if flag else x, static_argnums=2)

    def step(w, x):
        return inner(inner(x, w, True), w, True) + inner(x, w, False)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def scalar_prefetch_of_rows():
    """Rows picked one after the other by dynamic slices in a scan."""

    def step(table, ids, w):
        def body(total, i):
            row = jax.lax.dynamic_slice_in_dim(table, i, 1)
            return total + jnp.tanh(row @ w), row[0, 0]

        return jax.lax.scan(body, jnp.zeros((1, WIDTH)), ids)

    return step, (normal(ROWS, WIDTH), integers(ROWS, 8), dense(WIDTH, WIDTH))
