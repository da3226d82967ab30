"""The demo: a decoder-only Flax NNX transformer, planned and trained over eight simulated devices.

The text is CPython's own help topics, read as bytes. `main` prints the plan, trains, trains again
unsharded on one device from the same seed, and fails if the loss curves part by more than 1e-2.
The same in several processes:  planner launch -n 2 --devices-per-process 4 examples/gpt.py
`build(Config(...))` gives the program at any size:  python examples/gpt.py --steps 60 --devices 8
"""

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of its batches."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    seq: int = 128
    batch: int = 16
    vocab: int = 256
    tied: bool = True  # the output head is the token embedding
    dtype: str = "float32"  # of the activations; parameters stay float32


class Block(nnx.Module):
    """Pre-norm causal attention and a four-times-wider GELU feed-forward."""

    def __init__(self, config: Config, **common: Any) -> None:
        width = config.width
        self.norm1, self.norm2 = nnx.LayerNorm(width, **common), nnx.LayerNorm(width, **common)
        self.attention = nnx.MultiHeadAttention(config.heads, width, decode=False, **common)
        self.up = nnx.Linear(width, 4 * width, **common)
        self.down = nnx.Linear(4 * width, width, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        causal = nnx.make_causal_mask(jnp.ones(x.shape[1]))
        x = x + self.attention(self.norm1(x), mask=causal)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Token and position embeddings, unrolled blocks, and a tied or separate head."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        common: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        small = common | {"embedding_init": nnx.initializers.normal(0.02)}
        self.token = nnx.Embed(config.vocab, config.width, **small)
        self.position = nnx.Embed(config.seq, config.width, **small)
        self.blocks = nnx.List([Block(config, **common) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, **common)
        self.head = None if config.tied else nnx.Linear(config.width, config.vocab, **common)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return (self.head or self.token.attend)(self.norm(x)).astype(jnp.float32)


@functools.cache
def build(config: Config) -> tuple[Any, Any, Any]:
    """The program at this size: make_state, train_step, batch_spec. Computes no arrays."""
    optimizer = optax.adamw(1e-3, weight_decay=0.01)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))

    def make_state(seed: int = 0) -> Any:
        params = nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(seed))))
        return {"params": params, "opt": optimizer.init(params)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params)(batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    shape = (config.batch, config.seq)
    tokens = jax.eval_shape(lambda: jnp.zeros(shape, jnp.int32))
    return make_state, train_step, {"tokens": tokens, "targets": tokens}


def make_state(seed: int = 0) -> Any:
    """Fresh parameters and AdamW moments at the default size."""
    return build(Config())[0](seed)


def train_step(state: Any, batch: Any) -> Any:
    """One AdamW step on next-byte cross-entropy at the default size."""
    return build(Config())[1](state, batch)


def batches(seed: int = 0, config: Config | None = None) -> Iterator[dict[str, np.ndarray]]:
    """Endless random windows of the text: byte tokens, and the bytes that follow them."""
    from pydoc_data.topics import topics

    config, rng = config or Config(), np.random.default_rng(seed)
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    while True:
        starts = rng.integers(0, len(text) - config.seq, size=(config.batch, 1))
        window = text[starts + np.arange(config.seq + 1)].astype(np.int32)
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}


def example_args() -> tuple[Any, Any]:
    """Shapes and dtypes of `train_step`'s arguments; no state is computed."""
    return jax.eval_shape(make_state), build(Config())[2]


def use_devices(count: int) -> None:
    """Simulate `count` CPU devices, unless the launcher did or JAX_PLATFORMS asks otherwise."""
    flag = f"--xla_force_host_platform_device_count={count}"  # read at the first use of a device
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")


def train(step: Any, config: Config, steps: int, label: str) -> list[float]:
    """Train from seed 0 under a progress bar, first printing the step's plan if it has one."""
    from rich.progress import Progress

    data = batches(config=config)
    state, metrics = step(build(config)[0](), next(data))  # compiles, so outside the clock
    losses, start = [float(metrics["loss"])], time.perf_counter()
    first = jax.process_index() == 0  # who shows how it goes, if there are several
    print(getattr(step, "plan", "") if first else "")
    columns = (*Progress.get_default_columns(), "{task.fields[note]}")
    with Progress(*columns, disable=not first) as bar:
        task = bar.add_task(label, total=steps, completed=1, note=f"loss {losses[0]:.4f}")
        while len(losses) < steps:
            state, metrics = step(state, next(data))
            losses.append(float(metrics["loss"]))
            done = (len(losses) - 1) * config.batch * config.seq
            speed = done / (time.perf_counter() - start)
            bar.update(task, advance=1, note=f"loss {losses[-1]:.4f}  {speed:,.0f} tokens/s")
    return losses


def main() -> None:
    """Train over the simulated devices, then unsharded, and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=Config.tied)
    for name in ("layers", "width", "heads", "seq", "batch", "vocab", "dtype"):
        default = getattr(Config, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = vars(parser.parse_args())
    steps = options.pop("steps")
    use_devices(options.pop("devices"))

    from meshwright import initialize, parallelize, set_parallel_mode

    initialize()  # joins the other processes, if a launcher started several
    config = Config(**options)
    train_step = build(config)[1]
    set_parallel_mode("AUTO_PARALLEL")
    step = parallelize(train_step, donate_argnums=0)
    losses = train(step, config, steps, f"{jax.device_count()} devices")
    unsharded = train(jax.jit(train_step, donate_argnums=0), config, steps, "unsharded")

    difference = max(abs(a - b) for a, b in zip(losses, unsharded, strict=True))
    print(f"first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}")
    print(f"largest difference from the unsharded losses: {difference:.1e} (over {steps} steps)")
    if not difference <= 1e-2:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
