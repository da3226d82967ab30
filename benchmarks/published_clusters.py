"""The machines of published runs: the catalog's clusters, with what a table says put in."""

from __future__ import annotations

import dataclasses
import functools

from published_case import Kernels

from costmodels import Cluster, Device, parse_cluster

FLASH_1 = 0.5
"""Rate of the first FlashAttention, and of Triton's, of that of the second (Dao 2023: the second
is about twice as fast; 1.7 to 3.0 and 1.3 to 2.5 times in section 4.1)."""

KINDS = (  # text in the table's hardware, device kind
    ("A100-SXM-40GB", "a100-40gb"),
    ("A100", "a100"),
    ("H100", "h100"),
    ("V100-SXM2-32GB", "v100-32gb"),
    ("V100-SXM3-32GB", "v100-32gb"),
    ("V100", "v100"),
    ("v5e", "v5e"),
    ("v5p", "v5p"),
    ("v6e", "v6e"),
    ("v4", "v4"),
)
TORUS = {
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
NIC_BYTES_PER_S = (  # text in the table's inter_node, bytes/s per device one way
    ("4x100Gb RoCE per node", 4 * 12.5e9 / 8),
    ("RoCE 1600Gb/s per node", 16 * 12.5e9 / 8),
    ("4 NIC x 200Gb = 800Gb/s per node", 4 * 25e9 / 8),
    ("400Gb/s per GPU", 50e9),
    ("25 Gb/s Ethernet per node", 3.125e9 / 8),
    ("8xHDR200 InfiniBand per node", 25e9),
)


@functools.lru_cache(maxsize=64)
def cluster_of(hardware: str, inter_node: str, node_size: int, devices: int) -> Cluster:
    """The catalog's cluster, with what the table says of memory and network put in.

    Raises:
        ClusterError: a device kind that the catalog lacks.
    """
    kind = next(kind for text, kind in KINDS if text in hardware)
    if kind.startswith("v") and not kind.startswith("v100"):
        slices = 1
        per_slice = devices
        if "slice" in inter_node:
            found = inter_node.split()
            slices = int(found[0])
            per_slice = devices // slices
        shape = TORUS[per_slice]
        if kind in ("v4", "v5p"):
            shape = (4, 4, per_slice // 16)
        text = f"{kind}:{'x'.join(map(str, shape))}" + (f"+{slices}" if slices > 1 else "")
        return parse_cluster(text)
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


def with_attention(cluster: Cluster, kernels: Kernels) -> Cluster:
    """A cluster whose devices' attention runs at the rate of a run's kernel."""
    if kernels.attention != "flash-1":
        return cluster
    rate = FLASH_1 * cluster.device.attention_efficiency
    device = dataclasses.replace(cluster.device, attention_efficiency=rate)
    return dataclasses.replace(cluster, device=device)


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """A part of a cluster of nodes: one pipeline stage's devices."""
    per_node = min(cluster.devices_per_node, devices)
    shape = (per_node, devices // per_node)
    kind = cluster.text.partition(":")[0]
    return dataclasses.replace(cluster, shape=shape, text=f"{kind}:{shape[0]}x{shape[1]}")
