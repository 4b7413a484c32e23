"""CRC-32C: the standard's check value, and what TensorBoard computes for every kind of length."""

from __future__ import annotations

import random

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

from gptmill.runs.trackers.crc32c import compute_crc32c


def test_the_check_value_of_the_standard() -> None:
    assert compute_crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("length", [4, 5, 63, 64, 65, 127, 128, 129, 1000, 4096, 12_345])
def test_it_is_that_of_tensorboard(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert compute_crc32c(data) == crc32c(data)
    assert compute_crc32c(bytes(length)) == crc32c(bytes(length))
