"""The six examples at sizes worth eight accelerators, and two layers of the Llama 8B decoder.

At their own sizes the examples' steps are little more than starts of kernels, and their memory is
small change. Shapes only; nothing is computed.
"""

from __future__ import annotations

from typing import Any

import common
import decoders
import jax
import jax.numpy as jnp

SIZES: dict[str, dict[str, int]] = {
    "mlp": {"WIDTH": 8192, "BATCH": 8192},
    "gpt_linen_scan": {"WIDTH": 1024, "HEADS": 16, "SEQ": 512, "BATCH": 64, "VOCAB": 16384},
    "resnet": {"BATCH": 512},
    "moe": {"WIDTH": 512, "HEADS": 8, "SEQ": 512, "BATCH": 64, "VOCAB": 8192, "CAPACITY": 160},
    "lstm": {"WIDTH": 1024, "SEQ": 128, "BATCH": 256, "VOCAB": 8192},
}
"""Module constants of the examples, for 8 devices."""


def larger(name: str, devices: int) -> tuple[Any, tuple[Any, Any]]:
    """The train step and the shapes of its (state, batch); the batch grows with the devices.

    The example's module keeps the sizes: call this in a process that wants no others.
    """
    scale = max(1, devices // 8)
    if name == "llama":
        return decoders.build(decoders.Llama(layers=2, batch=8 * scale, seq=2048))
    module = common.example(name)
    if name == "gpt":
        config = module.Config(2, 1024, 16, 512, 64 * scale, 16384)
        make_state, step, batch = module.build(config)
        return step, (jax.eval_shape(make_state), batch)
    for constant, size in SIZES[name].items():
        if not hasattr(module, constant):
            raise AttributeError(f"examples/{name}.py has no {constant}")
        setattr(module, constant, size * scale if constant == "BATCH" else size)
    rows = module.BATCH
    if name in ("mlp", "resnet"):
        image = (64,) if name == "mlp" else (32, 32, 1)
        batch = {
            "image": jax.ShapeDtypeStruct((rows, *image), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
    else:
        tokens = jax.ShapeDtypeStruct((rows, module.SEQ), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
    return module.train_step, (jax.eval_shape(module.make_state), batch)
