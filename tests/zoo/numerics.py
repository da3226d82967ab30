"""Sums along, sorts, transforms, factorisations, complex numbers, random numbers."""

import jax
import jax.numpy as jnp

from tests.zoo.program import dense, integers, normal, program

BATCH, N = 16, 32


@program()
def cumulative_sums():
    def step(x):
        return jnp.cumsum(x, 0), jnp.cumsum(x, 1), jnp.cumprod(jnp.tanh(x), 1), jax.lax.cummax(x, 0)

    return step, (normal(BATCH, N),)


@program()
def sorting():
    def step(x, tags):
        order = jnp.argsort(x, axis=-1)
        values, ranked = jax.lax.sort((x, tags), dimension=0, num_keys=1)
        return jnp.sort(x), order, jnp.take_along_axis(x, order, -1), values, ranked

    return step, (normal(BATCH, N), integers(100, BATCH, N))


@program()
def top_k_values():
    def loss(x, w):
        values, places = jax.lax.top_k(x @ w, 4)
        return jnp.mean(values**2), places

    return jax.value_and_grad(loss, has_aux=True), (normal(BATCH, N), dense(N, N))


@program()
def nucleus_sampling():
    """Cut at a cumulative probability, then draw: the same token on any sharding."""

    def step(logits, key):
        order = jnp.argsort(-logits, axis=-1)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        below = jnp.cumsum(jax.nn.softmax(ranked), axis=-1) - jax.nn.softmax(ranked)
        kept = jnp.where(below < 0.9, ranked, -jnp.inf)
        drawn = jax.random.categorical(key, kept, axis=-1)
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]

    return step, (normal(BATCH, N), jax.random.key(3))


@program()
def quantiles():
    def step(x):
        return jnp.median(x, axis=0), jnp.quantile(x, jnp.array([0.1, 0.9]), axis=1)

    return step, (normal(BATCH, N),)


@program()
def histogram():
    def step(x, edges):
        bins = jnp.searchsorted(edges, x.ravel())
        return jnp.bincount(bins, length=9), jnp.digitize(x, edges)

    return step, (normal(BATCH, N), jnp.linspace(-2, 2, 8))


@program(tolerance=1e-4)
def fft_filter():
    def loss(kernel, x):
        y = jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(kernel), n=N)
        return jnp.mean(y**2)

    return jax.value_and_grad(loss), (normal(N), normal(BATCH, N))


@program(tolerance=1e-4)
def fft_mixing():
    """Two-dimensional transforms in the place of attention."""

    def step(w, x):
        return jnp.fft.fft2(x, axes=(-2, -1)).real @ w

    return step, (dense(N, N), normal(BATCH, 8, N))


@program(tolerance=1e-4)
def cholesky_solve():
    def loss(noise, x, y):
        kernel = jnp.exp(-0.5 * (x[:, :, None] - x[:, None, :]) ** 2)
        matrix = kernel + (0.1 + noise**2) * jnp.eye(12)
        factor = jnp.linalg.cholesky(matrix)
        alpha = jax.scipy.linalg.cho_solve((factor, True), y[..., None])[..., 0]
        diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
        return jnp.mean(0.5 * jnp.sum(y * alpha, -1) + jnp.sum(jnp.log(diagonal), -1))

    return jax.value_and_grad(loss), (
        jnp.float32(0.5),
        normal(BATCH, 12),
        normal(BATCH, 12, seed=1),
    )


@program(tolerance=1e-3)
def batched_factorisations():
    def step(a, b):
        q, r = jnp.linalg.qr(a)
        sym = a @ jnp.swapaxes(a, -1, -2) + 2 * jnp.eye(8)
        return (
            jnp.abs(q @ r),
            jnp.linalg.eigvalsh(sym),
            jnp.linalg.solve(sym, b),
            jnp.linalg.slogdet(sym),
        )

    return step, (normal(BATCH, 8, 8), normal(BATCH, 8, 4))


@program(tolerance=1e-4)
def singular_values():
    def step(w):
        return jnp.linalg.svd(w, compute_uv=False), jnp.linalg.norm(w, "nuc")

    return step, (dense(64, 16),)


@program()
def einsum_with_ellipsis():
    def loss(w, x, y):
        z = jnp.einsum("...ij,jk->...ik", x, w)
        return jnp.einsum("...ik,...jk->...ij", z, y).mean() + jnp.einsum("b...->", z**2)

    args = dense(16, 24), normal(BATCH, 2, 6, 16, scale=0.1), normal(BATCH, 2, 5, 24)
    return jax.value_and_grad(loss), args


@program()
def einsum_of_three():
    def step(a, b, c):
        return jnp.einsum("bi,ijk,bk->bj", a, b, c), jnp.einsum("bi,bi->b", a, a)

    return step, (normal(BATCH, N), normal(N, 8, 16, scale=0.05), normal(BATCH, 16))


@program()
def complex_numbers():
    def loss(p, x):
        z = (x + 1j * x[:, ::-1]) @ jax.lax.complex(p["re"], p["im"])
        return jnp.mean(jnp.abs(z) ** 2) + jnp.mean(jnp.angle(z + 3))

    params = {"re": dense(N, 16), "im": dense(N, 16, seed=1)}
    return jax.value_and_grad(loss), (params, normal(BATCH, N))


@program()
def complex_parameters():
    """A linear recurrence with complex poles; a complex gradient."""

    def loss(p, x):
        def body(h, x):
            h = p["pole"] * h + x @ p["in"]
            return h, h.real

        _, ys = jax.lax.scan(body, jnp.zeros((BATCH, 8), jnp.complex64), x)
        return jnp.mean(ys**2)

    params = {
        "pole": 0.9 * jnp.exp(1j * normal(8)),
        "in": jax.lax.complex(dense(N, 8), dense(N, 8, seed=1)),
    }
    return jax.value_and_grad(loss), (params, normal(6, BATCH, N))


@program()
def dropout():
    """The mask depends on the key alone, not on how it is spread."""

    def loss(w, x, key):
        keep = jax.random.bernoulli(key, 0.8, x.shape)
        return jnp.mean((jnp.where(keep, x / 0.8, 0) @ w) ** 2), keep

    return jax.value_and_grad(loss, has_aux=True), (
        dense(N, N),
        normal(BATCH, N),
        jax.random.key(7),
    )


@program()
def random_numbers():
    """Every common distribution, keys split and folded; both kinds of keys."""

    def step(key, old, x):
        a, b, c, d = jax.random.split(key, 4)
        return {
            "key": jax.random.fold_in(key, 1),
            "keys": jax.random.split(a, BATCH),
            "uniform": jax.random.uniform(a, (BATCH, N)),
            "normal": x + jax.random.normal(b, x.shape),
            "randint": jax.random.randint(c, (BATCH, N), 0, 100),
            "truncated": jax.random.truncated_normal(d, -2, 2, (BATCH, N)),
            "permutation": jax.random.permutation(a, BATCH),
            "categorical": jax.random.categorical(b, x),
            "old": jax.random.normal(old, (BATCH,)),
            "bits": jax.random.bits(c, (BATCH, 4)),
        }

    return step, (jax.random.key(0), jax.random.PRNGKey(1), normal(BATCH, N))


@program(tolerance=1e-4)
def random_rejection():
    """Gamma and Poisson draws loop until they accept."""

    def step(key, rate):
        return (
            jax.random.gamma(key, rate),
            jax.random.poisson(key, rate),
            jax.random.beta(key, rate, 2.0),
        )

    return step, (jax.random.key(2), 1 + jnp.abs(normal(BATCH)))


@program()
def keys_per_row():
    def step(keys, x):
        return jax.vmap(lambda k, x: x * jax.random.normal(k, x.shape))(keys, x)

    return step, (jax.random.split(jax.random.key(0), BATCH), normal(BATCH, N))


@program()
def random_bits_rbg():
    def step(key, x):
        return x + jax.random.uniform(key, x.shape)

    return step, (jax.random.key(0, impl="rbg"), normal(BATCH, N))


@program(tolerance=1e-4)
def special_functions():
    def loss(x):
        y = jnp.abs(x) + 0.5
        terms = (
            jax.scipy.special.gammaln(y),
            jax.scipy.special.digamma(y),
            jax.scipy.special.erf(x),
            jax.scipy.special.logit(jax.nn.sigmoid(x)),
            jax.scipy.special.gammainc(2.0, y),
            jax.scipy.stats.norm.logcdf(x),
        )
        return sum(jnp.mean(t) for t in terms)

    return jax.value_and_grad(loss), (normal(BATCH, N),)


@program()
def interpolation_and_gathers():
    def step(x, table, where):
        y = jnp.interp(x, jnp.linspace(-3, 3, 8), jnp.arange(8.0) ** 2)
        picked = table[where, :, where[::-1]]
        return y, picked, table[:, 1:5:2, ::-1], jnp.roll(table, (1, 2), (0, 1))

    return step, (normal(BATCH, N), normal(BATCH, 8, 16), integers(BATCH, 24))


@program()
def scatters():
    def step(x, rows, values):
        y = x.at[rows].add(values)
        return y, x.at[rows].max(values), x.at[2:6, ::3].set(0.0), x.at[rows, 1].multiply(2.0)

    return step, (normal(BATCH, N), integers(BATCH, 6), normal(6, N))


@program()
def convolve_and_unfold():
    def step(x, kernel):
        rows = jax.vmap(lambda r: jnp.convolve(r, kernel, mode="same"))(x)
        windows = jax.lax.conv_general_dilated_patches(x[:, None, :], (4,), (2,), "VALID")
        return rows, windows

    return step, (normal(BATCH, N), normal(5))
