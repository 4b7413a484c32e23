"""GPUs by the names that people type."""

from __future__ import annotations

import pytest

from gptmill.config.errors import UserError
from gptmill.runtime.gpu_catalog import MEMORY_GB, find_gpu
from gptmill.runtime.peak_rates import RATES


@pytest.mark.parametrize(
    ("typed", "name", "gigabytes"),
    [
        ("H200", "H200", 141),
        ("h100", "H100", 80),
        ("NVIDIA H100 80GB HBM3", "H100 80GB", 80),
        ("A100", "A100 SXM4", 40),
        ("a100-80gb", "A100 SXM4 80GB", 80),
        ("A100 80 GB", "A100 SXM4 80GB", 80),
        ("4090", "RTX 4090", 24),
        ("rtx_3080", "RTX 3080", 10),
        ("A6000", "RTX A6000", 48),
        ("A10G", "A10G", 24),
        ("V100 32GB", "V100 SXM2 32GB", 32),
        ("NVIDIA GB10", "GB10", 120),
        ("dgx spark", "GB10", 120),
        ("RTX PRO 6000", "RTX PRO 6000 BLACKWELL WORKSTATION EDITION", 96),
        ("RTX 3500 Ada", "RTX 3500 ADA LAPTOP GPU", 12),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_gpu_is_found_by_what_people_call_it(typed: str, name: str, gigabytes: int) -> None:
    found = find_gpu(typed)
    assert found.name == name
    assert found.memory_bytes == pytest.approx(gigabytes * 2**30, rel=0.02)
    assert found.find_peak_rate("fp16")


def test_every_gpu_with_a_peak_rate_has_a_memory_and_is_found_by_its_own_name() -> None:
    assert MEMORY_GB.keys() == RATES.keys()
    assert {find_gpu(name).name for name in RATES} == RATES.keys()


def test_precisions_follow_the_gpu() -> None:
    assert find_gpu("H200").choose_precision("auto") == "bf16"
    assert find_gpu("T4").choose_precision("auto") == "fp16"
    assert find_gpu("H200").choose_precision("fp8") == "fp8"
    assert all(find_gpu(name).has_fp8 for name in ("RTX 4090", "GB10", "RTX 3500 Ada", "RTX PRO 6000"))
    assert not any(find_gpu(name).has_fp8 for name in ("RTX 3050", "RTX A5000", "TITAN RTX"))
    with pytest.raises(UserError, match="fp8 needs an NVIDIA GPU of Ada, Hopper or newer, not A100"):
        find_gpu("A100").choose_precision("fp8")


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"--gpu H300: not known.*the known ones are A10, "):
        find_gpu("H300")
