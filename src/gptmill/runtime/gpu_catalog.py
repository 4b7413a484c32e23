"""GPUs by the names that people give them: memory and peak rates, for plans made on another machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gptmill.config.errors import UserError, suggest
from gptmill.config.hardware import GIB
from gptmill.config.run import PrecisionName
from gptmill.runtime.peak_rates import IGNORED_WORD, RATES, find_peak_rate

# Nominal gigabytes. Of a GPU that is sold with two sizes the smaller one; the name may say otherwise ("A100 80GB").
MEMORY_GB = {
    "B300": 270, "B300 SXM6 AC": 270, "GB300": 270,
    "B100": 180, "B200": 180, "GB200": 186, "GB10": 120,  # GB10: 128 GB in powers of ten, shared with the CPU
    "H100": 80, "H100 SXM5": 80, "H100 PCIE": 80, "H100 NVL": 94, "H200": 141, "H200 NVL": 141, "GH200": 96,
    "H800": 80, "H800 PCIE": 80, "H20": 96, "H20 3E": 141,
    "A100 SXM4": 40, "A100 PCIE": 40, "A800 SXM4": 80, "A800 PCIE": 80,
    "A10": 24, "A10G": 24, "A30": 24, "A40": 48, "L4": 24, "L40": 48, "L40S": 48, "RTX A6000": 48, "RTX 6000 ADA": 48,
    "RTX A4000": 16, "RTX A5000": 24, "RTX 3500 ADA LAPTOP GPU": 12, "RTX 4000 ADA": 20, "RTX 4500 ADA": 24,
    "RTX 5000 ADA": 32, "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": 96, "RTX PRO 6000 BLACKWELL SERVER EDITION": 96,
    "RTX PRO 6000 BLACKWELL MAX Q WORKSTATION EDITION": 96,
    "RTX 3050": 8, "RTX 3060": 12, "RTX 3060 TI": 8, "RTX 3070": 8, "RTX 3070 TI": 8, "RTX 3080": 10, "RTX 3080 TI": 12,
    "RTX 3090": 24, "RTX 3090 TI": 24,
    "RTX 4060": 8, "RTX 4060 TI": 8, "RTX 4070": 12, "RTX 4070 SUPER": 12, "RTX 4070 TI": 12, "RTX 4070 TI SUPER": 16,
    "RTX 4080": 16, "RTX 4080 SUPER": 16, "RTX 4090": 24, "RTX 4090 D": 24,
    "RTX 5060": 8, "RTX 5060 TI": 8, "RTX 5070": 12, "RTX 5070 TI": 16, "RTX 5080": 16, "RTX 5090": 32,
    "V100 SXM2": 16, "V100 PCIE": 16, "V100S PCIE": 32, "T4": 16,
    "TITAN RTX": 24, "RTX 2080 TI": 11, "P100 SXM2": 16, "P100 PCIE": 16,
    "MI250X": 64, "MI250X MI250": 64, "MI300X": 192, "MI325X": 256, "MI350X": 288, "MI355X": 288,
}  # fmt: skip
SHORT_NAMES = {
    "A100": "A100 SXM4",
    "A800": "A800 SXM4",
    "V100": "V100 SXM2",
    "V100S": "V100S PCIE",
    "P100": "P100 PCIE",
    "DGX SPARK": "GB10",
    "RTX 3500 ADA": "RTX 3500 ADA LAPTOP GPU",
    "RTX PRO 6000": "RTX PRO 6000 BLACKWELL WORKSTATION EDITION",
    "RTX PRO 6000 BLACKWELL": "RTX PRO 6000 BLACKWELL WORKSTATION EDITION",
}
FAMILIES = ("RTX ", "RTX A", "")  # what people leave out: "4090", "6000"
REPORTED_SHARE = 0.99  # of the nominal gibibytes, as drivers report it
FP8_GPUS = re.compile(r"G?[BH]\d00|GB10|H20\b|L4|L40|RTX (4|5)0[5-9]0|RTX \d[05]00 ADA|RTX PRO")


@dataclass(frozen=True)
class Gpu:
    """What a plan needs to know about a GPU."""

    name: str
    memory_bytes: int
    has_bf16: bool
    has_fp8: bool
    has_kernels: bool
    """Whether gptmill's fused kernels run on it: NVIDIA, Ampere or newer."""

    def find_peak_rate(self, precision: PrecisionName) -> float | None:
        return find_peak_rate(self.name, precision)

    def choose_precision(self, wanted: PrecisionName) -> PrecisionName:
        """Resolves "auto"; raises UserError for a precision that the GPU does not have."""
        if wanted == "fp8" and not self.has_fp8:
            raise UserError(f"precision fp8 needs an NVIDIA GPU of Ada, Hopper or newer, not {self.name}; use bf16")
        if wanted != "auto":
            return wanted
        return "bf16" if self.has_bf16 else "fp16"


def find_gpu(name: str) -> Gpu:
    """The GPU of that name; raises UserError for one that is not in the tables."""
    plain = " ".join(re.split(r"[\s/_-]+", name.strip().upper()))
    size = re.search(r"\b(\d+) ?GB?\b", plain)
    plain = re.sub(r"\b(\d+) GB?\b", r"\1GB", plain)
    words = " ".join(word for word in plain.split() if not IGNORED_WORD.fullmatch(word) or word in RATES)
    candidates = (SHORT_NAMES.get(words, words), *(family + plain for family in FAMILIES))
    known = next((each for each in candidates if each in RATES), None)
    if known is None:
        raise UserError(
            f"--gpu {name}: not known{suggest(words, list(RATES))}; the known ones are {', '.join(sorted(RATES))}"
        )
    memory_gb = int(size[1]) if size else MEMORY_GB[known]
    is_nvidia = not known.startswith("MI")
    rates = RATES[known]
    label = f"{known} {memory_gb}GB" if size else known
    return Gpu(
        label,
        round(memory_gb * GIB * REPORTED_SHARE),
        rates.has_bf16,
        bool(FP8_GPUS.match(known)),
        is_nvidia and rates.has_bf16,
    )
