"""Hardware tiers: which one a card belongs to, and micro-batches that fit it."""

from __future__ import annotations

from typing import get_args

import pytest

from gptmill.config.errors import UserError
from gptmill.config.hardware import GIB, TIERS, HardwareName, choose_tier, fit_batch
from gptmill.config.recipes import layer_config
from gptmill.config.validation import find_problems


def test_every_tier_can_be_asked_for_and_is_a_sound_config() -> None:
    assert get_args(HardwareName) == ("auto", *TIERS)
    for values in TIERS.values():
        assert find_problems(layer_config(values)) == []
        assert values["embd_size"] / values["num_heads"] == 64


@pytest.mark.parametrize(
    ("card", "gigabytes", "tier"),
    [
        ("RTX 4060", 7.6, "8gb"),
        ("RTX 3080 10 GB", 9.6, "8gb"),
        ("RTX 3060", 11.6, "12gb"),
        ("RTX 4080", 15.6, "12gb"),
        ("L4 with error correction", 22.0, "24gb"),
        ("RTX 4090", 23.5, "24gb"),
        ("A100 40 GB", 39.4, "24gb"),
        ("A100 80 GB", 79.1, "80gb"),
        ("H200", 139.7, "80gb"),
    ],
)
def test_cards_belong_to_the_tier_they_are_sold_as(card: str, gigabytes: float, tier: str) -> None:
    assert choose_tier(int(gigabytes * GIB)) == tier, card


def test_a_card_below_all_tiers_is_told_what_to_do() -> None:
    with pytest.raises(UserError, match=r"this GPU has 5.8 GB, less than the smallest tier of 8gb; .*--num_layers"):
        choose_tier(int(5.8 * GIB))


def test_micro_batches_shrink_until_they_fit_and_batches_stay() -> None:
    values = TIERS["8gb"]
    fitted = fit_batch(values, lambda windows: windows * GIB, 20 * GIB)
    assert fitted == {**values, "mini_batch_size": 16}
    assert fit_batch(values, lambda windows: windows * GIB, 80 * GIB) == values


def test_a_tenth_of_the_memory_is_left_alone() -> None:
    values = {"mini_batch_size": 10}
    assert fit_batch(values, lambda windows: windows * GIB, 11 * GIB)["mini_batch_size"] == 5
    assert fit_batch(values, lambda windows: windows * GIB, 12 * GIB)["mini_batch_size"] == 10


def test_shrunk_micro_batches_still_divide_the_batch() -> None:
    values = {"mini_batch_size": 45, "context_length": 8, "total_batch_size": 45 * 8}
    assert fit_batch(values, lambda windows: windows * GIB, 20 * GIB)["mini_batch_size"] == 15
    assert fit_batch(values, lambda windows: windows * GIB, 10 * GIB)["mini_batch_size"] == 5


def test_a_window_that_does_not_fit_alone_is_told() -> None:
    with pytest.raises(UserError, match=r"one window at a time takes about 9.0 GB, and this GPU has 8.0 GB; use"):
        fit_batch(TIERS["8gb"], lambda windows: (8 + windows) * GIB, 8 * GIB)
