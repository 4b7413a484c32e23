"""The links between GPUs: rates by card and network, and rings over them."""

from __future__ import annotations

import pytest

from gptmill.config.errors import UserError
from gptmill.runtime.interconnects import FABRIC_GB, PCIE_GB, find_interconnect, find_link_rate
from gptmill.runtime.peak_rates import RATES


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("H100", 450), ("NVIDIA H200 (cuda:0)", 450), ("A100 SXM4 80GB", 300), ("B200", 900), ("RTX 4090", 32), ("X", 32)],
    ids=["h100", "by-torchs-name", "a100", "b200", "pcie", "unknown"],
)
def test_a_gpu_reaches_those_of_its_machine_by_nvlink_or_pcie(name: str, gigabytes: float) -> None:
    assert find_link_rate(name) == gigabytes * 1e9


def test_every_gpu_with_a_link_is_in_the_catalog() -> None:
    assert FABRIC_GB.keys() | PCIE_GB.keys() <= RATES.keys()
    assert not FABRIC_GB.keys() & PCIE_GB.keys()


@pytest.mark.parametrize(
    ("network", "gigabytes"),
    [("infiniband", 400), ("RoCE", 200), ("ethernet", 12.5), ("nvlink", 3600), ("100", 100)],
    ids=["infiniband", "roce", "ethernet", "nvlink", "given"],
)
def test_a_network_gives_a_machine_its_rate(network: str, gigabytes: float) -> None:
    assert find_interconnect("H100", 64, 8, network).network_rate == gigabytes * 1e9


@pytest.mark.parametrize("network", ["infinband", "0", "-3", "nan", "inf"], ids=str)
def test_an_unknown_network_is_refused(network: str) -> None:
    with pytest.raises(UserError, match=f"--interconnect {network}: not known.*the GB/s of a machine"):
        find_interconnect("H100", 64, 8, network)


def test_a_ring_that_leaves_its_machine_goes_as_fast_as_all_ports_together() -> None:
    links = find_interconnect("H100", 64, 8, "infiniband")
    assert links.find_ring(8).rate == 450e9
    assert links.find_ring(64).rate == 400e9
    assert links.find_ring_across().rate == 50e9
    assert links.find_ring(64).latency == pytest.approx(56 * 1e-6 + 8 * 5e-6)
    slow = find_interconnect("RTX 4090", 16, 2, "infiniband")
    assert slow.find_ring(16).rate == slow.find_ring_across().rate == 32e9
