"""A Llama-like decoder in plain JAX, at sizes from a toy to 405B.

Nothing in it says how to make it fit: no rematerialization, no gradient accumulation, no
shardings. The planner decides that:

    planner inspect examples/llama.py:step --cluster v5p:4x8x8 -- --size 70b --batch 1024
    python examples/llama.py --steps 20 --devices 8     # the toy, planned, and then unsharded
"""

import argparse
import dataclasses
import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of its batches; those of Llama 3 where it has them."""

    layers: int = 4
    width: int = 64
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 128
    vocab: int = 256
    seq: int = 64
    batch: int = 16
    dtype: str = "float32"  # of the activations; parameters and moments stay float32


SIZES = {
    "toy": Config(),
    "1b": Config(16, 2048, 32, 8, 8192, 128256, 4096, 512, "bfloat16"),
    "8b": Config(32, 4096, 32, 8, 14336, 128256, 4096, 512, "bfloat16"),
    "70b": Config(80, 8192, 64, 8, 28672, 128256, 4096, 512, "bfloat16"),
    "405b": Config(126, 16384, 128, 8, 53248, 128256, 8192, 2048, "bfloat16"),
}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """[..., width] over its root mean square, in float32 inside."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, seq, ..., head]."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    angles = angles.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Causal grouped-query attention and a SwiGLU feed-forward; ``x`` is [batch, seq, width]."""
    p = {k: v.astype(x.dtype) for k, v in p.items()}
    h = rms_norm(x, p["norm1"])
    q = rotated(jnp.einsum("btd,dghk->btghk", h, p["q"]))
    k = rotated(jnp.einsum("btd,dgk->btgk", h, p["k"]))
    v = jnp.einsum("btd,dgk->btgk", h, p["v"])
    scores = jnp.einsum("btghk,bsgk->bghts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
    x = x + jnp.einsum("btghk,ghkd->btd", jnp.einsum("bghts,bsgk->btghk", weights, v), p["o"])
    h = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


@functools.cache
def build(config: Config) -> tuple[Any, Any, Any]:
    """The program at this size: make_state, step, batch_spec. Computes no arrays."""
    c = config
    head, groups = c.width // c.heads, c.heads // c.kv_heads
    optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)
    shapes = {
        "q": (c.width, c.kv_heads, groups, head),
        "k": (c.width, c.kv_heads, head),
        "v": (c.width, c.kv_heads, head),
        "o": (c.kv_heads, groups, head, c.width),
        "gate": (c.width, c.hidden),
        "up": (c.width, c.hidden),
        "down": (c.hidden, c.width),
    }

    def make_state(seed: int = 0) -> Any:
        keys = iter(jax.random.split(jax.random.key(seed), len(shapes) + 2))
        normal = functools.partial(jax.random.normal, dtype=jnp.float32)
        layers = {k: 0.02 * normal(next(keys), (c.layers, *s)) for k, s in shapes.items()}
        layers |= {k: jnp.ones((c.layers, c.width)) for k in ("norm1", "norm2")}
        params = {
            "embed": 0.02 * normal(next(keys), (c.vocab, c.width)),
            "layers": layers,
            "norm": jnp.ones(c.width),
            "head": 0.02 * normal(next(keys), (c.width, c.vocab)),
        }
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            x = params["embed"].astype(c.dtype)[batch["tokens"]]
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
            logits = rms_norm(x, params["norm"]) @ params["head"].astype(c.dtype)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), batch["targets"]
            )
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    tokens = jax.ShapeDtypeStruct((c.batch, c.seq), jnp.int32)
    return make_state, step, {"tokens": tokens, "targets": tokens}


def parsed() -> tuple[Config, argparse.Namespace]:
    """The size that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--schedule", help="of stages as programs of their own, such as zb-h1")
    parser.add_argument("--microbatches", type=int, default=2)
    for name in ("batch", "seq", "layers"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(sys.argv[1:])
    given = {k: v for k in ("batch", "seq", "layers") if (v := getattr(options, k)) is not None}
    return dataclasses.replace(SIZES[options.size], **given), options


def step(state: Any, batch: Any) -> Any:
    """One AdamW step on next-token cross-entropy."""
    return build(parsed()[0])[1](state, batch)


def example_args() -> tuple[Any, Any]:
    """Shapes and dtypes of ``step``'s arguments; no state is computed."""
    make_state, _, batch = build(parsed()[0])
    return jax.eval_shape(make_state), batch


def batch_of(config: Config, number: int) -> dict[str, np.ndarray]:
    """Counting sequences with a random start and stride, so that there is something to learn."""
    rng = np.random.default_rng(number)
    start, stride = rng.integers(0, config.vocab, (2, config.batch, 1))
    tokens = (start + (stride % 7) * np.arange(config.seq + 1)) % config.vocab
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


def main() -> None:
    """Train over simulated devices, then unsharded, and compare the losses."""
    config, options = parsed()
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # else the launcher said how many
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")

    from meshwright import initialize, parallelize

    initialize()  # joins the other processes, if a launcher started several
    make_state, step, _ = build(config)

    def train(run: Any) -> list[float]:
        state, losses = make_state(), []
        for number in range(options.steps):
            state, metrics = run(state, batch_of(config, number))
            losses.append(float(metrics["loss"]))
        return losses

    recipe = {"microbatches": options.microbatches, "stages": options.stages}
    if options.schedule:
        recipe["schedule"] = options.schedule
    planned = parallelize(step, donate_argnums=0, remat="full", **recipe)
    losses, alone = train(planned), train(jax.jit(step, donate_argnums=0))
    if jax.process_index() == 0:
        print(planned.plan)
    difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}")
    print(f"largest difference from the unsharded losses: {difference:.1e}")
    if not difference <= 1e-3:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
