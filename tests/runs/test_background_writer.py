from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import MountTmpfs, make_environment
from zygote import Zygote

from gptmill.config.run import CheckpointConfig
from gptmill.runs.checkpoints import background_save as save_module
from gptmill.runs.checkpoints import background_writer as writer_module
from gptmill.runs.checkpoints.background_writer import CheckpointWriter
from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo
from gptmill.runs.checkpoints.selection import load_chosen
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders, save_checkpoint
from gptmill.runs.checkpoints.tiers import BEST, LATEST, make_rolling_name, read_tiers
from gptmill.runs.events import CheckpointSaved, Event, Warned


def make_checkpoint(step: int, floats: int = 50) -> Checkpoint:
    return Checkpoint(step, {"model": {"w": torch.full((floats,), float(step))}}, {"step": step})


def start(writer: CheckpointWriter, step: int, floats: int = 50) -> None:
    writer.start(make_checkpoint(step, floats), [make_rolling_name(step)], lambda: 0.25)


def save(writer: CheckpointWriter, step: int, floats: int = 50) -> bool:
    start(writer, step, floats)
    return writer.finish()


def show(events: Sequence[Event]) -> list[str]:
    """Saved steps, and the words of warnings."""
    return [
        f"{event.step} {event.about}: {event.message}" if isinstance(event, Warned) else f"{event.step} saved"
        for event in events
    ]


def folders(folder: Path) -> list[str]:
    return [path.name for path in list_step_folders(folder)]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class FailingDisk:
    """save_checkpoint, failing for as long as it is told to."""

    def __init__(self, error: BaseException, times: float) -> None:
        self.error = error
        self.times = times
        self.calls = 0

    def __call__(self, folder: Path, checkpoint: Checkpoint) -> CheckpointInfo:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return save_checkpoint(folder, checkpoint)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> type[FailingDisk]:
    """FailingDisk, in the place of the disk once it is made; attempts follow each other without delay."""
    monkeypatch.setattr(save_module, "RETRY_SECONDS", (0.0,))

    class Installed(FailingDisk):
        def __init__(self, error: BaseException, times: float = float("inf")) -> None:
            super().__init__(error, times)
            monkeypatch.setattr(writer_module, "save_checkpoint", self)

    return Installed


@pytest.fixture
def small_disk(tmp_path: Path, mount_tmpfs: MountTmpfs) -> Path:
    """A file system of four megabytes."""
    return mount_tmpfs(tmp_path / "small", "4m")


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_is_durable_linked_and_reported(tmp_path: Path, in_background: bool) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig(save_in_background=in_background))
    assert writer.last_seconds == 0.0
    assert writer.finish()
    writer.start(make_checkpoint(10), [make_rolling_name(10), BEST], lambda: 0.25)
    if in_background:
        assert writer.finish()
    assert not writer.is_busy
    (event,) = writer.collect()
    path = tmp_path / "step_000010"
    size = (path / "model.safetensors").stat().st_size
    assert isinstance(event, CheckpointSaved)
    assert event == CheckpointSaved(
        10, str(path), size, writer.last_seconds, 0.25, [LATEST, "rolling_step_000010", BEST], time=event.time
    )
    assert writer.last_seconds > 0.0
    assert set(read_tiers(tmp_path)) == {LATEST, "rolling_step_000010", BEST}
    assert writer.collect() == []
    writer.finish()


def test_the_copy_off_the_device_is_waited_for_in_the_background(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    copied = threading.Event()
    checkpoint = make_checkpoint(10)
    writer.start(checkpoint, [], copied.wait)  # type: ignore[arg-type]
    assert writer.is_busy
    checkpoint.tensors["model"]["w"].fill_(7.0)
    copied.set()
    assert writer.finish()
    assert load_chosen(tmp_path, "latest", ("model",)).checkpoint.tensors["model"]["w"][0] == 7.0


def test_a_copy_that_fails_is_not_saved(tmp_path: Path) -> None:
    def fail_to_copy() -> None:
        raise RuntimeError("CUDA error")

    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    writer.start(make_checkpoint(10), [], fail_to_copy)
    assert not writer.finish()
    assert show(writer.collect()) == [
        "10 save: step 10 is not saved: copying it to host memory failed: RuntimeError: CUDA error"
    ]
    assert folders(tmp_path) == []


def test_saves_never_overlap_and_each_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = threading.Lock()
    overlaps = []

    def watch(folder: Path, checkpoint: Checkpoint) -> CheckpointInfo:
        overlaps.append(not running.acquire(blocking=False))
        try:
            return save_checkpoint(folder, checkpoint)
        finally:
            running.release()

    monkeypatch.setattr(writer_module, "save_checkpoint", watch)
    writer = CheckpointWriter(tmp_path, CheckpointConfig(keep_checkpoints=2))
    for step in range(1, 9):
        start(writer, step, 50_000)
    assert writer.finish()
    assert overlaps == [False] * 8
    assert show(writer.collect()) == [f"{step} saved" for step in range(1, 9)]
    assert folders(tmp_path) == ["step_000007", "step_000008"]


def test_a_failing_save_is_reported_once_and_tried_again_until_it_works(
    tmp_path: Path, fail: type[FailingDisk]
) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    disk = fail(OSError(errno.EIO, "Input/output error", "model.safetensors"), 5)
    start(writer, 10)
    wait_until(lambda: not writer.is_busy)
    assert disk.calls == 6
    assert show(writer.collect()) == [
        "10 save: cannot save step 10: Input/output error (model.safetensors); retrying",
        "10 save: step 10 is saved after 6 attempts",
        "10 saved",
    ]
    assert writer.finish()


def test_the_next_save_takes_the_place_of_one_that_keeps_failing(tmp_path: Path, fail: type[FailingDisk]) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    disk = fail(OSError(errno.EIO, "Input/output error"))
    start(writer, 10)
    wait_until(lambda: disk.calls >= 2)
    writer.finish_previous()
    assert not writer.is_busy
    disk.times = 0
    assert save(writer, 20)
    assert show(writer.collect()) == [
        "10 save: cannot save step 10: Input/output error; retrying",
        "10 save: step 10 is not saved: Input/output error",
        "20 saved",
    ]


def test_at_the_end_a_failing_save_gets_a_few_attempts_more(
    tmp_path: Path, fail: type[FailingDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "RETRY_SECONDS", (3600.0,))
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    disk = fail(OSError(errno.EIO, "Input/output error"), 1)
    assert save(writer, 10)
    assert disk.calls == 2
    monkeypatch.setattr(save_module, "RETRY_SECONDS", (0.0,))
    disk.calls, disk.times = 0, 99
    assert not save(writer, 20)
    assert 1 + save_module.FINAL_ATTEMPTS <= disk.calls < 99
    assert not writer.finish()
    disk.times = 0
    assert save(writer, 30)


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_no_failure_of_any_kind_reaches_training(tmp_path: Path, fail: type[FailingDisk], error: BaseException) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig(save_in_background=False))
    disk = fail(error)
    start(writer, 10)
    assert not writer.finish()
    assert type(error).__name__ in show(writer.collect())[-1]
    disk.times = 0
    start(writer, 20)
    assert show(writer.collect()) == ["20 saved"]


def test_links_that_fail_are_made_later_without_saving_again(
    tmp_path: Path, fail: type[FailingDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = fail(OSError(), 0)
    link_tiers, calls = writer_module.link_tiers, []

    def link(*arguments: object, **options: object) -> list[Path]:
        calls.append(arguments)
        if len(calls) <= 2:
            raise PermissionError(errno.EACCES, "Permission denied", "latest")
        return link_tiers(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "link_tiers", link)
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    assert save(writer, 10)
    assert disk.calls == 1
    assert folders(tmp_path) == ["step_000010"]
    assert read_tiers(tmp_path)[LATEST].name == "step_000010"


def test_what_killed_processes_left_behind_is_removed(tmp_path: Path) -> None:
    for name in (".step_000010.partial", ".step_000020.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    CheckpointWriter(tmp_path, CheckpointConfig())
    assert list(tmp_path.iterdir()) == []


class StubbornCopier:
    """Uses every checkpoint that it is offered until it is told otherwise."""

    def __init__(self) -> None:
        self.offered: list[tuple[str, list[str], int]] = []
        self.used: set[str] = set()

    def offer(self, path: Path, tiers: Sequence[str], step: int) -> None:
        assert path.is_dir()
        self.offered.append((path.name, list(tiers), step))
        self.used.add(path.name)
        if step == 40:
            raise RuntimeError("cannot")

    def is_using(self, path: Path) -> bool:
        return path.name in self.used

    def collect(self) -> list[Event]:
        return [Warned(0, "copy", "from the copier")]


def test_the_copier_is_offered_what_is_durable_and_keeps_it_while_it_copies(tmp_path: Path) -> None:
    copier = StubbornCopier()
    writer = CheckpointWriter(tmp_path, CheckpointConfig(keep_checkpoints=1), copier)
    for step in (10, 20, 30, 40):
        assert save(writer, step)
    assert copier.offered[0] == ("step_000010", [LATEST, "rolling_step_000010"], 10)
    assert len(folders(tmp_path)) == 4
    assert show(writer.collect())[-2:] == [
        "40 copy: step 40 is not mirrored: RuntimeError: cannot",
        "0 copy: from the copier",
    ]
    copier.used = {"step_000020"}
    assert save(writer, 50)
    assert folders(tmp_path) == ["step_000020", "step_000040", "step_000050"]


def test_a_disk_that_fills_up_loses_the_oldest_first_then_saving_pauses_and_goes_on(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    writer = CheckpointWriter(folder, CheckpointConfig())
    floats = 200_000  # 0.8 MB: with a margin of 1 MB, three fit
    for step in (1, 2, 3, 4, 5):
        assert save(writer, step, floats)
    assert folders(folder) == ["step_000003", "step_000004", "step_000005"]
    assert show(writer.collect())[3:] == [
        "4 disk: the disk is full: deleted step_000001 to free space for step 4",
        "4 saved",
        "5 disk: the disk is full: deleted step_000002 to free space for step 5",
        "5 saved",
    ]
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 900_000)
    assert not save(writer, 6, 2 * floats)  # too much even if all others went: so none goes
    assert folders(folder) == ["step_000003", "step_000004", "step_000005"]
    assert not save(writer, 7, 2 * floats)
    events = show(writer.collect())
    assert len(events) == 2
    assert events[0].startswith("6 disk: THE DISK IS FULL: ")
    assert "saving is paused, training continues; the last checkpoint is step 5; free disk space in" in events[1]
    filler.unlink()
    assert save(writer, 8, floats)
    assert "8 disk: saving has resumed: step 8 is saved" in show(writer.collect())
    assert save(writer, 9, floats)
    assert not [line for line in show(writer.collect()) if "goes on" in line]
    assert load_chosen(folder, "latest", ("model",)).checkpoint.step == 9


def test_a_disk_that_is_full_sooner_than_it_said(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MARGIN_BYTES", -10_000_000)  # as with a quota: only the write itself fails
    folder = small_disk / "checkpoints"
    writer = CheckpointWriter(folder, CheckpointConfig())
    for step in (1, 2, 3, 4, 5, 6):
        assert save(writer, step, 300_000)
    assert folders(folder) == ["step_000004", "step_000005", "step_000006"]
    assert sum(isinstance(event, CheckpointSaved) for event in writer.collect()) == 6
    (small_disk / "filler").write_bytes(b"x" * 300_000)
    assert not save(writer, 7, 900_000)
    assert "the last checkpoint is step 6" in show(writer.collect())[-1]
    assert find_damage(folder / "step_000006", thorough=True) == ""
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert load_chosen(folder, "latest", ("model",)).checkpoint.step == 6


def test_the_only_checkpoint_is_never_dropped_for_the_next(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    writer = CheckpointWriter(folder, CheckpointConfig(keep_checkpoints=1))
    assert save(writer, 1, 500_000)
    for step in (2, 3):
        assert not save(writer, step, 500_000)
    assert folders(folder) == ["step_000001"]
    assert find_damage(folder / "step_000001", thorough=True) == ""


# A process forks others that save without end, each from where the last one was killed; every third goes back a few
# steps first. The serial number of a save tells its age where steps do not.
KILLED = """
import json, os, random, select, signal, sys, time
from pathlib import Path
import torch
from gptmill.config.run import CheckpointConfig
from gptmill.runs.checkpoints.selection import list_candidates, load_chosen
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders
from gptmill.runs.checkpoints.tiers import BEST, make_rolling_name
from gptmill.runs.checkpoints.background_writer import CheckpointWriter

torch.set_num_threads(1)
folder = Path(sys.argv[1])
generator = random.Random(time.time_ns())  # other moments at every run: any of them must do

def save_without_end(pipe, step, serial):
    writer = CheckpointWriter(folder, CheckpointConfig(keep_checkpoints=2))
    while True:
        step, serial = step + 1, serial + 1
        tiers = [make_rolling_name(step)] + [BEST] * (serial % 4 == 0)
        tensors = {group: {"w": torch.full((100_000,), float(serial))} for group in ("model", "optimizer")}
        writer.start(Checkpoint(step, tensors, {"serial": serial}), tiers, lambda: 0.0)
        assert writer.finish()
        os.write(pipe, f"{serial}\\n".encode())

step = serial = 0
for attempt in range(15):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        save_without_end(writing, max(0, step - 3 * (attempt % 3 == 2)), serial)
    os.close(writing)
    with open(reading, encoding="utf-8") as lines:
        first = lines.readline()
        time.sleep(generator.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        durable = int([first, *lines][-1])
    first = list_candidates(folder, "latest")[0]
    chosen = load_chosen(folder, "latest", ("model", "optimizer"))
    step, serial = chosen.checkpoint.step, chosen.checkpoint.values["serial"]
    print(json.dumps({
        "damage": find_damage(first, thorough=True),
        "complaints": chosen.complaints,
        "durable": durable,
        "serial": serial,
        "is_whole": all(bool((group["w"] == serial).all()) for group in chosen.checkpoint.tensors.values()),
        "folders": len(list_step_folders(folder)),
    }))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_kill_at_any_moment_the_newest_durable_checkpoint_is_found(tmp_path: Path, zygote: Zygote) -> None:
    process = zygote.run(["-c", KILLED, str(tmp_path)], tmp_path, make_environment())
    assert process.returncode == 0, process.stderr
    rounds = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(rounds) == 15
    for found in rounds:
        assert found["damage"] == ""
        assert found["complaints"] == []
        assert found["is_whole"]
        assert found["durable"] <= found["serial"] <= found["durable"] + 1
        assert found["folders"] <= 6
