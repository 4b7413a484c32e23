"""Peak FLOP/s of GPUs by name, for MFU (model FLOPs utilisation).

Vendors' figures for dense matmuls with fp32 accumulation: without sparsity, and without the fp16 accumulation of
GeForce GPUs, which training does not use. Sources: the data sheet of each GPU, and NVIDIA's white papers on its
architectures. Data sheets that print tensor rates with sparsity only are halved; those of Ada and Blackwell that print
fp8 or fp4 only are halved once more for each format up to bf16.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gptmill.config.run import PrecisionName


class Rates(NamedTuple):
    """Peak TFLOP/s by precision, of one device as torch counts devices."""

    half: float
    """bf16 and fp16."""
    tf32: float
    """That of fp32 on GPUs without TF32."""
    fp32: float
    has_bf16: bool = True


def _make_geforce(fp32: float) -> Rates:
    """GeForce since Ampere: tensor cores are twice as fast as fp32 in half precision, and as fast in TF32."""
    return Rates(2 * fp32, fp32, fp32)


def _make_rtx_pro(fp32: float) -> Rates:
    """Workstation GPUs since Ampere: their tensor cores are not slowed down by fp32 accumulation."""
    return Rates(4 * fp32, 2 * fp32, fp32)


HOPPER_SXM = Rates(989.4, 494.7, 66.9)
HOPPER_PCIE = Rates(756.0, 378.0, 51.2)
HOPPER_NVL = Rates(835.5, 417.5, 60.0)
H20 = Rates(148.0, 74.0, 44.0)
A100 = Rates(312.0, 156.0, 19.5)
MI250X_DIE = Rates(191.5, 47.9, 47.9)  # a GPU has two dies, and torch sees each as a device
MI300 = Rates(1307.4, 653.7, 163.4)

# DGX Spark's data sheet has 1,000 TFLOP/s in fp4 with sparsity, hence 125 in bf16; fp32: NVIDIA's talk, Hot Chips 2025.
GB10 = Rates(125.0, 62.5, 31.0)
B300 = Rates(2250.0, 1125.0, 75.0)  # HGX B300's data sheet, an eighth of its eight GPUs

RATES = {
    "B300": B300,
    "B300 SXM6 AC": B300,
    "GB300": Rates(2500.0, 1250.0, 80.0),
    "B100": Rates(1750.0, 875.0, 60.0),
    "B200": Rates(2250.0, 1125.0, 75.0),
    "GB200": Rates(2500.0, 1250.0, 80.0),
    "GB10": GB10,
    "H100": HOPPER_SXM,
    "H100 SXM5": HOPPER_SXM,
    "H100 PCIE": HOPPER_PCIE,
    "H100 NVL": HOPPER_NVL,
    "H200": HOPPER_SXM,
    "H200 NVL": HOPPER_NVL,
    "GH200": HOPPER_SXM,
    "H800": HOPPER_SXM,
    "H800 PCIE": HOPPER_PCIE,
    "H20": H20,
    "H20 3E": H20,
    "A100 SXM4": A100,
    "A100 PCIE": A100,
    "A800 SXM4": A100,
    "A800 PCIE": A100,
    "A10": Rates(125.0, 62.5, 31.2),
    "A10G": Rates(70.0, 35.0, 35.0),
    "A30": Rates(165.0, 82.0, 10.3),
    "A40": Rates(149.7, 74.8, 37.4),
    "L4": Rates(121.0, 60.0, 30.3),
    "L40": Rates(181.0, 90.5, 90.5),
    "L40S": Rates(362.0, 183.0, 91.6),
    "RTX A4000": _make_rtx_pro(19.2),
    "RTX A5000": _make_rtx_pro(27.8),
    "RTX A6000": Rates(154.8, 77.4, 38.7),
    "RTX 3500 ADA LAPTOP GPU": _make_rtx_pro(23.0),
    "RTX 4000 ADA": _make_rtx_pro(26.7),
    "RTX 4500 ADA": _make_rtx_pro(39.6),
    "RTX 5000 ADA": _make_rtx_pro(65.3),
    "RTX 6000 ADA": Rates(364.2, 182.1, 91.1),
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": _make_rtx_pro(125.0),
    "RTX PRO 6000 BLACKWELL SERVER EDITION": _make_rtx_pro(120.0),
    "RTX PRO 6000 BLACKWELL MAX Q WORKSTATION EDITION": _make_rtx_pro(110.0),
    "RTX 3050": _make_geforce(9.1),
    "RTX 3060": _make_geforce(12.7),
    "RTX 3060 TI": _make_geforce(16.2),
    "RTX 3070": _make_geforce(20.3),
    "RTX 3070 TI": _make_geforce(21.7),
    "RTX 3080": _make_geforce(29.8),
    "RTX 3080 TI": _make_geforce(34.1),
    "RTX 3090": _make_geforce(35.6),
    "RTX 3090 TI": _make_geforce(40.0),
    "RTX 4060": _make_geforce(15.1),
    "RTX 4060 TI": _make_geforce(22.1),
    "RTX 4070": _make_geforce(29.1),
    "RTX 4070 SUPER": _make_geforce(35.5),
    "RTX 4070 TI": _make_geforce(40.1),
    "RTX 4070 TI SUPER": _make_geforce(44.1),
    "RTX 4080": _make_geforce(48.7),
    "RTX 4080 SUPER": _make_geforce(52.2),
    "RTX 4090": _make_geforce(82.6),
    "RTX 4090 D": _make_geforce(73.5),
    "RTX 5060": _make_geforce(19.2),
    "RTX 5060 TI": _make_geforce(23.7),
    "RTX 5070": _make_geforce(30.9),
    "RTX 5070 TI": _make_geforce(43.9),
    "RTX 5080": _make_geforce(56.3),
    "RTX 5090": _make_geforce(104.8),
    "V100 SXM2": Rates(125.0, 15.7, 15.7, has_bf16=False),
    "V100 PCIE": Rates(112.0, 14.0, 14.0, has_bf16=False),
    "V100S PCIE": Rates(130.0, 16.4, 16.4, has_bf16=False),
    "T4": Rates(65.0, 8.1, 8.1, has_bf16=False),
    "TITAN RTX": Rates(130.5, 16.3, 16.3, has_bf16=False),
    "RTX 2080 TI": Rates(53.8, 13.4, 13.4, has_bf16=False),
    "P100 SXM2": Rates(21.2, 10.6, 10.6, has_bf16=False),
    "P100 PCIE": Rates(18.7, 9.3, 9.3, has_bf16=False),
    "MI250X": MI250X_DIE,
    "MI250X MI250": MI250X_DIE,
    "MI300X": MI300,
    "MI325X": MI300,
    "MI350X": Rates(2306.9, 144.2, 144.2),  # its TF32 is emulated: not faster than fp32
    "MI355X": Rates(2516.6, 157.3, 157.3),
}

# Words that do not identify the GPU: vendor, memory size and the device index, as in "(cuda:0)".
IGNORED_WORD = re.compile(r"NVIDIA|AMD|TESLA|GEFORCE|INSTINCT|GENERATION|OAM|VF|\d+GB?|HBM\d+E?")
DEVICE_INDEX = re.compile(r"\(.*\)$")


def find_peak_rate(device_name: str, precision: PrecisionName) -> float | None:
    """Peak FLOP/s of a device by the name that torch or `describe_device` gives it; None for an unlisted one.

    The whole name must match: a MIG slice or a laptop variant has another peak. fp8 is measured against the bf16 peak,
    since only some matmuls run in fp8, which also keeps MFU comparable.
    """
    rates = RATES.get(identify_gpu(device_name))
    if rates is None:
        return None
    if precision in ("fp32", "tf32"):
        return 1e12 * (rates.fp32 if precision == "fp32" else rates.tf32)
    return 1e12 * rates.half if precision == "fp16" or rates.has_bf16 else None


def identify_gpu(device_name: str) -> str:
    """The name without vendor, memory size and device index: the key of a known GPU in tables like `RATES`."""
    words = re.split(r"[\s/-]+", DEVICE_INDEX.sub("", device_name).strip().upper())
    return " ".join(word for word in words if word and not IGNORED_WORD.fullmatch(word))
