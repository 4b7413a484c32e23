"""A run is removed as a whole, and nothing but the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.runs.directory import RunDirectory, create_run, list_folders
from gptmill.runs.removal import find_removable, remove_run
from gptmill.runs.run_lock import lock_run


@pytest.fixture
def logdir(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


@pytest.fixture
def run(logdir: str) -> RunDirectory:
    run = create_run(logdir, "old", RunConfig())
    (run.checkpoints / "step_000010").mkdir(parents=True)
    return run


def test_a_run_is_removed_with_all_that_is_in_it(run: RunDirectory, logdir: str) -> None:
    remove_run(find_removable("old", logdir))
    assert list(Path(logdir).iterdir()) == []
    run = create_run(logdir, "old", RunConfig())
    remove_run(find_removable(str(run.path), logdir))
    assert list(Path(logdir).iterdir()) == []


def test_what_links_lead_to_stays(run: RunDirectory, logdir: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (run.checkpoints / "latest").symlink_to(precious)
    (run.path / "file").symlink_to(precious / "file")
    remove_run(find_removable("old", logdir))
    assert [path.name for path in precious.iterdir()] == ["file"]
    assert not run.path.exists()


@pytest.mark.parametrize("name", ["..", ".", "", "../outside", "/", "OUTSIDE", "old/..", "old/checkpoints"])
def test_nothing_outside_the_log_directory_is_a_run_of_it(
    run: RunDirectory, logdir: str, tmp_path: Path, name: str
) -> None:
    shutil.copytree(run.path, tmp_path / "outside")
    with pytest.raises(UserError, match="--logdir"):
        find_removable(str(tmp_path / "outside") if name == "OUTSIDE" else name, logdir)


def test_a_link_in_the_log_directory_stays(run: RunDirectory, logdir: str, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "outside")
    (Path(logdir) / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is a link to"):
        find_removable("link", logdir)


@pytest.mark.usefixtures("run")
def test_a_folder_that_is_no_run_stays(logdir: str) -> None:
    (Path(logdir) / "src").mkdir()
    with pytest.raises(UserError, match="there is no run 'src'"):
        find_removable("src", logdir)
    with pytest.raises(UserError, match="did you mean old"):
        find_removable("odl", logdir)


def test_a_run_that_is_trained_stays(run: RunDirectory, logdir: str) -> None:
    with lock_run(run):
        with pytest.raises(UserError, match="stop it first"):
            find_removable("old", logdir)
        with pytest.raises(UserError, match="another process"):
            remove_run(run)
    assert run.config.is_file()


def test_a_removal_that_was_killed_is_completed_by_the_next(run: RunDirectory, logdir: str) -> None:
    half = Path(logdir) / ".half.deleted"
    half.mkdir()
    (half / "config.toml").touch()
    assert [each.path.name for each in list_folders(logdir)] == ["old"]
    remove_run(run)
    assert list(Path(logdir).iterdir()) == []


def test_a_removal_that_fails_at_its_first_file_leaves_no_half_of_a_run(
    run: RunDirectory, logdir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(OSError, match="Input/output"):
        remove_run(run)
    assert not run.path.exists()
    assert list_folders(logdir) == []
