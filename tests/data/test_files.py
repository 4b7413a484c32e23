"""Durable writes: the old text or the new one, and nothing beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.data import files
from gptmill.data.files import write_durably


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
