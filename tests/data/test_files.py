"""Durable writes: the old content or the new one, and nothing beside it; what is complete is never deleted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MountTmpfs

from gptmill.config.errors import UserError
from gptmill.data import files
from gptmill.data.files import restore_replaced, stage, write_durably


def test_a_pipe_or_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe is not a regular file; choose another path"):
        write_durably(pipe, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_the_old_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_path: Path) -> None:
        raise error

    path = tmp_path / "report.html"
    write_durably(path, "old")
    monkeypatch.setattr(files, "flush_to_disk", fail)
    with pytest.raises(type(error)) as raised:
        write_durably(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
    assert getattr(raised.value, "filename", str(path)) == str(path)


def refuse(path: Path, _target: Path) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))


def write_new(target: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    with stage(target) as partial:
        partial.mkdir()
        (partial / "config.json").write_text("new")
        meanwhile()


def test_a_text_that_cannot_be_put_in_place_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"busy; the new content is kept in .*tokenizer\.json\.partial"):
        write_durably(path, "new")
    assert [path.read_text(), (tmp_path / "tokenizer.json.partial").read_text()] == ["old", "new"]


def test_a_folder_that_cannot_be_put_in_place_is_kept_and_so_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / "config.json").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(UserError, match=r"busy; what was to be there is complete: move .*\.export\.partial"):
            write_new(target)
    assert (target / "config.json").read_text() == "old"
    assert (tmp_path / ".export.partial/config.json").read_text() == "new"
    target.rename(tmp_path / ".export.old")  # as a kill between the two renames leaves it
    restore_replaced(target)
    assert (target / "config.json").read_text() == "old"
    write_new(target)
    assert (target / "config.json").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_volume_and_what_came_meanwhile_are_not_replaced(tmp_path: Path, mount_tmpfs: MountTmpfs) -> None:
    volume = mount_tmpfs(tmp_path / "volume", "1m")
    with pytest.raises(UserError, match="what was to be there is complete"):
        write_new(volume)
    with pytest.raises(UserError, match="File exists; what was to be there is complete"):
        write_new(tmp_path / "run", lambda: (tmp_path / "run").mkdir())
    assert not list((tmp_path / "run").iterdir())
    assert (tmp_path / ".run.partial/config.json").read_text() == "new"
