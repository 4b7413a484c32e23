"""CRC-32C, the checksum of TensorBoard's records, computed with NumPy.

TensorBoard's own is a loop over bytes in Python, which takes a third of a second for the histograms of a GPT-2 and
holds up training for it. Here, parts of equal length are computed side by side and then joined in pairs: the checksum
of two parts is that of the first, carried over as many zeros as the second has bytes, plus that of the second.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Checksums = NDArray[np.uint32]

POLYNOMIAL = np.uint32(0x82F63B78)
PART_BYTES = 64
MIN_BYTES = 4


def compute_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of at least four bytes."""
    if len(data) < MIN_BYTES:
        raise ValueError("too short")
    parts = -(-len(data) // PART_BYTES)
    padded = np.zeros(parts * PART_BYTES, np.uint8)  # zeros in front change nothing
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[len(padded) - len(data) :][:MIN_BYTES] ^= 0xFF  # the checksum starts with all bits set
    crc = np.zeros(parts, np.uint32)
    for pairs_of_bytes in np.ascontiguousarray(padded.view("<u2").reshape(parts, -1).T):
        crc = _add_two_zeros(crc ^ pairs_of_bytes)
    level = 0
    while len(crc) > 1:
        crc = np.append(np.zeros(len(crc) % 2, np.uint32), crc)
        crc = _carry(crc[::2], _make_carry_tables(level)) ^ crc[1::2]
        level += 1
    return int(crc[0]) ^ 0xFFFFFFFF


@lru_cache(maxsize=1)
def _make_pair_table() -> Checksums:
    """The checksums of every pair of bytes."""
    crc: Checksums = np.arange(1 << 16, dtype=np.uint32)
    for _bit in range(16):
        crc = (crc >> np.uint32(1)) ^ (crc & np.uint32(1)) * POLYNOMIAL
    return crc


def _add_two_zeros(crc: Checksums) -> Checksums:
    carried: Checksums = _make_pair_table().take(crc & np.uint32(0xFFFF), mode="wrap") ^ (crc >> np.uint32(16))
    return carried


def _carry(crc: Checksums, tables: Checksums) -> Checksums:
    low = tables[0][crc & 0xFF] ^ tables[1][crc >> 8 & 0xFF]
    carried: Checksums = low ^ tables[2][crc >> 16 & 0xFF] ^ tables[3][crc >> 24]
    return carried


@lru_cache(maxsize=32)
def _make_carry_tables(level: int) -> Checksums:
    """For each byte of a checksum and each of its values: what it becomes after 2^level parts of zeros."""
    if level:
        half_way = _make_carry_tables(level - 1)
        return _carry(half_way, half_way)
    carried: Checksums = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    for _pair in range(PART_BYTES // 2):
        carried = _add_two_zeros(carried)
    return carried
