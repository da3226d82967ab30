"""The U-Net of Stable Diffusion in diffusers, predicting the noise of a latent image."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from diffusers import FlaxUNet2DConditionModel
from training import normal, tokens, training

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """Stable Diffusion 1.5 at 512 pixels, or two small levels."""
    if real:
        model = FlaxUNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, dtype=jnp.bfloat16
        )
        rows, length = 256, 77
    else:
        model = FlaxUNet2DConditionModel(
            sample_size=8,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            attention_head_dim=4,
            cross_attention_dim=16,
        )
        rows, length = 16, 6

    def loss(params: Any, batch: Any) -> jax.Array:
        out = model.apply({"params": params}, batch["noisy"], batch["time"], batch["text"])
        return jnp.mean((out.sample.astype(jnp.float32) - batch["noise"]) ** 2)

    make_state, step = training(lambda: model.init_weights(jax.random.key(0)), loss)
    size = model.sample_size

    def make_batch() -> Any:
        return {
            "noisy": normal(rows, 4, size, size),
            "noise": normal(rows, 4, size, size, seed=9),
            "text": normal(rows, length, model.cross_attention_dim),
            "time": tokens(rows, 1, 1000)[:, 0],
        }

    return make_state, step, make_batch
