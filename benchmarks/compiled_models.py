"""Five train steps in plain JAX, each with manual plans, for ``compiled.py``.

A parameter is declared with a name for every dimension; a manual plan is a mesh and, per name, the
mesh axes that split such dimensions. ``hint`` marks activations in the same names: a constraint
while a manual plan is compiled, nothing while the planner plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, tuple[str, ...]]

_hints: list[tuple[Mesh, Rules]] = []


@dataclasses.dataclass(frozen=True)
class Named:
    """An array of a step: shape, a name per dimension (separated by spaces), dtype."""

    shape: tuple[int, ...]
    names: str
    dtype: Any = jnp.float32

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def spec_of(shape: Sequence[int], names: str, rules: Rules, sizes: Mapping[str, int]) -> Any:
    """The PartitionSpec of an array; an axis splits one dimension, and only one that it divides."""
    taken: set[str] = set()
    entries: list[Any] = []
    for length, name in zip(shape, names.split(), strict=True):
        axes, shards = [], 1
        for axis in rules.get(name, ()):
            if axis not in taken and length % (shards * sizes[axis]) == 0:
                axes.append(axis)
                shards *= sizes[axis]
        taken.update(axes)
        entries.append(tuple(axes) or None)
    return PartitionSpec(*entries)


def hint(x: jax.Array, names: str) -> jax.Array:
    """``x``, held as the manual plan that is being compiled wants arrays of these names."""
    if not _hints:
        return x
    mesh, rules = _hints[-1]
    spec = spec_of(x.shape, names, rules, mesh.shape)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


@dataclasses.dataclass(frozen=True)
class ManualPlan:
    """A mesh and, per name of a dimension, the axes that split it; ``moments`` replaces rules for
    the optimizer's state."""

    mesh: Mapping[str, int]
    rules: Rules
    moments: Rules = dataclasses.field(default_factory=dict)


def is_named(x: Any) -> bool:
    return isinstance(x, Named)


@dataclasses.dataclass(frozen=True)
class Model:
    """A step ``(params, opt_state, batch) -> (params, opt_state, loss)`` and plans for it."""

    name: str
    cluster: str
    params: Any
    batch: Any
    loss: Callable[[Any, Any], jax.Array]
    plans: Mapping[str, ManualPlan]

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(1e-4)

    def step(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(self.loss)(params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    @property
    def args(self) -> tuple[Any, Any, Any]:
        params, batch = (
            jax.tree.map(lambda x: x.struct, tree, is_leaf=is_named)
            for tree in (self.params, self.batch)
        )
        return params, jax.eval_shape(self.optimizer.init, params), batch

    def lower(self, plan: ManualPlan, devices: Sequence[Any]) -> Any:
        """The step lowered under a manual plan."""
        grid = mesh_utils.create_device_mesh(
            tuple(plan.mesh.values()), devices, allow_split_physical_axes=True
        )
        mesh = Mesh(grid, tuple(plan.mesh))
        whole = NamedSharding(mesh, PartitionSpec())

        def placed(tree: Any, rules: Rules) -> Any:
            return jax.tree.map(
                lambda x: NamedSharding(mesh, spec_of(x.shape, x.names, rules, mesh.shape)),
                tree,
                is_leaf=is_named,
            )

        params = placed(self.params, plan.rules)
        moments = placed(self.params, {**plan.rules, **plan.moments})
        held = optax.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            self.args[1],
            moments,
            transform_non_params=lambda _: whole,
        )
        ins = (params, held, placed(self.batch, plan.rules))
        with _hinted(mesh, plan.rules):
            step = jax.jit(
                lambda *args: self.step(*args),
                in_shardings=ins,
                out_shardings=(params, held, whole),
                donate_argnums=(0, 1),
            )
            return step.lower(*self.args)


@contextlib.contextmanager
def _hinted(mesh: Mesh, rules: Rules) -> Iterator[None]:
    _hints.append((mesh, rules))
    try:
        yield
    finally:
        _hints.pop()


def bf16(x: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), x)


# ---- plans -----------------------------------------------------------------------------------

DATA: Rules = {"batch": ("data",)}
TENSOR: Rules = dict.fromkeys(
    ("wide", "heads", "vocab", "a_wide", "a_heads", "a_vocab"), ("model",)
)
STORED: Rules = {"width": ("data",)}


def data_parallel(n: int, stored: Rules = STORED) -> dict[str, ManualPlan]:
    """Data parallel, with optimizer state and with all state split."""
    return {
        "dp": ManualPlan({"data": n}, DATA),
        "zero1": ManualPlan({"data": n}, DATA, stored),
        "fsdp": ManualPlan({"data": n}, {**DATA, **stored}),
    }


def tensor_parallel(
    n: int, ways: Sequence[int], tensor: Rules = TENSOR, stored: Rules = STORED
) -> dict[str, ManualPlan]:
    """Megatron's column and row splits over ``model``, whole, ZeRO-1 or FSDP over ``data``."""
    plans = {}
    for k in ways:
        mesh, rules = {"data": n // k, "model": k}, {**DATA, **tensor}
        plans[f"tp{k}"] = ManualPlan(mesh, rules)
        plans[f"tp{k}_zero1"] = ManualPlan(mesh, rules, stored)
        plans[f"tp{k}_fsdp"] = ManualPlan(mesh, {**rules, **stored})
        plans[f"tp{k}_fsdp_seq"] = ManualPlan(mesh, {**rules, **stored, "a_seq": ("model",)})
    return plans


# ---- models ----------------------------------------------------------------------------------


def residual_mlp() -> Model:
    """Sixteen residual blocks 1024 -> 4096 -> 1024 on 32,768 rows."""
    width, wide, rows, layers = 1024, 4096, 32768, 16
    block = {
        "norm": Named((width,), "none"),
        "up": Named((width, wide), "width wide"),
        "down": Named((wide, width), "wide width"),
    }
    params = {"blocks": [block] * layers, "out": Named((width, 1024), "width none")}
    batch = (Named((rows, width), "batch none", jnp.bfloat16), Named((rows,), "batch", jnp.int32))

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        for p in bf16(params["blocks"]):
            h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True))
            h = hint(jax.nn.gelu(h.astype(jnp.bfloat16) * p["norm"] @ p["up"]), "batch a_wide")
            x = hint(x + h @ p["down"], "batch none")
        logits = (x @ params["out"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    plans = data_parallel(16) | tensor_parallel(16, (2, 4, 8))
    return Model("residual_mlp", "v5e:4x4", params, batch, loss, plans)


def recommender() -> Model:
    """Eight tables of half a million rows, a bottom and a top perceptron, 65,536 samples."""
    rows, dim, tables, samples = 524288, 128, 8, 65536
    params = {
        "tables": [Named((rows, dim), "rows dim")] * tables,
        "bottom": [Named((512, 1024), "width wide"), Named((1024, dim), "wide width")],
        "top": [
            Named(((tables + 1) * dim, 2048), "width wide"),
            Named((2048, 1024), "wide width"),
            Named((1024, 1), "width none"),
        ],
    }
    batch = (
        Named((samples, 512), "batch none"),
        Named((samples, tables), "batch none", jnp.int32),
        Named((samples,), "batch"),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x, ids, clicked = batch
        for w in params["bottom"]:
            x = jax.nn.relu(x @ w)
        found = [hint(t[ids[:, k]], "batch none") for k, t in enumerate(params["tables"])]
        x = hint(jnp.concatenate([x, *found], -1), "batch none")
        for k, w in enumerate(params["top"]):
            x = x @ w if k == 2 else jax.nn.relu(x @ w)
        return optax.sigmoid_binary_cross_entropy(x[:, 0], clicked).mean()

    plans = data_parallel(16, {"rows": ("data",)}) | {
        "rows": ManualPlan({"data": 16}, {**DATA, "rows": ("data",)}),
        "dim": ManualPlan({"data": 16}, {**DATA, "dim": ("data",)}),
        "rows4x4": ManualPlan(
            {"data": 4, "model": 4}, {"batch": ("data", "model"), "rows": ("data", "model")}
        ),
        "dim_fsdp": ManualPlan({"data": 16}, {**DATA, "dim": ("data",), "width": ("data",)}),
    }
    return Model("recommender", "v5e:4x4", params, batch, loss, plans)


def _attention(x: jax.Array, p: Any, causal: bool) -> jax.Array:
    qkv = hint(jnp.einsum("bsd,dkhe->kbshe", x, p["qkv"]), "none batch none a_heads none")
    q, k, v = qkv
    scores = jnp.einsum("bshe,bthe->bhst", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum("bshe,hed->bsd", hint(mixed, "batch none a_heads none"), p["proj"])


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return hint((y * gain).astype(jnp.bfloat16), "batch none none")


def _block(x: jax.Array, p: Any, causal: bool) -> jax.Array:
    p = {k: v if k.startswith("norm") else v.astype(jnp.bfloat16) for k, v in p.items()}
    x = hint(x + _attention(_norm(x, p["norm1"]), p, causal), "batch a_seq none")
    h = hint(jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]), "batch none a_wide")
    return hint(x + h @ p["down"], "batch a_seq none")


def _transformer(layers: int, width: int, heads: int) -> list[Any]:
    block = {
        "norm1": Named((width,), "none"),
        "norm2": Named((width,), "none"),
        "qkv": Named((width, 3, heads, width // heads), "width none heads none"),
        "proj": Named((heads, width // heads, width), "heads none width"),
        "up": Named((width, 4 * width), "width wide"),
        "down": Named((4 * width, width), "wide width"),
    }
    return [block] * layers


def large_vocabulary() -> Model:
    """A small decoder under a vocabulary of 262,144: the logits are most of the step."""
    layers, width, heads, vocab, rows, seq = 2, 2048, 16, 262144, 32, 1024
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "blocks": _transformer(layers, width, heads),
        "norm": Named((width,), "none"),
    }
    batch = Named((rows, seq + 1), "batch none", jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        x = hint(table[tokens[:, :-1]], "batch a_seq none")
        for p in params["blocks"]:
            x = jax.checkpoint(lambda x, p: _block(x, p, causal=True))(x, p)
        logits = (_norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        logits = hint(logits, "batch none a_vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    plans = data_parallel(16) | tensor_parallel(16, (2, 4, 8, 16))
    return Model("large_vocabulary", "v5p:2x2x4", params, batch, loss, plans)


def vit() -> Model:
    """A vision transformer of width 1024, eight blocks, on 512 images of 224 x 224."""
    layers, width, heads, images, patch = 8, 1024, 16, 512, 16
    params = {
        "patches": Named((patch * patch * 3, width), "none width"),
        "place": Named((196, width), "none none"),
        "blocks": _transformer(layers, width, heads),
        "norm": Named((width,), "none"),
        "head": Named((width, 1000), "width none"),
    }
    batch = (
        Named((images, 224, 224, 3), "batch none none none", jnp.bfloat16),
        Named((images,), "batch", jnp.int32),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        x = x.reshape(images, 14, patch, 14, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(images, 196, -1) @ params["patches"].astype(jnp.bfloat16)
        x = hint(x + params["place"].astype(jnp.bfloat16), "batch a_seq none")
        for p in params["blocks"]:
            x = _block(x, p, causal=False)
        pooled = _norm(x, params["norm"]).mean(1)
        logits = (pooled @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    plans = data_parallel(16) | tensor_parallel(16, (2, 4))
    return Model("vit", "v5e:4x4", params, batch, loss, plans)


def unet() -> Model:
    """A U-Net of four levels, 64 to 512 channels, on 128 images of 128 x 128."""
    channels, images, side = (64, 128, 256, 512), 128, 128

    def conv(a: int, b: int, k: int = 3) -> Named:
        return Named((k, k, a, b), "none none width wide")

    down = [[conv(a, b), conv(b, b)] for a, b in zip((3, *channels[:-1]), channels, strict=True)]
    up = [
        [conv(b + a, a), conv(a, a)] for a, b in zip(channels[-2::-1], channels[:0:-1], strict=True)
    ]
    params = {"down": down, "up": up, "out": conv(channels[0], 3, 1)}
    picture = Named((images, side, side, 3), "batch none none none", jnp.bfloat16)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, w.astype(jnp.bfloat16), (1, 1), "SAME", dimension_numbers=dims
        )
        return hint(y, "batch none none none")

    def loss(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        kept = []
        for level, pair in enumerate(params["down"]):
            for w in pair:
                x = jax.nn.relu(run(x, w))
            if level < len(channels) - 1:
                kept.append(x)
                n, h, w_, c = x.shape
                x = x.reshape(n, h // 2, 2, w_ // 2, 2, c).max((2, 4))
        for pair in params["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = hint(jnp.concatenate([x, kept.pop()], -1), "batch none none none")
            for w in pair:
                x = jax.nn.relu(run(x, w))
        return jnp.mean(jnp.square((run(x, params["out"]) - target).astype(jnp.float32)))

    plans = data_parallel(16, {"wide": ("data",)}) | {
        "fsdp_in": ManualPlan({"data": 16}, {**DATA, "width": ("data",)}),
    }
    return Model("unet", "v5e:4x4", params, (picture, picture), loss, plans)


MODELS: dict[str, Callable[[], Model]] = {
    f.__name__: f for f in (residual_mlp, recommender, large_vocabulary, vit, unet)
}
