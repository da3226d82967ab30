"""Regions that the planner can't look into, and what they declare about themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

from tests.zoo.program import dense, normal, program

ROWS, WIDTH = 32, 64


@program()
def shard_map_own_mesh():
    """A region over the user's own mesh, between products that are the planner's."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    def region(x):
        total = jax.lax.psum(x.sum(0, keepdims=True), "rows")
        return x - total / ROWS

    inner = jax.shard_map(region, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))

    def step(w, x):
        return jnp.tanh(inner(x @ w)) @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def shard_map_with_gradient():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    def region(x, w):
        return jnp.tanh(x @ w)

    def loss(w, x):
        return jnp.mean((region(x, w) @ w) ** 2)

    return jax.value_and_grad(loss), (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


def _double_kernel(x_ref, o_ref):
    o_ref[...] = jnp.maximum(x_ref[...], 0) * 2


def relu2(x):
    return pl.pallas_call(
        _double_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


@program()
def pallas_kernel_opaque():
    def step(w, x):
        return relu2(x @ w) @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


def _matmul_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] @ w_ref[...]


@program()
def pallas_kernel_with_grid():
    def product(x, w):
        return pl.pallas_call(
            _matmul_kernel,
            grid=(4, 4),
            in_specs=[
                pl.BlockSpec((8, WIDTH), lambda i, j: (i, 0)),
                pl.BlockSpec((WIDTH, 16), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((ROWS, WIDTH), x.dtype),
            interpret=True,
        )(x, w)

    def step(w, x):
        return jnp.tanh(product(x, w)) @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@custom_partitioning
def declared(x, w):
    return jnp.tanh(x @ w)


def _partition(mesh, arg_shapes, result_shape):
    def lower(x, w):
        return jnp.tanh(x @ w)

    args = tuple(a.sharding for a in arg_shapes)
    return mesh, lower, result_shape.sharding, args


declared.def_partition(
    partition=_partition,
    sharding_rule="i k, k j -> i j",
    need_replication_factors=("k",),
)


@program()
def custom_partitioning_rule():
    def step(w, x):
        return declared(x, w) @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@custom_partitioning
def declared_kernel(x):
    return relu2(x)


declared_kernel.def_partition(
    partition=lambda mesh, args, result: (
        mesh,
        relu2,
        result.sharding,
        tuple(a.sharding for a in args),
    ),
    sharding_rule="i j -> i j",
)


@program()
def pallas_kernel_with_rule():
    def step(w, x):
        return declared_kernel(x @ w) @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def pallas_kernel_with_gradient():
    """The usual wrapping of a kernel: forward opaque, backward written in jax."""

    @jax.custom_vjp
    def kernel(x):
        return relu2(x)

    kernel.defvjp(lambda x: (relu2(x), x), lambda x, g: (jnp.where(x > 0, 2 * g, 0),))

    def loss(w, x):
        return jnp.mean((kernel(x @ w) @ w) ** 2)

    return jax.value_and_grad(loss), (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def pure_callback():
    """A function of the host, in the middle."""

    def host(x):
        return np.sort(np.asarray(x), axis=-1)

    def step(w, x):
        h = x @ w
        y = jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
        return y @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def debug_print():
    def step(w, x):
        y = x @ w
        jax.debug.print("mean {m}", m=y.mean())
        return jnp.tanh(y)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def debug_print_in_scan():
    def step(w, x):
        def body(x, k):
            jax.debug.print("layer {k}: {m}", k=k, m=x.max())
            return jnp.tanh(x @ w), x.mean()

        return jax.lax.scan(body, x, jnp.arange(3))

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def debug_callback_in_cond():
    def step(w, x):
        y = x @ w

        def report(y):
            jax.debug.callback(lambda m: None, y.mean())
            return y * 2

        return jax.lax.cond(y.mean() > 0, report, lambda y: y, y)

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def sharding_constraint_inside():
    """A constraint of the user's own that names no axis: the value is whole there."""

    def step(w, x):
        mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        whole = jax.sharding.NamedSharding(mesh, P())
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), whole) @ w

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))


@program()
def optimization_barrier():
    def step(w, x):
        a, b = jax.lax.optimization_barrier((x @ w, w * 2))
        return a @ b

    return step, (dense(WIDTH, WIDTH), normal(ROWS, WIDTH))
