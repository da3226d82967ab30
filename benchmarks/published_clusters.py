"""The machines of published runs: the catalog's clusters, with what a table says put in."""

from __future__ import annotations

import dataclasses
import functools

from published_case import Framework, Kernels

from costmodels import Cluster, ClusterError, Device, find_kind, parse_cluster

QUEUED_S = 1e-6
"""Seconds between the end of a kernel and the start of the next one that waits in a stream (the
simulator of Lin et al. 2022, see ``published_predict``)."""
FLASH_1 = 0.5
"""Rate of the first FlashAttention, and of Triton's, of that of the second (Dao 2023: the second
is about twice as fast; 1.7 to 3.0 and 1.3 to 2.5 times in section 4.1)."""

TPUS = frozenset({"v4", "v5e", "v5p", "v6e", "tpu7x"})
KINDS = (  # text in the table's hardware, device kind, where the catalog would not know it
    ("A100-SXM-40GB", "a100-40gb"),
    ("V100-SXM2-32GB", "v100-32gb"),
    ("V100-SXM3-32GB", "v100-32gb"),
    ("H100", "h100"),
    ("Ironwood", "tpu7x"),
    ("v7x", "tpu7x"),
    ("v6e", "v6e"),
    ("v5p", "v5p"),
    ("v5e", "v5e"),
    ("v4", "v4"),
    ("Ascend 910C", "ascend910c"),
    ("Ascend 910B", "ascend910b"),
)
NIC_BYTES_PER_S = (  # text in the table's inter_node, bytes/s per device one way
    ("4x100Gb RoCE per node", 4 * 12.5e9 / 8),
    ("RoCE 1600Gb/s per node", 16 * 12.5e9 / 8),
    ("4 NIC x 200Gb = 800Gb/s per node", 4 * 25e9 / 8),
    ("400Gb/s per GPU", 50e9),
    ("25 Gb/s Ethernet per node", 3.125e9 / 8),
    ("8xHDR200 InfiniBand per node", 25e9),
)


def kind_of(hardware: str) -> str:
    """The device kind that a table's text names; raises ClusterError if there is none."""
    kind = next((kind for text, kind in KINDS if text in hardware), None) or find_kind(hardware)
    if kind is None:
        raise ClusterError(f"no device of the catalog is {hardware!r}")
    return kind


@functools.lru_cache(maxsize=64)
def cluster_of(hardware: str, inter_node: str, node_size: int, devices: int) -> Cluster:
    """The catalog's cluster, with what the table says of memory and network put in.

    Raises:
        ClusterError: a device kind that the catalog lacks.
    """
    kind = kind_of(hardware)
    if kind in TPUS:
        slices = int(inter_node.split()[0]) if "slice" in inter_node else 1
        more = f"+{slices}" if slices > 1 else ""
        per_slice = devices // slices
        if kind == "tpu7x":  # rows count chips, of two devices each
            return parse_cluster(f"tpu7x:{'x'.join(map(str, _cube(per_slice)))}x2{more}")
        return parse_cluster(f"{kind}:{per_slice}{more}")
    per_node = min(node_size, devices)
    cluster = parse_cluster(f"{kind}:{per_node}x{-(-devices // per_node)}")
    if "DGX-2" in hardware:  # its switches join all devices at the full rate
        cluster = dataclasses.replace(cluster, link=dataclasses.replace(cluster.link, wires=()))
    if "HBM2e" in hardware:
        device = dataclasses.replace(cluster.device, memory_bytes_per_s=2.4e12)
        device = at_power(device, 500.0 / 700.0) if "500W" in hardware else device
        cluster = dataclasses.replace(cluster, device=device)
    for text, bytes_per_s in NIC_BYTES_PER_S:
        if text in inter_node and cluster.network is not None:
            network = dataclasses.replace(cluster.network, bytes_per_s=0.9 * bytes_per_s)
            cluster = dataclasses.replace(cluster, network=network)
    return cluster


def _cube(chips: int) -> tuple[int, int, int]:
    """The most even torus of three dimensions."""
    shapes = (
        (a, b, chips // a // b)
        for a in range(1, chips + 1)
        if chips % a == 0
        for b in range(a, chips // a + 1)
        if chips // a % b == 0 and chips // a // b >= b
    )
    return min(shapes, key=lambda s: s[2] - s[0])


def at_power(device: Device, share: float) -> Device:
    """A device that gets a share of the power that its peak is stated at.

    Power grows with the cube of the clock where voltage follows it, and dense products run at the
    limit of power.
    """
    clock = share ** (1 / 3)
    return dataclasses.replace(
        device,
        matmul_efficiency=clock * device.matmul_efficiency,
        attention_efficiency=clock * device.attention_efficiency,
        vector_flops_per_s=clock * device.vector_flops_per_s,
    )


def with_stack(cluster: Cluster, kernels: Kernels, framework: Framework) -> Cluster:
    """A cluster as a run's software uses it: the rate of its attention kernel, how kernels start
    one after the other, and what of communication its framework hides."""
    device = cluster.device
    if kernels.attention == "flash-1":
        rate = FLASH_1 * device.attention_efficiency
        device = dataclasses.replace(device, attention_efficiency=rate)
    if framework.eager:  # Python waits for collectives inside a layer; kernels wait in a stream
        device = dataclasses.replace(device, kernel_latency_s=QUEUED_S, overlap=0.0)
    if not framework.overlaps:
        none = {"overlap": 0.0, "overlap_ahead": 0.0, "overlap_behind": 0.0}
        device = dataclasses.replace(device, **none)
    return dataclasses.replace(cluster, device=device)
