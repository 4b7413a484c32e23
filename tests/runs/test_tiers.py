from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from conftest import make_environment
from zygote import Zygote

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders, save_checkpoint
from gptmill.runs.checkpoints.tiers import (
    BACKUP,
    BEST,
    LATEST,
    find_unlinked,
    link_tier,
    link_tiers,
    make_epoch_name,
    make_milestone_name,
    make_rolling_name,
    prune,
    read_tiers,
)


def make_checkpoint(step: int, val_loss: float | None = None) -> Checkpoint:
    return Checkpoint(step, {"model": {"w": torch.full((50,), float(step))}}, {"val_loss": val_loss})


def save(folder: Path, step: int, *tiers: str, keep: int = 3, val_loss: float | None = None) -> list[str]:
    """Saves a rolling checkpoint with these other tiers; the names of what was deleted."""
    path = save_checkpoint(folder, make_checkpoint(step, val_loss)).path
    return [gone.name for gone in link_tiers(folder, path, [make_rolling_name(step), *tiers], keep)]


def names(folder: Path) -> dict[str, str]:
    return {tier: path.name for tier, path in read_tiers(folder).items()}


def folders(folder: Path) -> list[str]:
    return [path.name for path in list_step_folders(folder)]


def test_names_have_the_numbers_in_them() -> None:
    assert make_rolling_name(250) == "rolling_step_000250"
    assert make_epoch_name(1) == "epoch_00001"
    assert make_milestone_name(1_234_567) == "milestone_step_1234567"


def test_the_first_save_is_the_latest_and_has_no_backup(tmp_path: Path) -> None:
    assert save(tmp_path, 10) == []
    assert names(tmp_path) == {LATEST: "step_000010", "rolling_step_000010": "step_000010"}


def test_tiers_are_links_that_survive_a_move_of_the_run(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 10, BEST)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "checkpoints"
    assert (moved / BEST / "model.safetensors").samefile(moved / "step_000010" / "model.safetensors")
    assert names(moved)[LATEST] == "step_000010"


def test_the_latest_before_becomes_the_backup(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=0)
    assert names(tmp_path) == {LATEST: "step_000030", BACKUP: "step_000020"}
    assert folders(tmp_path) == ["step_000020", "step_000030"]


def test_linking_the_same_folder_again_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    before = names(tmp_path)
    assert link_tiers(tmp_path, tmp_path / "step_000020", [make_rolling_name(20)], 3) == []
    assert names(tmp_path) == before


def test_rolling_checkpoints_go_but_best_epochs_and_milestones_stay(tmp_path: Path) -> None:
    save(tmp_path, 10, BEST)
    save(tmp_path, 20, make_epoch_name(1))
    save(tmp_path, 30, make_milestone_name(30))
    assert save(tmp_path, 40) == []
    assert [save(tmp_path, step) for step in (50, 60, 70, 80)] == [[], [], ["step_000040"], ["step_000050"]]
    assert folders(tmp_path) == [f"step_{step:06d}" for step in (10, 20, 30, 60, 70, 80)]
    assert names(tmp_path) == {
        BEST: "step_000010",
        "epoch_00001": "step_000020",
        "milestone_step_000030": "step_000030",
        **{f"rolling_step_{step:06d}": f"step_{step:06d}" for step in (60, 70, 80)},
        LATEST: "step_000080",
        BACKUP: "step_000070",
    }


def test_the_best_of_before_goes_when_a_better_one_comes(tmp_path: Path) -> None:
    save(tmp_path, 10, BEST, keep=1)
    save(tmp_path, 20, keep=1)
    save(tmp_path, 30, keep=1)
    assert save(tmp_path, 40, BEST, keep=1) == ["step_000010", "step_000020"]


def test_going_back_gives_up_the_tiers_of_later_steps(tmp_path: Path) -> None:
    save(tmp_path, 10, BEST, val_loss=3.0, keep=9)
    save(tmp_path, 20, val_loss=3.5, keep=9)
    save(tmp_path, 30, BEST, make_epoch_name(1), val_loss=2.0, keep=9)
    save(tmp_path, 40, make_milestone_name(40), val_loss=2.5, keep=9)
    assert save(tmp_path, 23, val_loss=3.2, keep=9) == ["step_000030", "step_000040"]
    assert names(tmp_path) == {
        BEST: "step_000010",
        **{f"rolling_step_{step:06d}": f"step_{step:06d}" for step in (10, 20, 23)},
        LATEST: "step_000023",
        BACKUP: "step_000020",
    }


def test_after_going_back_best_model_is_the_earliest_of_those_with_the_lowest_loss(tmp_path: Path) -> None:
    save(tmp_path, 10, val_loss=4.0)
    save(tmp_path, 20, val_loss=3.0)
    save(tmp_path, 30, val_loss=3.0)
    save(tmp_path, 50, BEST, val_loss=2.0, keep=9)
    save(tmp_path, 40, val_loss=None, keep=9)
    assert names(tmp_path)[BEST] == "step_000020"


def test_after_going_back_there_may_be_no_best_model(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 30, BEST, val_loss=2.0)
    save(tmp_path, 20)
    assert BEST not in names(tmp_path)
    assert not (tmp_path / BEST).is_symlink()


def test_the_same_step_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert save(tmp_path, 20) == ["step_000020"]
    assert names(tmp_path) == {
        LATEST: "step_000020_2",
        BACKUP: "step_000010",
        "rolling_step_000010": "step_000010",
        "rolling_step_000020": "step_000020_2",
    }


def test_a_latest_that_is_damaged_does_not_become_the_backup(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step_000020" / "checkpoint.json").write_bytes(b"")
    save(tmp_path, 30)
    assert names(tmp_path)[BACKUP] == "step_000010"


def test_without_links_tiers_are_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    save(tmp_path, 10, BEST)
    save(tmp_path, 20)
    save(tmp_path, 30)
    assert (tmp_path / LATEST).read_text(encoding="utf-8") == "step_000030\n"
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert save(tmp_path, 40, keep=1) == ["step_000020"]
    assert names(tmp_path) == {
        BEST: "step_000010",
        "rolling_step_000040": "step_000040",
        LATEST: "step_000040",
        BACKUP: "step_000030",
    }
    monkeypatch.undo()
    save(tmp_path, 50)
    assert (tmp_path / LATEST).is_symlink()
    assert names(tmp_path)[BACKUP] == "step_000040"


@pytest.mark.parametrize("target", ["/etc", "../outside", "step_000010/../../outside", "notes", ".", ""])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_tier_that_leads_elsewhere_is_ignored(tmp_path: Path, target: str, kind: str) -> None:
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, make_checkpoint(10))
    save_checkpoint(tmp_path / "outside", make_checkpoint(10))
    (folder / "notes").mkdir()
    if kind == "file":
        (folder / LATEST).write_text(target, encoding="utf-8")
    elif target:
        (folder / LATEST).symlink_to(target)
    assert read_tiers(folder) == {}
    save(folder, 20)
    assert names(folder)[LATEST] == "step_000020"
    assert (tmp_path / "outside" / "step_000010").is_dir()


def test_step_folders_that_are_links_are_no_targets(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    outside = save_checkpoint(tmp_path / "outside", make_checkpoint(10)).path
    save(folder, 5)
    (folder / "step_000010").symlink_to(outside)
    (folder / BEST).symlink_to("step_000010")
    assert BEST not in names(folder)
    save(folder, 20, keep=0)
    assert find_damage(outside, thorough=True) == ""


def test_files_of_other_kinds_under_a_tiers_name_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "epoch_00001").write_bytes(b"\xff\xfe")
    (tmp_path / "epoch_00002").write_bytes(b"step_000010" + b" " * 5000)
    os.mkfifo(tmp_path / "epoch_00003")
    (tmp_path / "epoch_00004").mkdir()
    (tmp_path / "my_favourite").symlink_to("step_000010")
    assert set(names(tmp_path)) == {LATEST, "rolling_step_000010"}


def test_a_folder_in_a_tiers_place_is_moved_aside(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    (tmp_path / LATEST / "mine").touch()
    link_tier(tmp_path, LATEST, tmp_path / "step_000010")
    assert names(tmp_path)[LATEST] == "step_000010"
    assert (tmp_path / "latest.old_1" / "mine").exists()


def test_checkpoints_whose_rolling_links_the_user_removed_go_with_the_next_save(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=9)
    for link in tmp_path.glob("rolling_step_*"):
        link.unlink()
    assert save(tmp_path, 50, keep=9) == ["step_000010", "step_000020", "step_000030"]


def test_links_to_a_folder_that_the_user_deleted_are_ignored_and_go_with_the_next_save(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, BEST, val_loss=1.0 / step)
    for file in (tmp_path / "step_000030").iterdir():
        file.unlink()
    (tmp_path / "step_000030").rmdir()
    assert LATEST not in names(tmp_path)
    save(tmp_path, 40)
    assert names(tmp_path)[BEST] == "step_000020"
    assert names(tmp_path)[BACKUP] == "step_000020"
    assert not (tmp_path / "rolling_step_000030").is_symlink()


def test_a_folder_in_use_goes_with_a_later_save(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, keep=0)
    path = save_checkpoint(tmp_path, make_checkpoint(30)).path
    assert link_tiers(tmp_path, path, [], 0, in_use=lambda path: path.name == "step_000010") == []
    assert find_unlinked(tmp_path) == []
    assert save(tmp_path, 40, keep=0) == ["step_000010", "step_000020"]


def test_a_folder_that_cannot_be_deleted_hinders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step, keep=0)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step_000010":
            raise PermissionError(13, "no", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert save(tmp_path, 30, keep=0) == []
    assert names(tmp_path)[LATEST] == "step_000030"


def test_folders_from_before_tiers_count_as_rolling(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert save(tmp_path, 40, keep=3) == ["step_000010"]
    assert names(tmp_path) == {
        LATEST: "step_000040",
        BACKUP: "step_000030",
        **{f"rolling_step_{step:06d}": f"step_{step:06d}" for step in (20, 30, 40)},
    }


def test_pruning_keeps_the_newest_rolling_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=9)
    assert [path.name for path in prune(tmp_path, 3)] == ["step_000010"]
    assert [path.name for path in prune(tmp_path, 0)] == ["step_000020"]
    assert names(tmp_path) == {LATEST: "step_000040", BACKUP: "step_000030"}
    assert prune(tmp_path / "nowhere", 1) == []


def test_pruning_links_what_a_kill_left_unlinked(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    save_checkpoint(tmp_path, make_checkpoint(30))
    assert prune(tmp_path, 1) == [tmp_path / "step_000010"]
    assert names(tmp_path) == {LATEST: "step_000030", BACKUP: "step_000020", "rolling_step_000030": "step_000030"}


def test_pruning_refuses_to_delete_what_may_be_the_last_sound_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    file = tmp_path / "step_000030" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="damaged"):
        prune(tmp_path, 1)
    assert folders(tmp_path) == ["step_000010", "step_000020", "step_000030"]


def test_a_folder_left_from_a_past_that_was_given_up_is_not_taken_for_an_unlinked_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(30))
    save_checkpoint(tmp_path, make_checkpoint(20))
    link_tier(tmp_path, LATEST, tmp_path / "step_000020")
    assert find_unlinked(tmp_path) == []
    save_checkpoint(tmp_path, make_checkpoint(25))
    save_checkpoint(tmp_path, make_checkpoint(22))
    assert [path.name for path in find_unlinked(tmp_path)] == ["step_000022", "step_000025"]


# Some saves, then one more, killed at the n-th file operation of its save and linking, for every n. The serial
# number counts saves: after going back, steps do not.
EVERY_OPERATION = """
import os, signal, sys
from pathlib import Path
import torch
from gptmill.runs.checkpoints.selection import load_chosen
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders, save_checkpoint
from gptmill.runs.checkpoints.tiers import BEST, link_tiers, make_rolling_name, read_tiers

torch.set_num_threads(1)
OPERATIONS = {"os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink"}
WRITING = os.O_WRONLY | os.O_RDWR
os.fsync = lambda descriptor: None  # slow, and a kill, unlike a power cut, does not need it

def save(folder, step, serial, *tiers):
    checkpoint = Checkpoint(step, {"model": {"w": torch.full((9,), float(serial))}}, {"serial": serial})
    link_tiers(folder, save_checkpoint(folder, checkpoint).path, [make_rolling_name(step), *tiers], 1)

def save_and_die(folder, steps, deadly):
    for serial, step in enumerate(steps[:-1]):
        save(folder, step, serial, BEST)
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event in OPERATIONS or event == "open" and arguments[2] & WRITING:
            count += 1
            if count == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(folder, steps[-1], len(steps) - 1)
    os._exit(0)

def check(folder, steps):
    serials = []
    for _ in range(2):  # as it was left, and after the next save of a run that went on from there
        chosen = load_chosen(folder, "latest", ("model",))
        assert chosen.complaints == [], chosen.complaints
        serials.append(chosen.checkpoint.values["serial"])
        assert all(find_damage(path, thorough=True) == "" for path in list_step_folders(folder))
        save(folder, chosen.checkpoint.step + 1, len(steps))
    assert serials[0] >= len(steps) - 2, serials
    assert serials[1] == len(steps), serials
    assert set(read_tiers(folder).values()) == set(list_step_folders(folder))

for steps in ((1, 2, 3, 4), (5, 8, 9, 6), (1, 2, 3, 3)):
    deadly, killed = 0, True
    while killed:
        deadly += 1
        folder = Path(sys.argv[1]) / f"{steps[-1]}_{deadly}"
        child = os.fork()
        if child == 0:
            save_and_die(folder, steps, deadly)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0
        check(folder, steps)
    print(deadly)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_linking_killed_at_any_file_operation_loses_nothing(tmp_path: Path, zygote: Zygote) -> None:
    process = zygote.run(["-c", EVERY_OPERATION, str(tmp_path)], tmp_path, make_environment())
    assert process.returncode == 0, process.stderr
    assert all(int(count) > 10 for count in process.stdout.split())
