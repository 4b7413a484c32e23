from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.selection import has_checkpoints, list_candidates, load_chosen
from gptmill.runs.checkpoints.storage import save_checkpoint
from gptmill.runs.checkpoints.tiers import BACKUP, BEST, LATEST, link_tier, link_tiers, make_rolling_name

GROUPS = ("model",)


def save(folder: Path, step: int, *tiers: str, link: bool = True) -> Path:
    checkpoint = Checkpoint(step, {"model": {"w": torch.full((50,), float(step))}}, {"step": step})
    path = save_checkpoint(folder, checkpoint).path
    if link:
        link_tiers(folder, path, [make_rolling_name(step), *tiers], 9)
    return path


def flip_last_bit(path: Path) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def names(folder: Path, wanted: str = "latest") -> list[str]:
    return [path.name for path in list_candidates(folder, wanted)]


def test_latest_is_tried_first_then_its_backup_then_the_others_from_the_newest_on(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    link_tier(tmp_path, BACKUP, tmp_path / "step_000010")
    assert names(tmp_path) == ["step_000040", "step_000010", "step_000030", "step_000020"]
    chosen = load_chosen(tmp_path, "latest", GROUPS)
    assert (chosen.path, chosen.complaints) == (tmp_path / "step_000040", [])
    assert chosen.checkpoint.values == {"step": 40}
    assert torch.equal(chosen.checkpoint.tensors["model"]["w"], torch.full((50,), 40.0))


def test_a_checkpoint_that_was_not_yet_linked_when_the_kill_came_is_newer_than_latest(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 30, link=False)
    assert names(tmp_path) == ["step_000030", "step_000020", "step_000010"]


def test_one_saved_after_going_back_but_not_yet_linked_is_newer_than_latest(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 30)
    save(tmp_path, 20, link=False)
    assert names(tmp_path) == ["step_000020", "step_000030", "step_000010"]


def test_damaged_ones_are_passed_over_and_complained_about(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (10, 20, 30, 40)]
    flip_last_bit(paths[3])
    (paths[2] / "checkpoint.json").unlink()
    chosen = load_chosen(tmp_path, "latest", GROUPS)
    assert chosen.checkpoint.step == 20
    assert ["step_000040" in chosen.complaints[0], "step_000030" in chosen.complaints[1]] == [True, True]
    assert len(chosen.complaints) == 2


def test_where_none_is_sound_every_complaint_is_told(tmp_path: Path) -> None:
    for step in (10, 20):
        flip_last_bit(save(tmp_path, step))
    with pytest.raises(UserError, match=r"(?s)step_000020.*step_000010.*no valid checkpoint"):
        load_chosen(tmp_path, "latest", GROUPS)


def test_best_is_what_best_model_points_to_and_nothing_else(tmp_path: Path) -> None:
    best = save(tmp_path, 10, BEST)
    save(tmp_path, 20)
    assert load_chosen(tmp_path, "best", GROUPS).checkpoint.step == 10
    flip_last_bit(best)
    with pytest.raises(UserError, match="damaged"):
        load_chosen(tmp_path, "best", GROUPS)
    (tmp_path / BEST).unlink()
    with pytest.raises(UserError, match=r"no best_model.*: 10, 20"):
        load_chosen(tmp_path, "best", GROUPS)


def test_a_step_is_that_step_and_nothing_else(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert load_chosen(tmp_path, "20", GROUPS).checkpoint.step == 20
    assert load_chosen(tmp_path, "0020", GROUPS).checkpoint.step == 20
    flip_last_bit(tmp_path / "step_000020")
    with pytest.raises(UserError, match="damaged"):
        load_chosen(tmp_path, "20", GROUPS)
    with pytest.raises(UserError, match=r"step 25; .* 10, 20, 30"):
        load_chosen(tmp_path, "25", GROUPS)


def test_of_a_step_saved_twice_the_one_with_a_tier_is_meant(tmp_path: Path) -> None:
    save(tmp_path, 20, link=False)
    second = save(tmp_path, 20, link=False)
    assert names(tmp_path, "20") == [second.name, "step_000020"]
    link_tier(tmp_path, LATEST, tmp_path / "step_000020")
    assert names(tmp_path, "20") == ["step_000020", second.name]


@pytest.mark.parametrize("wanted", ["newest", "-1", "1.5", "²", "", "9" * 5000])
def test_words_that_mean_no_checkpoint_are_refused(tmp_path: Path, wanted: str) -> None:
    save(tmp_path, 10)
    with pytest.raises(UserError, match="10"):
        load_chosen(tmp_path, wanted, GROUPS)


def test_folders_from_before_tiers_are_taken_from_the_newest_step_on(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        save(tmp_path, step, link=False)
    assert names(tmp_path) == ["step_1000000", "step_999999", "step_000020"]


@pytest.mark.parametrize("wanted", ["latest", "best", "10"])
def test_where_there_is_none_it_says_so(tmp_path: Path, wanted: str) -> None:
    assert not has_checkpoints(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        load_chosen(tmp_path / "nowhere", wanted, GROUPS)
    save(tmp_path, 10)
    assert has_checkpoints(tmp_path)


def test_a_latest_that_cannot_be_read_does_not_make_older_ones_newer(tmp_path: Path) -> None:
    """A kill may have left an old folder without a tier; it must not be taken for the newest, nor the others go."""
    for step in (10, 20, 30):
        link_tiers(tmp_path, save(tmp_path, step), [make_rolling_name(step)], 10)
    (tmp_path / make_rolling_name(10)).unlink()
    (tmp_path / "step_000030" / "checkpoint.json").write_text("{}")
    chosen = load_chosen(tmp_path, "latest", GROUPS)
    assert chosen.path.name == "step_000020"
    assert len(chosen.complaints) == 1


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_lost_latest_is_told_and_the_newest_taken(tmp_path: Path, is_dangling: bool) -> None:
    for step in (10, 20, 30):
        link_tiers(tmp_path, save(tmp_path, step), [make_rolling_name(step)], 10)
    (tmp_path / "latest").unlink()
    if is_dangling:
        (tmp_path / "latest").symlink_to("step_000099")
    chosen = load_chosen(tmp_path, "latest", GROUPS)
    assert chosen.path.name == "step_000030"
    assert "latest" in chosen.complaints[0]


def test_a_checkpoint_can_be_named_by_its_folder_or_a_tier(tmp_path: Path) -> None:
    for step in (10, 20):
        link_tiers(tmp_path, save(tmp_path, step), [make_rolling_name(step)], 10)
    for name in ("step_000010", "rolling_step_000010", "latest_backup"):
        assert [path.name for path in list_candidates(tmp_path, name)] == ["step_000010"]
