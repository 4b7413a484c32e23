"""Typical prices of rented GPUs, for estimates of cost. Whoever knows the real price gives it (--price_per_hour)."""

from __future__ import annotations

import re

# US dollars per GPU and hour, on demand, without a contract: the middle of what public price lists of GPU clouds
# asked in 2025. They differ by a factor of two between providers, and fall from year to year.
DOLLARS_PER_HOUR = {
    "B300": 6.00,
    "B200": 5.00,
    "GH200": 2.00,
    "H200": 3.50,
    "H100": 3.00,
    "A100 80GB": 1.80,
    "A100": 1.30,
    "MI300X": 2.00,
    "RTX PRO 6000": 1.80,
    "L40S": 1.00,
    "L40": 0.90,
    "RTX 6000 ADA": 0.75,
    "A6000": 0.60,
    "A40": 0.40,
    "A5000": 0.25,
    "A4000": 0.17,
    "A10": 0.75,
    "L4": 0.70,
    "V100": 0.60,
    "T4": 0.40,
    "RTX 5090": 0.70,
    "RTX 4090": 0.45,
    "RTX 3090": 0.25,
    "RTX 3080": 0.18,
    "GB10": 0.15,  # hardly rented out: a DGX Spark at its first price, $3,999, over three years of use
}


def find_price(device: str) -> float | None:
    """Dollars per hour of one device, by the name that its driver gives it; None if it is not in the table."""
    words = re.sub(r"[^A-Z0-9]+", " ", device.upper())
    for name in sorted(DOLLARS_PER_HOUR, key=len, reverse=True):
        if all(re.search(rf"\b{word}\b", words) for word in name.split()):
            return DOLLARS_PER_HOUR[name]
    return None
