"""Plans written by hand as pins: what ``make_plan`` is given to price or compile them.

Kinds: ``data`` (everything replicated but the batch), ``fsdp`` (parameters and optimizer state
split over the data axis, ZeRO-3), ``tensor<k>`` (Megatron's column and row split over k devices,
the rest data parallel) and ``mixed<k>`` (tensor parallel over k, FSDP over the rest).
"""

from __future__ import annotations

import re
from typing import Any

import jax
from common import TENSOR_RULES, fsdp_spec
from jax.sharding import PartitionSpec

DECODER_RULES = {
    r"layers.*\['[qkv]'\]": 1,
    r"\['o'\]": 0,
    r"\['(gate|up)'\]": 1,
    r"\['up_bias'\]": 0,
    r"\['down'\]": 0,
    r"\['head'\]": 1,
    r"\['embed'\]": 0,
}
"""The split dimension of the parameters of ``decoders``."""


def kinds_for(devices: int) -> tuple[str, ...]:
    """The hand-written plans that fit a number of devices."""
    return ("data", "fsdp", "tensor2", "tensor8", f"mixed{2 if devices == 8 else 4}")


def pinned(name: str, kind: str, args: tuple[Any, Any], devices: int) -> tuple[dict[str, int], Any]:
    """(mesh, shardings) for ``make_plan`` of a step of (state, batch).

    Args:
        name: an example, or "decoder" for the models of ``decoders``.
        kind: see the module.
        args: shapes of (state, batch).
        devices: how many devices the mesh has.
    """
    digits = re.sub(r"\D", "", kind)
    model = int(digits) if digits else 1
    data = devices // model
    mesh = {"data": data} if model == 1 else {"data": data, "model": model}
    rules = DECODER_RULES if name == "decoder" else TENSOR_RULES[name]
    sharded = kind.startswith(("fsdp", "mixed"))
    out: dict[str, Any] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(args):
        text = jax.tree_util.keystr(path)
        if not x.shape:
            continue
        if text.startswith("[1]"):
            spec = PartitionSpec("data") if x.shape[0] % data == 0 else PartitionSpec()
        else:
            entries = _tensor_entries(rules, text, x.shape, model)
            if sharded:
                entries = _with_fsdp(entries, x.shape, data)
            spec = PartitionSpec(*entries)
        out[f"^{re.escape(text)}$"] = spec
    return mesh, out


def _tensor_entries(
    rules: dict[str, int], text: str, shape: tuple[int, ...], model: int
) -> list[Any]:
    entries: list[Any] = [None] * len(shape)
    for pattern, dim in rules.items():
        if model > 1 and re.search(pattern, text) and len(shape) > dim and shape[dim] % model == 0:
            entries[dim] = "model"
            break
    return entries


def _with_fsdp(entries: list[Any], shape: tuple[int, ...], data: int) -> list[Any]:
    """The largest free dimension split over the data axis."""
    free = tuple(1 if e else n for e, n in zip(entries, shape, strict=True))
    spec = list(fsdp_spec(free, data, "data"))
    return [e or (spec[k] if k < len(spec) else None) for k, e in enumerate(entries)]
