"""Lines that wait for room: none is lost, torn or told twice when the disk was full for a while."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import MountTmpfs

from gptmill.runs import append_file as appending
from gptmill.runs.append_file import AppendOnlyFile, Extent

write_really = os.write


class Disk:
    """Takes so many more bytes, then refuses as a full disk does: a write in the middle is cut short."""

    def __init__(self) -> None:
        self.room = 1_000_000
        self.refusal = errno.ENOSPC

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(self.refusal, os.strerror(self.refusal))
        written = write_really(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(appending.os, "write", disk.write)
    return disk


@pytest.fixture
def small_disk(tmp_path: Path, mount_tmpfs: MountTmpfs) -> Path:
    """A real file system of 64 kB."""
    return mount_tmpfs(tmp_path / "small", "64k")


def until(last: int, line: str) -> bool:
    return int(line.split()[0]) <= last


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_lines_that_were_refused_follow_when_there_is_room(
    tmp_path: Path, disk: Disk, refusal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in range(0, 23, 2):  # up to five lines, or some and a piece
        path = tmp_path / f"log-{room}.txt"
        file = AppendOnlyFile(path)
        disk.room, disk.refusal = 1_000_000, refusal
        file.write_line("1 é")
        disk.room = room
        for step in range(2, 12):
            file.write_line(f"{step} é")
        assert path.stat().st_size == len("1 é\n".encode()) + room
        disk.room = 1_000_000
        file.write_line("12 é")
        file.close()
        assert path.read_text(encoding="utf-8") == "".join(f"{step} é\n" for step in range(1, 13)), room
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == 2, room
        assert os.strerror(refusal) in warnings[0]
        assert "complete" in warnings[1]


class BadDisk:
    """Fails every few calls with an error that passes; a failing write may have written a part of its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._random = random.Random(seed)
        self._write = os.write
        monkeypatch.setattr(appending.os, "write", self.write)
        for name in ("open", "fsync", "ftruncate", "truncate"):
            monkeypatch.setattr(appending.os, name, self.make_unsure(getattr(os, name)))
        self.share = 0.3
        self.errors = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

    def write(self, descriptor: int, data: bytes) -> int:
        if self._random.random() < self.share:
            self._write(descriptor, data[: self._random.randrange(len(data))])
            self.fail()
        return self._write(descriptor, data[: self._random.randint(1, len(data))])

    def make_unsure(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any) -> Any:
            if self._random.random() < self.share:
                self.fail()
            return action(*given)

        return act

    def fail(self) -> NoReturn:
        number = self._random.choice(self.errors)
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_durable", [False, True])
def test_errors_that_pass_lose_tear_and_repeat_no_line(
    seed: int, is_durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "RETRY_SECONDS", (0.0,) * 50)
    path = tmp_path / "log.txt"
    path.write_text("1 a\n2 a\n3 a\n2 late\n4 torn", encoding="utf-8")
    disk = BadDisk(monkeypatch, seed)
    file = AppendOnlyFile(path, durable=is_durable)
    file.keep_only(lambda line: until(2, line))
    for step in range(3, 200):
        file.write_line(f"{step} é")
    file.keep_only(lambda line: until(150, line))
    for step in range(151, 200):
        file.write_line(f"{step} é")
    disk.share, disk.errors = 0.05, (errno.EIO,)
    file.close()
    expected = ["1 a", "2 a", "2 late", *(f"{step} é" for step in range(3, 200))]
    assert path.read_text(encoding="utf-8").splitlines() == expected
    assert file.extent == Extent(0, 0).extend(path.read_bytes())


def test_an_error_that_has_passed_is_not_worth_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = count()

    def write(descriptor: int, data: bytes) -> int:
        if next(attempts) % 2 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write_really(descriptor, data)

    monkeypatch.setattr(appending.os, "write", write)
    file = AppendOnlyFile(tmp_path / "log.txt")
    file.write_line("1 a")
    file.write_line("2 a")
    file.close()
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "1 a\n2 a\n"
    assert capsys.readouterr().err == ""


def test_a_real_disk_that_fills_up_and_gets_room_again(small_disk: Path) -> None:
    file = AppendOnlyFile(small_disk / "log.txt")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 40_000)
    for step in range(3000):
        file.write_line(f"{step} train 3.141593")
    assert (small_disk / "log.txt").stat().st_size < 3000 * 20
    ballast.unlink()
    file.write_line("3000 train 3.141593")
    file.close()
    expected = "".join(f"{step} train 3.141593\n" for step in range(3001))
    assert (small_disk / "log.txt").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("room", range(0, 20, 3))
def test_a_file_is_cut_back_while_the_disk_is_full(tmp_path: Path, disk: Disk, room: int) -> None:
    path = tmp_path / "log.txt"
    file = AppendOnlyFile(path)
    file.write_line("1 a")
    disk.room = room
    for step in range(2, 8):
        file.write_line(f"{step} a")
    file.keep_only(lambda line: until(5, line))
    file.write_line("6 b")
    disk.room = 1_000_000
    file.write_line("7 b")
    file.close()
    assert path.read_text(encoding="utf-8") == "1 a\n2 a\n3 a\n4 a\n5 a\n6 b\n7 b\n"


def test_a_full_disk_does_not_keep_lines_in_the_middle_from_being_dropped(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(appending, "write_durably", refuse)
    path = tmp_path / "log.txt"
    path.write_text("1 a\n2 a\n3 a\n4 a\n2 late\n", encoding="utf-8")
    disk.room = 0
    file = AppendOnlyFile(path)
    file.keep_only(lambda line: until(2, line))
    assert path.read_text(encoding="utf-8") == "1 a\n2 a\n"
    disk.room = 1_000_000
    file.write_line("3 b")
    file.close()
    assert path.read_text(encoding="utf-8") == "1 a\n2 a\n2 late\n3 b\n"
    assert file.extent == Extent(0, 0).extend(path.read_bytes())


def test_late_lines_of_kept_steps_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1 a\n2 a\n3 a\n2 late\n3 late\ntorn", encoding="utf-8")
    file = AppendOnlyFile(path)
    file.keep_only(lambda line: until(2, line))
    file.write_line("3 b")
    file.close()
    assert path.read_text(encoding="utf-8") == "1 a\n2 a\n2 late\n3 b\n"
    assert file.extent == Extent(0, 0).extend(path.read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_what_waits_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(appending, "MAX_PENDING_BYTES", 100)
    path = tmp_path / "log.txt"
    file = AppendOnlyFile(path)
    disk.room = 5  # in the middle of the first line
    for step in range(100, 200):
        file.write_line(f"{step} xxxxx")  # ten bytes
    disk.room = 1_000_000
    file.write_line("200 xxxxx")
    file.close()
    assert path.read_text(encoding="utf-8").splitlines() == [f"{step} xxxxx" for step in (100, *range(192, 201))]
    assert "except for 91 lines" in capsys.readouterr().err


def test_closing_for_good_says_how_much_is_missing(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    file = AppendOnlyFile(tmp_path / "log.txt")
    disk.room = 0
    file.write_line("1 a")
    file.write_line("2 a")
    file.close()
    last = capsys.readouterr().err.splitlines()[-1]
    assert "lacks its last 2 lines" in last
    assert "No space left" in last
