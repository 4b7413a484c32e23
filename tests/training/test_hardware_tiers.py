"""What GPUs of each memory train: every tier fits its GPU, and the documented table is the printed one."""

from __future__ import annotations

import pytest
from conftest import PROJECT

from gptmill.cli.main import run_guarded
from gptmill.cli.plan_tiers import COLUMNS, list_tier_lines
from gptmill.config.hardware import GIB, HARDWARE_PRESETS, USABLE_SHARE, choose_preset
from gptmill.runtime.gpu_catalog import find_gpu
from gptmill.training.hardware_tiers import HardwareTier, list_tiers


@pytest.fixture(scope="module")
def tiers() -> list[HardwareTier]:
    return list_tiers()


def test_every_tier_fits_its_memory_with_the_batch_of_its_preset(tiers: list[HardwareTier]) -> None:
    assert [tier.name for tier in tiers] == list(HARDWARE_PRESETS)
    for tier in tiers:
        training, preset = tier.config.training, HARDWARE_PRESETS[tier.name]
        assert tier.needed_bytes < USABLE_SHARE * GIB * int(tier.name.removesuffix("gb"))
        assert training.total_batch_size == preset["total_batch_size"]
        windows = tier.micro_batches * training.mini_batch_size
        assert windows * tier.config.model.context_length == training.total_batch_size


def test_the_named_gpus_are_of_their_tier(tiers: list[HardwareTier]) -> None:
    for tier in tiers:
        assert {choose_preset(find_gpu(name).memory_bytes) for name in tier.examples.split(", ")} == {tier.name}


def test_more_memory_never_trains_less(tiers: list[HardwareTier]) -> None:
    assert [tier.parameters for tier in tiers] == sorted(tier.parameters for tier in tiers)


def test_the_documented_table_is_the_printed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["plan", "--tiers"]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if line.startswith(tuple(HARDWARE_PRESETS))]
    page = (PROJECT / "docs" / "models.md").read_text(encoding="utf-8")
    for row in rows:
        name, *_ = row.split()
        (documented,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert documented.replace("`", "").replace("|", " ").split() == row.split()
    assert len(rows) == len(HARDWARE_PRESETS)


def test_the_table_has_a_line_for_each_tier(tiers: list[HardwareTier]) -> None:
    lines = list_tier_lines(tiers)
    assert lines[1].split("  ")[0] == COLUMNS[0]
    assert "gptmill train --hardware auto" in lines[-1]


def test_tiers_are_no_plan_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["demo"], ["--gpu", "H200"], ["--size", "tiny-moe"], ["--max_steps", "3"]):
        assert run_guarded(["plan", "--tiers", *words]) == 2
        assert "--tiers prints a table of all GPUs" in capsys.readouterr().err
