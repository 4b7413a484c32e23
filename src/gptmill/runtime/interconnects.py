"""How fast GPUs reach each other: inside a machine by NVLink or PCIe, between machines by a network.

Rates are nominal bytes per second in one direction, half of the sum of both directions that vendors print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gptmill.config.errors import UserError, suggest
from gptmill.runtime.peak_rates import identify_gpu

# GB/s of both directions of one GPU, from the vendors' data sheets: NVLink 2 (V100), 3 (A100), 4 (H100, H200) and 5
# (B200, B300); the versions for China have fewer links (A800, H800). AMD: all Infinity Fabric links of a GPU; MI250X by
# die.
FABRIC_GB = {
    "B300": 1800, "B300 SXM6 AC": 1800, "GB300": 1800, "B100": 1800, "B200": 1800, "GB200": 1800,
    "H100": 900, "H100 SXM5": 900, "H200": 900, "GH200": 900, "H800": 400, "H20": 900, "H20 3E": 900,
    "A100 SXM4": 600, "A800 SXM4": 400, "V100 SXM2": 300, "P100 SXM2": 160,
    "MI250X": 400, "MI250X MI250": 400, "MI300X": 896, "MI325X": 896, "MI350X": 1075, "MI355X": 1075,
}  # fmt: skip
# All others talk over PCIe with 16 lanes: an NVLink bridge joins two of them, or four, and a ring needs all.
PCIE_3, PCIE_4, PCIE_5 = 32, 64, 128
PCIE_GB = {
    "H100 PCIE": PCIE_5, "H100 NVL": PCIE_5, "H200 NVL": PCIE_5, "H800 PCIE": PCIE_5,
    "RTX 5070": PCIE_5, "RTX 5070 TI": PCIE_5, "RTX 5080": PCIE_5, "RTX 5090": PCIE_5,
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": PCIE_5, "RTX PRO 6000 BLACKWELL SERVER EDITION": PCIE_5,
    "RTX PRO 6000 BLACKWELL MAX Q WORKSTATION EDITION": PCIE_5,
    "RTX 2080 TI": PCIE_3, "TITAN RTX": PCIE_3, "P100 PCIE": PCIE_3,
    "V100 PCIE": PCIE_3, "V100S PCIE": PCIE_3, "T4": PCIE_3,
    "RTX 4060": PCIE_4 // 2, "RTX 4060 TI": PCIE_4 // 2, "RTX 3050": PCIE_4 // 2,  # eight lanes
    "RTX 5060": PCIE_5 // 2, "RTX 5060 TI": PCIE_5 // 2,
}  # fmt: skip
GPU_PORT_GB = {
    "infiniband": 50.0,  # a port of 400 Gb/s (NDR) for each GPU, as in NVIDIA's DGX H100 (its data sheet)
    "roce": 25.0,  # a port of 200 Gb/s for each GPU
}
MACHINE_PORT_GB = {"ethernet": 12.5}  # one port of 100 Gb/s for all GPUs of a machine
NVLINK = "nvlink"  # switches that join machines, as in a GB200 NVL72
NETWORKS = (*GPU_PORT_GB, *MACHINE_PORT_GB, NVLINK)
LINK_SECONDS, NETWORK_SECONDS = 1e-6, 5e-6  # from one GPU to the next, however little is sent: the usual magnitude
GB = 1e9


class Ring(NamedTuple):
    """GPUs that pass data on in a ring, as NCCL does."""

    ranks: int
    rate: float
    """Nominal bytes per second of each."""
    latency: float
    """Seconds once around."""


@dataclass(frozen=True)
class Interconnect:
    """The links of a cluster of equal machines."""

    gpus: int
    nodes: int
    link_rate: float
    """Of one GPU to the others of its machine."""
    network_rate: float
    """Of a whole machine to the others."""
    network: str

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    def find_ring(self, ranks: int) -> Ring:
        """The ring over so many neighbouring GPUs: it leaves each machine once, by all of its ports."""
        crossings = 0 if ranks <= self.gpus_per_node else ranks // self.gpus_per_node
        rate = min(self.link_rate, self.network_rate) if crossings else self.link_rate
        latency = (ranks - crossings) * LINK_SECONDS + crossings * NETWORK_SECONDS
        return Ring(ranks, rate, latency)

    def find_ring_across(self) -> Ring:
        """The ring over one GPU of each machine, while the other GPUs have theirs."""
        rate = min(self.link_rate, self.network_rate / self.gpus_per_node)
        return Ring(self.nodes, rate, self.nodes * NETWORK_SECONDS)


def find_interconnect(device_name: str, gpus: int, nodes: int, network: str) -> Interconnect:
    """The links of a cluster of this GPU; raises UserError for a network that is neither known nor a rate."""
    link = find_link_rate(device_name)
    return Interconnect(gpus, nodes, link, _find_network_rate(network, gpus // nodes, link), network)


def find_link_rate(device_name: str) -> float:
    """Bytes per second from a GPU to the others of its machine; that of PCIe 4 for an unknown one."""
    known = identify_gpu(device_name)
    return FABRIC_GB.get(known, PCIE_GB.get(known, PCIE_4)) / 2 * GB


def _find_network_rate(network: str, gpus_per_node: int, link_rate: float) -> float:
    name = network.strip().lower()
    if name in GPU_PORT_GB:
        return GPU_PORT_GB[name] * gpus_per_node * GB
    if name in MACHINE_PORT_GB:
        return MACHINE_PORT_GB[name] * GB
    if name == NVLINK:
        return link_rate * gpus_per_node
    try:
        rate = float(name)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(
            f"--interconnect {network}: not known{suggest(name, NETWORKS)}; use {', '.join(NETWORKS)}, or the GB/s of "
            f"a machine in one direction, e.g. 400"
        )
    return rate * GB
