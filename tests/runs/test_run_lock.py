"""The lock on a run: one holder at a time, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.runs.directory import RunDirectory
from gptmill.runs.run_lock import LOCK_NAME, is_locked, lock_run


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs/one")
    with lock_run(run):
        assert is_locked(run)
        with pytest.raises(UserError, match="another process"), lock_run(run):
            pass
        assert is_locked(run), "the refused one took nothing away"
    assert not is_locked(run)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with lock_run(RunDirectory(tmp_path / "deep/runs/one")):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs/one").mkdir(parents=True)
    with lock_run(RunDirectory(tmp_path / "runs/one")):
        pass
    assert list((tmp_path / "runs/one").iterdir()) == []
    with lock_run(RunDirectory(tmp_path / "runs/two")):
        (tmp_path / "runs/two/config.toml").touch()
    assert [path.name for path in (tmp_path / "runs/two").iterdir()] == ["config.toml"]


def test_a_name_that_no_folder_can_have_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--logdir"), lock_run(RunDirectory(tmp_path / "runs" / ("x" * 300))):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_start_waits_for_a_process_that_is_stopping(tmp_path: Path) -> None:
    run, reports = RunDirectory(tmp_path / "one"), []
    with ExitStack() as first:
        first.enter_context(lock_run(run))
        threading.Timer(0.6, first.close).start()
        started = time.monotonic()
        with lock_run(run, 20.0, lambda: reports.append("waiting")):
            assert 0.4 < time.monotonic() - started < 10
    assert reports == ["waiting"]


def test_looking_at_a_lock_refuses_no_start(tmp_path: Path) -> None:
    run, is_done = RunDirectory(tmp_path / "one"), threading.Event()
    run.path.mkdir()

    def look() -> None:
        while not is_done.is_set():
            is_locked(run)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(100):
            with lock_run(run, 10.0):
                pass
    finally:
        is_done.set()
        for watcher in watchers:
            watcher.join()


def test_many_that_lock_and_remove_the_file_never_hold_it_together(tmp_path: Path) -> None:
    """The race of flock and unlink: a lock on a file that has been removed is none."""
    run, counts, holders = RunDirectory(tmp_path / "runs/one"), [], []

    def lock_often(name: int) -> None:
        for _ in range(60):
            with lock_run(run, 60.0):
                holders.append(name)
                counts.append(len(holders))
                time.sleep(0)
                holders.remove(name)

    threads = [threading.Thread(target=lock_often, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 240
    assert not (run.path / LOCK_NAME).exists()


def test_a_folder_that_is_removed_while_mkdir_looks_at_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, make, raised = RunDirectory(tmp_path / "one"), Path.mkdir, []

    def make_later(path: Path, **options: bool) -> None:
        if not raised:
            raised.append(path)
            raise FileExistsError(17, "File exists", str(path))
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", make_later)
    with lock_run(run, 10.0):
        assert raised == [run.path]
        assert is_locked(run)


def test_a_file_in_the_place_of_the_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*one"), lock_run(RunDirectory(tmp_path / "one"), 10.0):
        pass


def test_the_lock_of_a_folder_that_took_the_place_of_this_one_is_left_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "one")
    with ExitStack() as first:
        first.enter_context(lock_run(run))
        run.path.rename(tmp_path / "moved")
        with lock_run(run):
            first.close()
            assert (run.path / LOCK_NAME).exists()
            assert is_locked(run)
