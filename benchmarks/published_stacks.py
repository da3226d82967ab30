"""Software stacks of published runs: what each framework does, whatever the machine.

A stack is found by the text in a table's column ``framework``. Nothing here is fitted; what is not
in a table's columns is known of the framework, and ``docs/explanation/published-runs.md`` names the
sources.
"""

from __future__ import annotations

import dataclasses

from published_case import Framework

EAGER = Framework(eager=True, overlaps=True)
BEHIND = Framework(eager=True, overlaps=False)
XLA = Framework(eager=False, overlaps=True)


@dataclasses.dataclass(frozen=True)
class Stack:
    """One software stack.

    Attributes:
        framework: host and communication.
        fused: elementwise chains are one kernel.
        rows: norms, softmax, and bias + dropout + add are hand-written kernels.
        dropout: after attention's softmax and both blocks.
        joined: query, key and value are one product.
        attention: unless a row says so: "dense", "flash", "flash-1".
        reduced: dtype of reduced gradients; "" that of the products.
        stored: dtype of stored parameters; "" that of the products, with a float32 copy.
        bias: of a model that is not gated.
        positions: learned ones, of a model that is not gated.
        recompute: what "full" means: "full", or "whole" for the layer's last product too.
        sharded: data parallelism shards the optimizer's state where a row says nothing.
        sequence: tensor parallelism splits activations between blocks.
        vocabulary: words where a row says nothing.
        padded: the vocabulary is padded to a multiple of this, times tensor parallelism.
    """

    framework: Framework
    fused: bool = False
    rows: bool = False
    dropout: bool = False
    joined: bool = True
    attention: str = "dense"
    reduced: str = ""
    stored: str = "float32"
    bias: bool = True
    positions: bool = True
    recompute: str = "full"
    sharded: bool = False
    sequence: bool = False
    vocabulary: int = 50304
    padded: int = 1


_JAX = Stack(XLA, fused=True, joined=False, bias=False, positions=False)
_MEGATRON = Stack(
    BEHIND, rows=True, dropout=True, stored="", recompute="whole", vocabulary=51200, padded=128
)

STACKS = (  # text in the table's framework, stack
    ("maxtext", dataclasses.replace(_JAX, vocabulary=32000)),
    ("pax", dataclasses.replace(_JAX, bias=True)),
    ("alpa", Stack(Framework(False, False), fused=True, joined=False, stored="")),
    ("jax", _JAX),
    # no gradient bucketing in the table, whose times are sums over layers to 1e-5; each device has
    # vocabulary // tensor parallelism rows
    (
        "megatron-deepspeed",
        dataclasses.replace(
            _MEGATRON, framework=Framework(True, False, alone=True), recompute="full", padded=0
        ),
    ),
    (
        "nemo",  # Transformer Engine's fused kernels, distributed optimizer, sequence parallelism
        dataclasses.replace(
            _MEGATRON,
            framework=EAGER,
            fused=True,
            dropout=False,
            attention="flash",
            sharded=True,
            sequence=True,
            vocabulary=32000,
        ),
    ),
    (
        "modellink",  # kernels of torch_npu; a row says which of its collectives overlap
        dataclasses.replace(
            _MEGATRON, dropout=False, attention="dense", bias=False, vocabulary=32000
        ),
    ),
    ("megatron", _MEGATRON),
    (
        "internevo",  # broadcast_params of its hybrid ZeRO optimizer
        Stack(
            dataclasses.replace(EAGER, broadcasts=True),
            attention="flash",
            stored="",
            recompute="whole",
            vocabulary=103168,
        ),
    ),
    (
        "composer",  # Triton's FlashAttention
        Stack(EAGER, rows=True, attention="flash-1", bias=False),
    ),
    (
        "torchtitan",
        Stack(EAGER, joined=False, attention="flash", reduced="float32", vocabulary=128256),
    ),
)
OTHER = Stack(EAGER, attention="flash")
"""Of a framework without an entry: PyTorch run eagerly."""


def stack_of(framework: str) -> Stack:
    """The stack of a framework, as a table names it."""
    name = framework.lower()
    return next((stack for text, stack in STACKS if text in name), OTHER)
