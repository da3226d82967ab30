"""Predicted beside measured times of collectives, from tables of published measurements.

    python benchmarks/collectives_truth.py FOLDER [--rows]

FOLDER holds collectives_*.csv and moe_all_to_all_deepep.csv. Each row is priced on the cluster
that its hardware names; what a machine does not share with the catalog (a slower network, a larger
node) is an override as in a cluster file, from the machine's description. Rows whose
hardware is not in the catalog are left out, so are those measured with the default algorithm
switched off. Galvatron's tables don't state their GPU: they are priced as A100. `--rows` prints
every row.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from costmodels import Cluster, collective_coefficients, parse_cluster
from costmodels.collectives import Collective

TABLES = ("nccl_tests", "stas_azure", "vtrain_allreduce", "tpu", "galvatron")
KINDS: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}
CLASSES = (("under 1 MiB", 2.0**20), ("1 to 64 MiB", 2.0**26), ("64 MiB and more", math.inf))
PER_CARD = "[inter_node]\nbytes_per_s = {}\n"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Device kind of the catalog, devices per node, what a cluster file changes, and its name."""

    device: str
    per_node: int = 8
    changes: str = ""
    name: str = ""


MACHINES = {
    "A100-SXM-80GB (p4de.24xlarge)": Machine(
        "a100", 8, PER_CARD.format(6.25e9), "a100, 4x100 Gb EFA"
    ),
    "A100-SXM-40GB (BM.GPU.B4.8)": Machine("a100-40gb"),
    "A100-SXM (8 per node)": Machine("a100"),
    "A100-SXM (8 per node, NVSwitch)": Machine("a100"),
    "A100-SXM (Azure NDv4)": Machine("a100"),
    "V100-SXM2 (8 per node)": Machine("v100"),
    "H100-SXM-80GB": Machine("h100"),
    "H100-SXM-80GB (DGX)": Machine("h100"),
    "H100-SXM-80GB (Azure NDv5)": Machine("h100"),
    "H100-SXM-80GB (p5.48xlarge)": Machine("h100", name="h100, EFA"),
    "H100-SXM-80GB (p5.48xlarge; inferred)": Machine("h100", name="h100, EFA"),
    "H100-SXM-80GB (p5 class; inferred)": Machine("h100", name="h100, EFA"),
    "H100-SXM-80GB (job name h100-64-sharp; 96 ranks by ratio)": Machine("h100"),
    "H100-SXM-80GB (GCP A3 Mega)": Machine(
        "h100", 8, PER_CARD.format(2.5e10), "h100, 8x200 Gb TCPXO"
    ),
    "H100-SXM-80GB (GCP A3 High)": Machine(
        "h100", 8, PER_CARD.format(1.25e10), "h100, 4x200 Gb TCPX"
    ),
    "H200 SXM": Machine("h200"),
    "H200 SXM (GCP A3 Ultra)": Machine("h200"),
    "H200 SXM (Azure ND H200 v5)": Machine("h200"),
    "B200 SXM": Machine("b200"),
    "B200 SXM (AWS p6-b200)": Machine("b200", name="b200, EFA"),
    "GB200 NVL72": Machine("b200", 72, "[node]\ndevices_per_node = 72\n", "gb200"),
    "8-GPU NVLink node (A800/A100 class; GPU not stated)": Machine("a100"),
}
H800 = Machine(
    "h100", 8, "[intra_node]\nbytes_per_s = 2.0e11\n"
)  # NVLink cut to 400 GB/s both ways


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement and its prediction; `group` is members per node x nodes."""

    table: str
    kind: str
    device: str
    group: str
    payload_bytes: float
    measured_s: float
    predicted_s: float

    @property
    def size_class(self) -> str:
        """Name of the class that the payload falls into."""
        return next(name for name, end in CLASSES if self.payload_bytes < end)

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_s / self.measured_s


def cluster_of(machine: Machine, nodes: int) -> Cluster:
    """The cluster of so many nodes of a machine."""
    text = (
        f'[cluster]\ndevice = "{machine.device}"\ndevices_per_node = {machine.per_node}\n'
        f"nodes = {nodes}\n{machine.changes}"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return parse_cluster(file.name)


def node_rows(folder: Path, table: str) -> Iterator[Row | None]:
    """Rows of a table of node machines; None for each that can't be used."""
    with (folder / f"collectives_{table}.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            machine = MACHINES.get(line["hardware"])
            kind = KINDS.get(line["collective"])
            stated = line["message_bytes"] and line["time_seconds"] and line["num_devices"]
            algorithm = line["algorithm"]
            off = kind == "all_reduce" and ("NVLS off" in algorithm or algorithm == "ring")
            if machine is None or kind is None or not stated or off:
                yield None
                continue
            count, measured_s = int(line["num_devices"]), float(line["time_seconds"])
            inside = min(count, machine.per_node)
            nodes = -(-count // machine.per_node)
            cluster = cluster_of(machine, nodes)
            alpha_s, beta = collective_coefficients(cluster, kind, (count,), (0,))
            payload = float(line["message_bytes"])
            device = machine.name or machine.device
            group, predicted_s = f"{inside}x{nodes}", alpha_s + beta * payload
            yield Row(table, kind, device, group, payload, measured_s, predicted_s)


def torus_rows(folder: Path) -> Iterator[Row | None]:
    """All-gathers over 4 Ironwood chips, an all-reduce over 256 v6e chips.

    The latter prints bytes/s: 2 (n - 1) / n times the matrix, over the time, in its script. The one
    between slices is left out: the number of slices is not stated.
    """
    meshes = {"ICI, topology 2x2x1": "tpu7x:2x2x1x2", "ICI, topology 2x2x2": "tpu7x:2x2x2x2"}
    with (folder / "collectives_tpu.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            payload = float(line["message_bytes"])
            if line["intra_link"] in meshes:
                cluster = parse_cluster(meshes[line["intra_link"]])
                kind, group, mesh = KINDS["all_gather"], "2x2", (cluster.num_devices // 8, 4, 2)
                measured_s = float(line["time_seconds"])
            elif line["hardware"] == "TPU v6e-256":
                cluster = parse_cluster("v6e:16x16")
                kind, group, mesh = KINDS["all_reduce"], "16x16", (1, 256)
                measured_s = payload * 2 * 255 / 256 / float(line["busbw_bytes_per_second"])
            else:
                yield None
                continue
            alpha_s, beta = collective_coefficients(cluster, kind, mesh, (1,))
            predicted_s = alpha_s + beta * payload
            yield Row("tpu", kind, cluster.device.kind, group, payload, measured_s, predicted_s)


def expert_rows(folder: Path) -> Iterator[Row | None]:
    """DeepEP's rates of the busiest link, as the time of the bytes that a gigabyte puts on it."""
    with (folder / "moe_all_to_all_deepep.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            if line["hardware"] != "H800 SXM" or line["kernel"] != "normal":
                yield None
                continue
            count = int(line["expert_parallel"])
            nodes = -(-count // 8)
            cluster = cluster_of(H800, nodes)
            _, beta = collective_coefficients(cluster, "all_to_all", (count,), (0,))
            share = (count - 8) / count if nodes > 1 else 7 / 8
            measured_s = 1e9 * share / float(line["bandwidth_bytes_per_second"])
            group = f"{min(count, 8)}x{nodes}"
            yield Row("deepep", "all_to_all", "h800", group, 1e9, measured_s, 1e9 * beta)


def table_rows(folder: Path, table: str) -> list[Row | None]:
    """All rows of a table, None for each that is left out."""
    if table == "tpu":
        return list(torus_rows(folder))
    return list(expert_rows(folder) if table == "deepep" else node_rows(folder, table))


def quantile(values: Iterable[float], part: float) -> float:
    """The value below which that part of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def errors(rows: list[Row]) -> str:
    """Count, median ratio, median and 90th percentile of |ln ratio|, as table cells."""
    logs = [abs(math.log(row.ratio)) for row in rows]
    ratio = statistics.median(row.ratio for row in rows)
    return f"{len(rows)} | {ratio:.2f} | {statistics.median(logs):.2f} | {quantile(logs, 0.9):.2f}"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the tables lie")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    classes: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for table in (*TABLES, "deepep"):
        rows = table_rows(options.folder, table)
        used = [row for row in rows if row is not None]
        print(f"{table}: {len(used)} of {len(rows)} rows used")
        for row in used:
            groups[table, row.kind, row.device, row.group, row.size_class].append(row)
            classes[table, row.size_class].append(row)
            if options.rows:
                print(
                    f"  {row.kind} {row.device} {row.group} {row.payload_bytes:.3g} B: "
                    f"{row.predicted_s:.3g} s / {row.measured_s:.3g} s = {row.ratio:.2f}"
                )
    head = "rows | predicted / measured | median abs ln | 90th percentile |"
    print(f"\n| table | size | {head}\n|---|---|---|---|---|---|")
    for names, found in classes.items():
        print(f"| {' | '.join(names)} | {errors(found)} |")
    print(f"\n| table | collective | device | group | size | {head}\n" + "|---" * 9 + "|")
    for key, found in groups.items():
        print(f"| {' | '.join(key)} | {errors(found)} |")


if __name__ == "__main__":
    main()
