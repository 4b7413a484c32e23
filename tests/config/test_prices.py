from __future__ import annotations

import pytest

from gptmill.config.prices import DOLLARS_PER_HOUR, find_price


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 ADA"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
    ],
)
def test_a_driver_s_name_is_found(device: str, name: str) -> None:
    assert find_price(device) == DOLLARS_PER_HOUR[name]


def test_other_devices_have_no_price() -> None:
    assert find_price("CPU") is None
    assert find_price("NVIDIA A1000 Laptop GPU") is None
