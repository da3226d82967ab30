"""What is traced of a published run: a decoder's sizes, the degrees of parallelism, the kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from planner import shard

Spec = tuple[Any, ...]


def mark(x: jax.Array, spec: Spec) -> jax.Array:
    """``x`` with a sharding said, or just ``x`` where ``spec`` is empty."""
    return shard(x, *spec) if spec else x


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. ``head_dim`` times ``heads`` need not be ``hidden``."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool
    positions: bool = True
    """Learned positions (GPT); otherwise rotary ones (Su et al. 2021)."""
    bias: bool = False
    tied: bool = True


@dataclasses.dataclass(frozen=True)
class Degrees:
    """Devices along each kind of parallelism, and what is done with them.

    The batch is split over three of them: ``data`` are replicas, over ``zero`` the optimizer's
    state is sharded (ZeRO-1), over ``fsdp`` the parameters are (ZeRO-3). ``context`` splits the
    sequence, ``model`` is tensor parallelism; with ``sequence``, it splits activations between
    blocks too. ``free``: nothing is said, the planner decides.
    """

    data: int = 1
    zero: int = 1
    fsdp: int = 1
    context: int = 1
    model: int = 1
    sequence: bool = False
    free: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Axes with more than one device, slowest first."""
        sizes = {n: getattr(self, n) for n in ("data", "zero", "fsdp", "context", "model")}
        return {n: k for n, k in sizes.items() if k > 1} or {"data": 1}

    def on(self, *names: str) -> Any:
        """The entry of a dimension that is split over those of ``names`` that are in use."""
        used = tuple(n for n in names if getattr(self, n) > 1)
        return used or None

    def spec(self, *entries: Any) -> Spec:
        """A sharding to say; empty where nothing is said."""
        return () if self.free else entries

    @property
    def batch(self) -> Any:
        return self.on("data", "zero", "fsdp")

    @property
    def stored(self) -> Any:
        """Axes over which ZeRO-3 stores a parameter."""
        return self.on("fsdp", "context") if self.fsdp * self.context > 1 else None


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How a framework turns the step into kernels.

    ``fused``: elementwise chains are one kernel (XLA, torch.compile); otherwise every step of a
    chain reads and writes memory (PyTorch eager). ``rows``: norm, softmax, and bias + dropout + add
    are hand-written kernels, one each (apex, Megatron; PyTorch's layer norm). ``dropout``: after
    attention's softmax and both blocks. ``joined``: query, key and value are one product.
    ``attention``: "dense", "flash" (Dao 2023), "flash-1" (Dao et al. 2022, and Triton's).
    ``matmul``: dtype of the products' operands. ``reduced``: dtype in which gradients are reduced.
    ``stored``: dtype of stored parameters.
    """

    fused: bool = True
    rows: bool = False
    dropout: bool = False
    joined: bool = False
    attention: str = "dense"
    matmul: str = "bfloat16"
    reduced: str = "bfloat16"
    stored: str = "float32"

    def stop(self, x: Any) -> Any:
        """The end of a kernel that writes ``x``, where kernels are not fused."""
        return x if self.fused else jax.lax.optimization_barrier(x)


@dataclasses.dataclass(frozen=True)
class Framework:
    """What a framework does on the host and with its communication.

    ``eager``: every kernel is launched from Python. ``overlaps``: gradients are reduced while the
    backward pass goes on. ``alone``: layers were timed one by one and added up. ``broadcasts``:
    under ZeRO-1 every device sends the parameters that it has updated to all others, one after the
    other, instead of an all-gather.
    """

    eager: bool
    overlaps: bool
    alone: bool = False
    broadcasts: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh: all that decides the trace. ``batch`` counts sequences of a step.

    ``recompute``: "none"; "full", all of a layer that its backward pass needs; "whole", the layer's
    last product too, which no backward pass needs; or a name of ``published_models.KEPT``.
    ``unrolled``: layers have arrays of their own; otherwise they are scanned.
    """

    model: Decoder
    degrees: Degrees
    kernels: Kernels
    recompute: str
    batch: int
    unrolled: bool = False


def parameters(c: Case) -> dict[str, Any]:
    """Every parameter's (shape, sharding in use, stored, of gradient and optimizer state)."""
    m, d = c.model, c.degrees
    tp, z, zero = d.on("model"), d.stored, d.on("zero")

    def of(shape: tuple[int, ...], split: int | None, over: int) -> tuple[Any, Spec, Spec, Spec]:
        matrix = len(shape) > 1
        used = [tp if i == split else None for i in range(len(shape))]
        stored = [z if i == over and matrix else u for i, u in enumerate(used)]
        state = [zero if i == over and matrix and zero else u for i, u in enumerate(stored)]
        return shape, d.spec(*used), d.spec(*stored), d.spec(*state)

    h, q, kv = m.hidden, (m.heads, m.head_dim), (m.kv_heads, m.head_dim)
    layer = {
        "norm1": of((h,), None, 0),
        "norm2": of((h,), None, 0),
        "q": of((h, *q), 1, 0),
        "k": of((h, *kv), 1, 0),
        "v": of((h, *kv), 1, 0),
        "o": of((*q, h), 0, 2),
        "up": of((h, m.ffn), 1, 0),
        "down": of((m.ffn, h), 0, 1),
    }
    if m.gated:
        layer["gate"] = of((h, m.ffn), 1, 0)
    if m.bias:
        layer |= {"q_b": of(q, 0, -1), "k_b": of(kv, 0, -1), "v_b": of(kv, 0, -1)}
        layer |= {"o_b": of((h,), None, 0), "up_b": of((m.ffn,), 0, -1)}
        layer |= {"down_b": of((h,), None, 0), "norm1_b": of((h,), None, 0)}
        layer |= {"norm2_b": of((h,), None, 0)}
    out: dict[str, Any] = {"embed": of((m.vocab, h), 0, 1), "norm": of((h,), None, 0)}
    if m.positions:
        out["position"] = of((m.seq, h), None, -1)
    if not m.tied:
        out["head"] = of((m.vocab, h), 0, 1)
    out["layers"] = [layer] * m.layers if c.unrolled else _stacked(layer, m.layers)
    return out


def _stacked(layer: dict[str, Any], layers: int) -> dict[str, Any]:
    """Parameters of all layers in arrays with a first dimension more."""

    def of(leaf: Any) -> Any:
        shape, *specs = leaf
        return (layers, *shape), *((None, *s) if s else s for s in specs)

    return {name: of(leaf) for name, leaf in layer.items()}


def of_layer(c: Case) -> dict[str, Any]:
    """The parameters of one layer, by name."""
    model = dataclasses.replace(c.model, layers=1)
    tree = parameters(dataclasses.replace(c, model=model, unrolled=True))
    return tree["layers"][0]  # type: ignore[no-any-return]


def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 4


def count_parameters(model: Decoder) -> int:
    """Number of parameters."""
    tree = parameters(Case(model, Degrees(), Kernels(), "none", 1))
    return sum(math.prod(x[0]) for x in jax.tree.leaves(tree, is_leaf=is_leaf))
