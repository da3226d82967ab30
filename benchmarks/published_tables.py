"""Published tables of training runs -> ``Run``s that can be predicted, or the reason why not.

Any CSV of a folder is read that has the columns ``framework``, ``num_devices`` and
``step_time_seconds``; what a run did comes from its row and from its framework's stack.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from published_case import Decoder, Degrees, Framework, Kernels
from published_stacks import Stack, stack_of

TABLES = {  # names of some tables, each of one file or several; any other is named like its file
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
    "ascend": ("ascend_910b_modellink.csv",),
    "nemo": ("nemo_launcher_h100_fp8.csv",),
    "t5x": ("jax_toolbox_t5x.csv",),
}
NEEDED = ("framework", "num_devices", "step_time_seconds")
"""Columns by which a table of training runs is known."""

Plan = tuple[Degrees, int, int, int, int, str, Kernels, Framework]


@dataclasses.dataclass(frozen=True)
class Run:
    """One published run: what ran where, and its seconds a step.

    ``micro``: sequences of a microbatch on one replica. ``group``: runs with equal text did the
    same work on the same machine in different ways. ``memory_bytes``: measured on a device, 0 if
    it was not.
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
    memory_bytes: float = 0.0

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


def names(folder: Path) -> list[str]:
    """The tables of training runs in a folder."""
    known = {file: name for name, files in TABLES.items() for file in files}
    found = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as text:
            columns = next(csv.reader(text), [])
        if all(name in columns for name in NEEDED):
            found.append(known.get(path.name, path.stem))
    return list(dict.fromkeys(found))


def read(folder: Path, tables: Sequence[str]) -> list[Run | LeftOut]:
    """All rows of the named tables.

    Raises:
        SystemExit: a table is not there.
    """
    out: list[Run | LeftOut] = []
    for name in tables:
        for file in TABLES.get(name, (f"{name}.csv",)):
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
    other, stack = row.get("other", ""), stack_of(row["framework"])
    degrees = _degrees(row, stack)
    split = degrees.data * degrees.zero * degrees.fsdp
    recompute = _recompute(row, stack)
    if recompute is None:
        return LeftOut(table, row["row_id"], f"recompute not known: {row.get('recompute')!r}")
    accumulate = _number(row, "grad_accum", 1)
    sequences = _number(row, "global_batch_seqs", 0)
    group = [row.get(k, "") for k in ("model", "hardware", "num_devices", "seq_len", "precision")]
    if "vTrain" in row.get("source", "") or "alpa" in row["framework"].lower():
        group.append(str(sequences))
    compiled = "compile" in other
    framework = stack.framework
    if compiled:
        framework = dataclasses.replace(framework, eager=False)
    if "overlap-grad-reduce" in other:
        framework = dataclasses.replace(framework, overlaps=True)
    return Run(
        table,
        row["row_id"],
        row["hardware"],
        _number(row, "devices_per_node", 8),
        row.get("inter_node", ""),
        _number(row, "num_devices", 1),
        _model(row, stack),
        degrees,
        _number(row, "pp", 1),
        _number(row, "vpp", 1),
        max(sequences // split // accumulate, 1),
        accumulate,
        recompute,
        _kernels(row, stack, compiled),
        framework,
        float(row["step_time_seconds"]),
        "|".join([table, *group]),
        sequences,
        _number(row, "params", 0),
        float(row.get("memory_bytes_per_device") or 0),
    )


def _reason(row: Mapping[str, str]) -> str:
    """Why a row can't be predicted, or an empty text."""
    other = row.get("other", "")
    if not row.get("step_time_seconds"):
        return "no time: out of memory"
    if row.get("experts") or "MoE" in row.get("model", ""):
        return "mixture of experts: no model of it here"
    if not row.get("layers") or not row.get("hidden"):
        return "no sizes of a decoder"
    if ("Alpa ILP" in other or "heuristic" in other) and row.get("num_devices") != "1":
        return "the plan is not in the table"
    if "fine-tuning" in other or "SFT" in other:
        return "fine-tuning: sequence packing not known"
    if "LoRA" in other:
        return "LoRA: no model of it here"
    return ""


def _model(row: Mapping[str, str], stack: Stack) -> Decoder:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    kv_heads = _number(row, "kv_heads", heads)
    name = row.get("model", "").lower()
    gated = row.get("gated_mlp") == "true" or "llama" in name or "gemma" in name
    vocab, tp = _number(row, "vocab", stack.vocabulary), _number(row, "tp", 1)
    step = stack.padded * tp
    vocab = -(-vocab // step) * step if step else vocab // tp * tp
    return Decoder(
        layers=int(row["layers"]),
        hidden=hidden,
        ffn=_number(row, "ffn_hidden", 4 * hidden),
        heads=heads,
        kv_heads=-(-kv_heads // tp) * tp if kv_heads < heads else heads,
        head_dim=_number(row, "head_dim", hidden // heads),
        vocab=vocab,
        seq=int(row["seq_len"]),
        gated=gated,
        positions=not gated and stack.positions,
        bias=not gated and stack.bias,
        tied=not gated,
    )


def _degrees(row: Mapping[str, str], stack: Stack) -> Degrees:
    tp, cp = _number(row, "tp", 1), _number(row, "cp", 1)
    data, fsdp = _number(row, "dp", 1), _number(row, "fsdp", 1)
    stage, other = row.get("zero_stage") or "", row.get("other", "")
    told = row.get("sequence_parallel", "") == "true" or "sequence parallel" in row.get("notes", "")
    zero = 1
    found = re.search(r"zero1 shard group (\d+)", other)
    if found:
        zero = min(int(found.group(1)), data)
        data //= zero
    elif stage in ("1", "2") or (not stage and stack.sharded):
        data, zero = 1, data
    if stage == "3" and data == fsdp:  # some tables name the same devices twice
        data = 1
    return Degrees(data, zero, fsdp, cp, tp, tp > 1 and (told or stack.sequence))


def _recompute(row: Mapping[str, str], stack: Stack) -> str | None:
    text = row.get("recompute") or ""
    if "ground_truth_single" in row.get("source", ""):
        return "none"  # see docs/explanation/published-runs.md
    if text.startswith("full"):  # Megatron and its heirs run a layer's forward pass again
        return stack.recompute
    if text.startswith("custom"):
        return "offload+out" if "out_proj" in text else "offload"
    if text == "save_dot_with_no_batch_dim":
        return "minimal"
    if text in ("none", "selective-op", "minimal_flash", "selective-every-2nd-layer"):
        return text
    if text.startswith("selective"):  # Korthikanti et al. 2022: attention's core is run again
        return "none" if stack.attention.startswith("flash") else "minimal"
    if not text and "nemo" in row["framework"].lower():
        return "none"
    return None


def _kernels(row: Mapping[str, str], stack: Stack, compiled: bool) -> Kernels:
    other, precision = row.get("other", ""), row["precision"]
    flash = "flash" in other or "cudnn" in other or "TransformerEngine" in row["framework"]
    low = "float16" if precision == "fp16" else "bfloat16"
    reduced = stack.reduced or low
    if "mp_mode=DEFAULT" in other:  # Composer's modes
        reduced = "float32"
    return Kernels(
        stack.fused or compiled,
        rows=stack.rows,
        dropout=stack.dropout,
        joined=stack.joined,
        attention="flash" if flash and stack.attention == "dense" else stack.attention,
        matmul="float8_e4m3fn" if precision == "fp8" else low,
        reduced=reduced,
        stored=stack.stored or low,
    )
