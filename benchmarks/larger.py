"""The six examples at sizes worth eight accelerators: the same networks, wider and longer.

At their own sizes a step is little more than starts of kernels. Shapes only; nothing is computed.
"""

from __future__ import annotations

from typing import Any

import common
import jax
import jax.numpy as jnp

SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"WIDTH": 8192, "BATCH": 8192},
    "gpt_linen_scan": {"WIDTH": 1024, "HEADS": 16, "SEQ": 512, "BATCH": 64, "VOCAB": 32768},
    "resnet": {"WIDTHS": (128, 256, 512), "BATCH": 256},
    "moe": {"WIDTH": 1024, "HEADS": 16, "SEQ": 512, "BATCH": 64, "VOCAB": 8192, "CAPACITY": 160},
    "lstm": {"WIDTH": 2048, "SEQ": 128, "BATCH": 256, "VOCAB": 8192},
}
"""Constants of the example modules; the batch of ``resnet`` has images of 64 x 64."""


def larger(name: str) -> tuple[Any, tuple[Any, Any]]:
    """The train step and the shapes of its arguments: (state, batch).

    The module of the example keeps the sizes: call this in a process that wants no others.
    """
    module = common.example(name)
    if name == "gpt":
        sizes = module.Config(layers=4, width=1024, heads=16, seq=512, batch=64, vocab=32768)
        make_state, step, batch = module.build(sizes)
        return step, (jax.eval_shape(make_state), batch)
    for constant, size in SIZES[name].items():
        if not hasattr(module, constant):
            raise AttributeError(f"examples/{name}.py has no {constant}")
        setattr(module, constant, size)
    count = module.BATCH
    if name == "mlp":
        batch = {"image": _of(count, module.PIXELS), "label": _of(count, dtype=jnp.int32)}
    elif name == "resnet":
        batch = {"image": _of(count, 64, 64, 1), "label": _of(count, dtype=jnp.int32)}
    else:
        tokens = _of(count, module.SEQ, dtype=jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
    return module.train_step, (jax.eval_shape(module.make_state), batch)


def _of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
