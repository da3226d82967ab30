"""Convolutions, batch normalisation with statistics, residual nets, a U-Net."""

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.zoo.program import dense, integers, normal, program

NHWC = ("NHWC", "HWIO", "NHWC")
BATCH = 16


def conv(x, w, stride=1, groups=1, padding="SAME"):
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=NHWC, feature_group_count=groups
    )


def filters(size, into, out, seed=0):
    return normal(size, size, into, out, seed=seed, scale=(size * size * into) ** -0.5)


def mean_square(apply):
    return jax.value_and_grad(lambda p, *args: jnp.mean(apply(p, *args) ** 2))


@program()
def conv1d():
    def apply(w, x):
        out = jax.lax.conv_general_dilated(
            x, w, (1,), [(2, 0)], rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jax.nn.relu(out)

    return mean_square(apply), (normal(2, 16, 32, scale=0.2), normal(BATCH, 24, 16))


@program()
def conv2d():
    apply = jax.jit(lambda w, x: jax.nn.relu(conv(x, w, stride=2)))
    return mean_square(apply), (filters(3, 8, 32), normal(BATCH, 12, 12, 8))


@program()
def conv2d_channels_first():
    def apply(w, x):
        return jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))

    return mean_square(apply), (normal(16, 8, 3, 3, scale=0.1), normal(BATCH, 8, 10, 10))


@program()
def conv_depthwise_separable():
    def apply(p, x):
        y = conv(x, p["depth"], groups=16)
        return conv(jax.nn.relu(y), p["point"])

    params = {"depth": filters(3, 1, 16), "point": filters(1, 16, 32)}
    return mean_square(apply), (params, normal(BATCH, 10, 10, 16))


@program()
def conv_grouped():
    def apply(w, x):
        return conv(x, w, groups=4)

    return mean_square(apply), (filters(3, 4, 32), normal(BATCH, 8, 8, 16))


@program()
def conv_transposed():
    def apply(w, x):
        return jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC)

    return mean_square(apply), (filters(4, 16, 8), normal(BATCH, 6, 6, 16))


@program()
def pooling():
    def apply(w, x):
        x = conv(x, w)
        top = linen.max_pool(x, (2, 2), strides=(2, 2))
        return top + linen.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME")

    return mean_square(apply), (filters(3, 4, 16), normal(BATCH, 8, 8, 4))


@program(tolerance=1e-4)
def batch_norm_with_statistics():
    """NNX: the running statistics are state that the step gives back."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(4, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.head = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, rest, x, labels):
        def loss(params):
            net = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest))
            net.train()
            logp = jax.nn.log_softmax(net(x))
            picked = jnp.take_along_axis(logp, labels[:, None], 1)
            return -picked.mean(), nnx.split(net, nnx.Param, ...)[2]

        (value, rest_new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest_new, value

    return step, (params, rest, normal(BATCH, 8, 8, 4), integers(10, BATCH))


class Residual(linen.Module):
    width: int
    stride: int = 1

    @linen.compact
    def __call__(self, x, train=True):
        norm = {"use_running_average": not train, "momentum": 0.9}
        y = linen.relu(linen.BatchNorm(**norm)(x))
        if self.stride != 1 or x.shape[-1] != self.width:
            x = linen.Conv(self.width, (1, 1), (self.stride,) * 2, use_bias=False)(y)
        y = linen.Conv(self.width, (3, 3), (self.stride,) * 2, use_bias=False)(y)
        y = linen.relu(linen.BatchNorm(**norm)(y))
        return x + linen.Conv(self.width, (3, 3), use_bias=False)(y)


class ResNet(linen.Module):
    widths: tuple[int, ...]
    blocks: int = 1

    @linen.compact
    def __call__(self, x, train=True):
        x = linen.Conv(self.widths[0], (3, 3))(x)
        for k, width in enumerate(self.widths):
            for n in range(self.blocks):
                x = Residual(width, 2 if k and not n else 1)(x, train)
        return linen.Dense(10)(linen.relu(x).mean((1, 2)))


def resnet_step(model):
    images, labels = normal(BATCH, 8, 8, 3), integers(10, BATCH)
    variables = jax.jit(model.init)(jax.random.key(0), images)

    def step(variables, images, labels):
        def loss(params):
            state = {"params": params, "batch_stats": variables["batch_stats"]}
            logits, new = model.apply(state, images, mutable=["batch_stats"])
            logp = jax.nn.log_softmax(logits)
            return -jnp.mean(logp[jnp.arange(BATCH), labels]), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, variables["params"], grads)
        return {"params": params, "batch_stats": stats}, value

    return step, (variables, images, labels)


@program(tolerance=2e-4)
def resnet_train_step():
    return resnet_step(ResNet((8, 16), blocks=1))


@program(tolerance=2e-4)
def wide_resnet_train_step():
    return resnet_step(ResNet((32,), blocks=2))


@program(tolerance=1e-4)
def unet_with_skips():
    """Two levels down and up; the skips are concatenated."""

    def apply(p, x):
        skips = []
        for w in p["down"]:
            x = jax.nn.silu(conv(x, w))
            skips.append(x)
            x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
        x = jax.nn.silu(conv(x, p["middle"]))
        for w, skip in zip(p["up"], reversed(skips), strict=True):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = jax.nn.silu(conv(jnp.concatenate([x, skip], axis=-1), w))
        return conv(x, p["out"])

    params = {
        "down": [filters(3, 4, 8), filters(3, 8, 16)],
        "middle": filters(3, 16, 16),
        "up": [filters(3, 32, 8), filters(3, 16, 8)],
        "out": filters(1, 8, 4),
    }
    return mean_square(apply), (params, normal(BATCH, 8, 8, 4))


@program()
def group_norm_conv():
    def apply(p, x):
        y = conv(x, p["w"])
        groups = y.reshape(*y.shape[:3], 4, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        groups = (groups - mean) / jnp.sqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
        return groups.reshape(y.shape) * p["scale"]

    return mean_square(apply), (
        {"w": filters(3, 8, 32), "scale": jnp.ones(32)},
        normal(BATCH, 8, 8, 8),
    )


@program()
def bilinear_upsampling():
    def apply(w, x):
        y = jax.image.resize(x, (BATCH, 12, 12, 8), "bilinear")
        return y.reshape(BATCH, -1) @ w

    return mean_square(apply), (dense(12 * 12 * 8, 16), normal(BATCH, 6, 6, 8))
