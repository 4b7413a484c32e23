"""Hardware presets: which one a GPU gets, and micro-batches that fit its memory."""

from __future__ import annotations

from typing import get_args

import pytest

from gptmill.config.errors import UserError
from gptmill.config.hardware import GIB, HARDWARE_PRESETS, HardwareName, choose_preset, fit_micro_batch
from gptmill.config.recipes import layer_config
from gptmill.config.validation import find_problems


def test_every_preset_is_a_choice_and_a_valid_config() -> None:
    assert get_args(HardwareName) == ("auto", *HARDWARE_PRESETS)
    for values in HARDWARE_PRESETS.values():
        assert find_problems(layer_config(values)) == []
        assert values["embd_size"] / values["num_heads"] == 64


@pytest.mark.parametrize(
    ("gpu", "gigabytes", "preset"),
    [
        ("RTX 4060", 7.6, "8gb"),
        ("RTX 3080 10 GB", 9.6, "12gb"),
        ("RTX 3060", 11.6, "12gb"),
        ("RTX 4080", 15.6, "16gb"),
        ("L4 with error correction", 22.0, "24gb"),
        ("RTX 4090", 23.5, "24gb"),
        ("A100 40 GB", 39.4, "24gb"),
        ("A100 80 GB", 79.1, "80gb"),
        ("L40S", 44.5, "48gb"),
        ("GB10", 119.6, "80gb"),
        ("H200", 139.7, "141gb"),
    ],
)
def test_a_gpu_gets_the_preset_of_its_nominal_memory(gpu: str, gigabytes: float, preset: str) -> None:
    assert choose_preset(int(gigabytes * GIB)) == preset, gpu


def test_a_gpu_below_all_presets_is_rejected_with_advice() -> None:
    with pytest.raises(UserError, match=r"this GPU has 5.8 GB, less than the smallest preset, 8gb; .*--num_layers"):
        choose_preset(int(5.8 * GIB))


def test_micro_batches_shrink_until_they_fit_and_batches_stay() -> None:
    values = HARDWARE_PRESETS["8gb"]
    fitted = fit_micro_batch(values, lambda windows: windows * GIB, 20 * GIB)
    assert fitted == {**values, "mini_batch_size": 16}
    assert fit_micro_batch(values, lambda windows: windows * GIB, 80 * GIB) == values


def test_a_tenth_of_the_memory_is_left_free() -> None:
    values = {"mini_batch_size": 10}
    assert fit_micro_batch(values, lambda windows: windows * GIB, 11 * GIB)["mini_batch_size"] == 5
    assert fit_micro_batch(values, lambda windows: windows * GIB, 12 * GIB)["mini_batch_size"] == 10


def test_shrunk_micro_batches_still_divide_the_batch() -> None:
    values = {"mini_batch_size": 45, "context_length": 8, "total_batch_size": 45 * 8}
    assert fit_micro_batch(values, lambda windows: windows * GIB, 20 * GIB)["mini_batch_size"] == 15
    assert fit_micro_batch(values, lambda windows: windows * GIB, 10 * GIB)["mini_batch_size"] == 5


def test_a_window_that_does_not_fit_alone_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"a micro-batch of one window takes about 9.0 GB, but this GPU has 8.0 GB; use"
    ):
        fit_micro_batch(HARDWARE_PRESETS["8gb"], lambda windows: (8 + windows) * GIB, 8 * GIB)
