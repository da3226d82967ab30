"""Predicted beside measured times of single kernels, from tables of published measurements.

    python benchmarks/compute_truth.py FOLDER [--rows]

FOLDER holds gemm_measured.csv, attention_measured.csv and memory_bandwidth_measured.csv. A kernel
is priced with the catalog's constants of its device, its start included; hardware that is not in
the catalog is left out (H800 counts as H100: the same chip with fewer links). `--rows` prints
every row. Products in fp8 write a bfloat16 result. Attention is priced for the kernel that the
catalog's rate stands for (FlashAttention-2); other kernels are shown beside it.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from costmodels import AnalyticCostModel, CostModel, attention_drag, parse_cluster

KINDS = (
    ("Ironwood", "tpu7x:1"),
    ("v6e", "v6e:1"),
    ("GB200", ""),
    ("GH200", ""),
    ("PCIe", ""),
    ("B200", "b200:1"),
    ("H200", "h200:1"),
    ("H100", "h100:1"),
    ("H800", "h100:1"),
    ("A100", "a100:1"),
)
DTYPES = {"fp8": ("float8", 1), "bf16": ("bfloat16", 2), "fp16": ("float16", 2)}
TOKENS, WIDTH = 16384, 2048
"""Of the FlashAttention figures: tokens in a batch, and heads times head size."""
Row = tuple[str, str, str, float, float]
"""Table, device, what, predicted seconds, measured seconds."""


def model_of(hardware: str) -> CostModel | None:
    """The cost model of the catalog's kind of some hardware."""
    cluster = next((text for name, text in KINDS if name in hardware), "")
    return AnalyticCostModel(parse_cluster(cluster)) if cluster else None


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table."""
    with (folder / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def products(folder: Path) -> Iterator[Row]:
    """Matrix products; rows without a full shape are left out."""
    for row in table(folder, "gemm_measured"):
        model = model_of(row["hardware"])
        if model is None or not (row["m"] and row["n"] and row["k"]):
            continue
        m, n, k, groups = (int(row[c] or 1) for c in ("m", "n", "k", "groups"))
        dtype, size = DTYPES[row["dtype"]]
        flops, result = 2.0 * groups * m * n * k, 2.0 * groups * m * n
        moved = groups * size * (m * k + k * n) + result
        stored = result * max(1.0, model.cluster.device.lane_bytes / 2.0)
        found = model.op_overhead_s + model.compute_s(flops, moved, dtype, "matmul", stored)
        kind = "best shapes" if "best shape" in row["notes"] else "given shapes"
        what = f"{dtype}, {kind}"
        measured = flops / (float(row["tflops_per_device"]) * 1e12)
        yield f"product {groups}x{m}x{n}x{k}", model.cluster.device.kind, what, found, measured


def attention(folder: Path) -> Iterator[Row]:
    """Fused attention in the setting of the FlashAttention papers."""
    for row in table(folder, "attention_measured"):
        model = model_of(row["hardware"])
        if model is None or not row["tflops_per_device"] or row["causal"] not in ("true", "false"):
            continue
        if row["implementation"] == "PyTorch" or row["dtype"] == "fp8":
            continue
        depth, span, causal = int(row["head_dim"]), int(row["seq_len"]), row["causal"] == "true"
        passes = 1.0 if row["direction"] == "forward" else 3.5
        flops = 4.0 * TOKENS * span * WIDTH * passes * (0.5 if causal else 1.0)
        starts = model.op_overhead_s * (1 if passes == 1.0 else 2)
        work = flops * attention_drag(depth, span, causal)
        found = starts + model.compute_s(work, 0.0, "bfloat16", "attention")
        what = f"{row['implementation']}, {row['direction']}"
        measured = flops / (float(row["tflops_per_device"]) * 1e12)
        name = f"attention {depth} x {span}{' causal' if causal else ''}"
        yield name, model.cluster.device.kind, what, found, measured


def memory(folder: Path) -> Iterator[Row]:
    """Streaming kernels; without a stated size they are taken to be large."""
    for row in table(folder, "memory_bandwidth_measured"):
        model = model_of(row["hardware"])
        if model is None or "nvbandwidth" in row["kernel"]:
            continue
        size, rate = float(row["buffer_bytes"] or 2**28), float(row["bandwidth_bytes_per_second"])
        if "Ironwood" in row["hardware"]:  # per chip; a device is one of two cores
            size, rate = size / 2, rate / 2
        start = model.op_overhead_s if row["buffer_bytes"] else 0.0
        what = "under 64 MiB" if size < 2**26 else "large"
        found = start + model.compute_s(0.0, 2.0 * size, "float32")
        yield f"stream {row['kernel']}", model.cluster.device.kind, what, found, 2.0 * size / rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", action="store_true")
    args = parser.parse_args()
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for source in (products, attention, memory):
        for name, device, what, found, measured in source(args.folder):
            ratios[source.__name__, device, what].append(found / measured)
            if args.rows:
                print(
                    f"{device:6} {name:42} {what:32} predicted {1e6 * found:10.1f} us, "
                    f"measured {1e6 * measured:10.1f} us, ratio {found / measured:.2f}"
                )
    print("| kernels | device | which | rows | median predicted / measured | lowest | highest "
          "| mean factor off |")  # fmt: skip
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for (kernels, device, what), rows in sorted(ratios.items()):
        off = math.exp(statistics.fmean(abs(math.log(r)) for r in rows))
        print(
            f"| {kernels} | {device} | {what} | {len(rows)} | {statistics.median(rows):.2f} "
            f"| {min(rows):.2f} | {max(rows):.2f} | {off:.2f} |"
        )


if __name__ == "__main__":
    main()
