from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.disk_space import check_disk_space, deletable_bytes, delete_oldest_rolling, free_bytes
from gptmill.runs.checkpoints.storage import list_step_folders, save_checkpoint
from gptmill.runs.checkpoints.tiers import (
    BACKUP,
    BEST,
    LATEST,
    link_tiers,
    make_epoch_name,
    make_rolling_name,
    read_tiers,
)


def save(folder: Path, step: int, *tiers: str, link: bool = True) -> Path:
    path = save_checkpoint(folder, Checkpoint(step, {"model": {"w": torch.zeros(50)}}, {})).path
    if link:
        link_tiers(folder, path, [make_rolling_name(step), *tiers], 9)
    return path


def flip_last_bit(path: Path) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def drop_all(folder: Path) -> list[str]:
    dropped = []
    while path := delete_oldest_rolling(folder):
        dropped.append(path.name)
    return dropped


def test_free_bytes_are_those_of_the_disk_that_a_folder_will_lie_on(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet" / "there") > 0
    assert free_bytes(Path("not/yet/there")) > 0


def test_a_checkpoint_that_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a checkpoint takes .* GB and logs .* MB, but only .* free in .*; free disk"):
        check_disk_space(tmp_path / "run" / "checkpoints", free_bytes(tmp_path) + 10**12, 10)


def test_fewer_checkpoints_than_are_to_be_kept_are_a_warning(tmp_path: Path) -> None:
    third = free_bytes(tmp_path) // 3
    assert "keep_checkpoints 10 needs 11" in check_disk_space(tmp_path, third, 10)
    assert check_disk_space(tmp_path, third // 10, 10) == ""


def test_what_may_be_dropped_counts_as_room(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    size = 1 << 40
    with (tmp_path / "step_000010" / "model.safetensors").open("r+b") as file:
        file.truncate(size)  # sparse: it takes no room, but says so
    assert deletable_bytes(tmp_path) > size
    assert "will be deleted" in check_disk_space(tmp_path, free_bytes(tmp_path) + size // 2, 1)
    assert deletable_bytes(tmp_path, in_use=lambda path: path.name == "step_000010") == 0


def test_the_oldest_rolling_ones_are_dropped_and_never_the_latest(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20, BEST)
    save(tmp_path, 30, make_epoch_name(1))
    for step in (40, 50, 60):
        save(tmp_path, step)
    assert drop_all(tmp_path) == ["step_000010", "step_000040", "step_000050"]
    assert {tier: path.name for tier, path in read_tiers(tmp_path).items()} == {
        BEST: "step_000020",
        "epoch_00001": "step_000030",
        "rolling_step_000020": "step_000020",
        "rolling_step_000030": "step_000030",
        "rolling_step_000060": "step_000060",
        LATEST: "step_000060",
    }
    assert not (tmp_path / BACKUP).is_symlink()


def test_nothing_is_dropped_unless_a_sound_one_remains(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip_last_bit(tmp_path / "step_000030")
    assert drop_all(tmp_path) == ["step_000010"]  # 20 is the last sound one
    flip_last_bit(tmp_path / "step_000020")
    assert drop_all(tmp_path) == []


def test_one_that_is_not_linked_yet_is_not_dropped(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 15, link=False)
    assert drop_all(tmp_path) == ["step_000010"]
    assert [path.name for path in list_step_folders(tmp_path)] == ["step_000015", "step_000020"]


def test_without_tiers_the_newest_step_stays(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, link=False)
    assert drop_all(tmp_path) == ["step_000010"]
    assert drop_all(tmp_path / "nowhere") == []


def test_one_in_use_is_not_dropped(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert delete_oldest_rolling(tmp_path, in_use=lambda path: path.name == "step_000010") == tmp_path / "step_000020"
