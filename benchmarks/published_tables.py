"""Published tables of training runs -> ``Run``s that can be predicted, or the reason why not."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from published_case import Decoder, Degrees, Kernels

TABLES = {
    "vtrain": ("vtrain_single_node_a100.csv",),
    "llm_foundry": ("llm_foundry_mpt_a100_h100.csv",),
    "torchtitan": (
        "torchtitan_h100_2024_tables1to3.csv",
        "torchtitan_older_a100_fsdp2_h100_405b.csv",
    ),
    "internevo": ("internevo_7b_a100.csv",),
    "maxtext": (
        "maxtext_a3_h100_llama2_7b.csv",
        "maxtext_tpu_v4_v5e_v5p_tables.csv",
        "tpu_recipes_v6e_v5p_logs.csv",
    ),
    "alpa": ("alpa_osdi22_intra_op_ablation_v100.csv", "alpa_weak_scaling_v100_32gb.csv"),
    "megatron": ("megatron_2020_v100_a100.csv",),
    "pax": ("jax_toolbox_pax_maxtext.csv",),
}
VOCABULARY = {"internevo": 103168, "pax": 50304}  # InternLM's tokenizer; GPT's, padded


Plan = tuple[Degrees, int, int, int, int, str, Kernels, "Framework"]


@dataclasses.dataclass(frozen=True)
class Framework:
    """What a framework does on the host and with its communication.

    ``eager``: every kernel is launched from Python. ``overlaps``: gradients are reduced while the
    backward pass goes on. ``alone``: layers were timed one by one and added up.
    """

    eager: bool
    overlaps: bool
    alone: bool = False


FRAMEWORKS = {
    # "no gradient bucketing" in the table, whose times are sums over layers to 1e-5
    "vtrain": Framework(eager=True, overlaps=False, alone=True),
    "llm_foundry": Framework(eager=True, overlaps=True),
    "torchtitan": Framework(eager=True, overlaps=True),
    "torchtitan compiled": Framework(eager=False, overlaps=True),
    "internevo": Framework(eager=True, overlaps=True),
    "maxtext": Framework(eager=False, overlaps=True),
    "alpa": Framework(eager=False, overlaps=False),  # XLA:GPU of 2021: synchronous collectives
    "megatron": Framework(eager=True, overlaps=False),  # gradients reduced after the backward pass
    "pax": Framework(eager=False, overlaps=True),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One published run: what ran where, and its seconds a step.

    ``micro``: sequences of a microbatch on one replica. ``group``: runs with equal text did the
    same work on the same machine in different ways.
    """

    table: str
    row: str
    hardware: str
    node_size: int
    inter_node: str
    devices: int
    model: Decoder
    degrees: Degrees
    pp: int
    vpp: int
    micro: int
    grad_accum: int
    recompute: str
    kernels: Kernels
    framework: Framework
    step_s: float
    group: str
    sequences: int
    params: int

    @property
    def plan(self) -> Plan:
        """What tells runs of a group apart."""
        return (
            self.degrees,
            self.pp,
            self.vpp,
            self.micro,
            self.grad_accum,
            self.recompute,
            self.kernels,
            self.framework,
        )


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A row that is not predicted."""

    table: str
    row: str
    reason: str


def read(folder: Path, names: Sequence[str]) -> list[Run | LeftOut]:
    """All rows of the named tables.

    Raises:
        SystemExit: a table is not there.
    """
    out: list[Run | LeftOut] = []
    for name in names:
        for file in TABLES[name]:
            path = folder / file
            if not path.exists():
                raise SystemExit(f"no table {path}; give the folder of the tables as argument")
            with path.open(newline="") as text:
                out += [_run(name, row) for row in csv.DictReader(text)]
    return out


def _number(row: Mapping[str, str], key: str, otherwise: int) -> int:
    text = row.get(key) or ""
    return int(float(text)) if text else otherwise


def _run(table: str, row: Mapping[str, str]) -> Run | LeftOut:
    reason = _reason(row)
    if reason:
        return LeftOut(table, row["row_id"], reason)
    other = row.get("other", "")
    model = _model(table, row)
    degrees = _degrees(row)
    split = degrees.data * degrees.zero * degrees.fsdp
    recompute = _recompute(table, row)
    if recompute is None:
        return LeftOut(table, row["row_id"], f"recompute not known: {row.get('recompute')!r}")
    accumulate = _number(row, "grad_accum", 1)
    sequences = _number(row, "global_batch_seqs", 0)
    micro = max(sequences // split // accumulate, 1)
    kernels = _kernels(table, row)
    key = "torchtitan compiled" if table == "torchtitan" and "compile" in other else table
    group = [row.get(k, "") for k in ("model", "hardware", "num_devices", "seq_len", "precision")]
    if table in ("vtrain", "alpa"):
        group.append(str(sequences))
    return Run(
        table,
        row["row_id"],
        row["hardware"],
        _number(row, "devices_per_node", 8),
        row.get("inter_node", ""),
        _number(row, "num_devices", 1),
        model,
        degrees,
        _number(row, "pp", 1),
        _number(row, "vpp", 1),
        micro,
        accumulate,
        recompute,
        kernels,
        FRAMEWORKS[key],
        float(row["step_time_seconds"]),
        "|".join([table, *group]),
        sequences,
        _number(row, "params", 0),
    )


def _reason(row: Mapping[str, str]) -> str:
    """Why a row can't be predicted, or an empty text."""
    other = row.get("other", "")
    if not row.get("step_time_seconds"):
        return "no time: out of memory"
    if row.get("experts") or "MoE" in row.get("model", ""):
        return "mixture of experts: no model of it here"
    if not row.get("layers"):
        return "no decoder (Wide-ResNet)"
    if ("Alpa ILP" in other or "heuristic" in other) and row.get("num_devices") != "1":
        return "the plan is not in the table"
    if "fine-tuning" in other:
        return "fine-tuning: sequence packing not known"
    return ""


def _model(table: str, row: Mapping[str, str]) -> Decoder:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    gated = row.get("gated_mlp") == "true"
    vocab = _number(row, "vocab", VOCABULARY.get(table, 0))
    tp = _number(row, "tp", 1)
    if table == "megatron":
        vocab = -(-vocab // (128 * tp)) * 128 * tp  # Megatron pads the vocabulary
    if table == "vtrain":
        vocab = vocab // tp * tp  # vTrain's model gives each device vocab // tp rows
    return Decoder(
        layers=int(row["layers"]),
        hidden=hidden,
        ffn=_number(row, "ffn_hidden", 4 * hidden),
        heads=heads,
        kv_heads=_number(row, "kv_heads", heads),
        head_dim=_number(row, "head_dim", hidden // heads),
        vocab=vocab,
        seq=int(row["seq_len"]),
        gated=gated,
        positions=not gated and table not in ("maxtext", "pax"),
        bias=table in ("vtrain", "alpa", "megatron", "pax") and not gated,
        tied=not gated,
    )


def _degrees(row: Mapping[str, str]) -> Degrees:
    tp, cp = _number(row, "tp", 1), _number(row, "cp", 1)
    data, fsdp = _number(row, "dp", 1), _number(row, "fsdp", 1)
    stage, other = row.get("zero_stage", ""), row.get("other", "")
    notes = row.get("notes", "")
    sequence = "sequence parallel" in notes
    zero = 1
    found = re.search(r"zero1 shard group (\d+)", other)
    if found:
        zero = min(int(found.group(1)), data)
        data //= zero
    elif stage in ("1", "2"):
        data, zero = 1, data
    if stage == "3" and data == fsdp:  # some tables name the same devices twice
        data = 1
    return Degrees(data, zero, fsdp, cp, tp, sequence)


def _recompute(table: str, row: Mapping[str, str]) -> str | None:
    text = row.get("recompute", "")
    if table == "vtrain":
        return "none"  # see docs/explanation/published-runs.md
    if text.startswith("full"):  # Megatron and its heirs run a layer's forward pass again
        return "whole" if table in ("megatron", "internevo") else "full"
    if text.startswith("custom"):
        return "offload+out" if "out_proj" in text else "offload"
    if text == "save_dot_with_no_batch_dim":
        return "minimal"
    if text in ("none", "selective-op", "minimal_flash", "selective-every-2nd-layer"):
        return text
    return None


def _kernels(table: str, row: Mapping[str, str]) -> Kernels:
    other, precision = row.get("other", ""), row["precision"]
    flash = table in ("llm_foundry", "torchtitan", "internevo") or "flash" in other
    flash |= (
        "attention=flash" in other
        or "cudnn" in other
        or "TransformerEngine" in row.get("framework", "")
    )
    low = "float16" if precision == "fp16" else "bfloat16"
    matmul = "float8_e4m3fn" if precision == "fp8" else low
    compiled = table in ("maxtext", "alpa", "pax") or "compile" in other
    reduced = low
    stored = "float32"
    if table == "llm_foundry":
        reduced = "float32" if "DEFAULT" in other else low
    elif table == "torchtitan":
        reduced = "float32"  # FSDP2's reduce_dtype there
    elif table in ("vtrain", "megatron", "internevo", "alpa"):
        stored = low
    attention = "flash" if flash else "dense"
    megatron = table in ("vtrain", "megatron")
    return Kernels(
        compiled,
        rows=megatron or table == "llm_foundry",
        dropout=megatron,
        joined=table in ("vtrain", "megatron", "llm_foundry", "internevo"),
        attention="flash-1" if table == "llm_foundry" else attention,
        matmul=matmul,
        reduced=reduced,
        stored=stored,
    )
