"""Peak rates by the names that drivers give to GPUs: the right one, or none."""

from __future__ import annotations

import pytest
import torch

from gptmill.config.run import PrecisionName
from gptmill.runtime.device import describe_device
from gptmill.runtime.peak_rates import RATES, find_peak_rate

# As torch.cuda.get_device_name says them, with the dense rate in half precision: names of which one is part of another.
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA GB10": 125,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA RTX 3500 Ada Generation Laptop GPU": 92,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 500,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 440,
    "Tesla P100-PCIE-16GB": 18.7,
    "A100-PCIE-40GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "GeForce RTX 3090": 71.2,
    "NVIDIA GeForce RTX 4070": 58.2,
    "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA GeForce RTX 4090 D": 147,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-PCIE-32GB": 112,
    "AMD Instinct MI250X/MI250": 191.5,
    "AMD Instinct MI300X VF": 1307.4,
}
STRANGERS = (
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce GTX 1080 Ti",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA RTX A1000",
    "NVIDIA RTX PRO 5000 Blackwell",
    "Quadro RTX 6000",
    "NVIDIA A100X",
    "NVIDIA T400 4GB",
    "GRID A40-48Q",
    "AMD Radeon RX 7900 XTX",
    "NVIDIA Graphics Device",
    "NVIDIA 80GB",
    "",
)


def test_every_name_finds_its_own_rate() -> None:
    for place in ("", " (cuda:7)"):
        found = {name: (find_peak_rate(name + place, "fp16") or 0) / 1e12 for name in NAMES}
        assert found == pytest.approx(NAMES)


def test_a_name_that_only_resembles_one_finds_none() -> None:
    names = [name + place for name in STRANGERS for place in ("", " (cuda:0)")]
    assert [name for name in names if find_peak_rate(name, "bf16") is not None] == []


@pytest.mark.parametrize(
    ("precision", "tflops"),
    [("bf16", 989.4), ("fp16", 989.4), ("fp8", 989.4), ("fp8-emulated", 989.4), ("tf32", 494.7), ("fp32", 66.9)],
)
def test_the_rate_is_that_of_the_number_format(precision: PrecisionName, tflops: float) -> None:
    assert find_peak_rate("NVIDIA H200", precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["Tesla T4", "Tesla V100-SXM2-32GB"])
def test_a_gpu_without_bf16_has_no_rate_for_it(name: str) -> None:
    assert find_peak_rate(name, "bf16") is None
    assert find_peak_rate(name, "tf32") == find_peak_rate(name, "fp32")


def test_a_cpu_has_none() -> None:
    assert find_peak_rate(describe_device(torch.device("cpu")), "bf16") is None


def test_every_row_is_found_by_its_name_and_no_format_beats_a_smaller_one() -> None:
    for name in RATES:
        half, tf32, fp32 = (find_peak_rate(f"NVIDIA {name}", format_) or 0 for format_ in ("fp16", "tf32", "fp32"))
        assert half > tf32 >= fp32 > 5e12, name
