"""Saves checkpoints in a thread beside training. Whatever fails there is reported and tried again, never raised."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gptmill.config.run import CheckpointConfig
from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo
from gptmill.runs.checkpoints.disk_space import (
    MARGIN_BYTES,
    drop_oldest_rolling,
    droppable_bytes,
    free_bytes,
    show_bytes,
)
from gptmill.runs.checkpoints.storage import measure_checkpoint, read_step, remove_leftovers, save_checkpoint
from gptmill.runs.checkpoints.tiers import LATEST, link_tiers, read_tiers
from gptmill.runs.events import CheckpointSaved, Event, Warned

RETRY_SECONDS = (0.5, 2.0, 8.0, 30.0)  # after the first failure, the second, ...; the last for all that follow
LAST_ATTEMPTS = 3  # of a failing save that somebody waits for
BEAT_SECONDS = 0.5
PATIENT_SECONDS = 3600.0  # a disk that takes longer is not slow but dead: whoever watches may say so
FULL = (errno.ENOSPC, errno.EDQUOT)


class Mirror(Protocol):
    """Takes finished checkpoints elsewhere."""

    def offer(self, path: Path, tiers: Sequence[str], step: int) -> None: ...

    def is_using(self, path: Path) -> bool: ...

    def collect(self) -> list[Event]: ...


@dataclass
class _Save:
    """One checkpoint on its way to the disk."""

    checkpoint: Checkpoint
    tiers: list[str]
    wait_for_copy: Callable[[], float]
    started: float
    stalled_seconds: float = 0.0
    info: CheckpointInfo | None = None
    """There once the checkpoint is durable; it may still have to be linked."""

    @property
    def step(self) -> int:
        return self.checkpoint.step


class CheckpointWriter:
    """Writes one checkpoint at a time, links its tiers and hands it to the copier."""

    def __init__(self, folder: Path, config: CheckpointConfig, copier: Mirror | None = None) -> None:
        self.last_seconds = 0.0
        self._folder = folder
        self._config = config
        self._copier = copier
        self._thread: threading.Thread | None = None
        self._events: list[Event] = []
        self._lock = threading.Lock()  # of the events
        self._hurry = threading.Event()  # somebody waits
        self._attempts_left = 0  # once somebody does
        self._is_durable = True
        self._is_paused = False
        remove_leftovers(folder)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; its tensors must stay as they are until it is not."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        checkpoint: Checkpoint,
        tiers: Sequence[str],
        wait_for_copy: Callable[[], float],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to save host tensors; waits for the save before, with a `beat` now and then.

        They are whole once `wait_for_copy` returns, which tells for how many seconds training stood still.
        """
        self.make_way(beat)
        names = list(dict.fromkeys([LATEST, *tiers]))
        save = _Save(checkpoint, names, wait_for_copy, time.monotonic())
        self._hurry.clear()
        self._is_durable = False
        thread = threading.Thread(target=self._run, args=(save,), name="gptmill-save", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left: training waits
            self._attempts_left = LAST_ATTEMPTS
            self._hurry.set()
            self._run(save)
        else:
            self._thread = thread
        if not self._config.save_in_background:
            self.finish(beat)

    def make_way(self, beat: Callable[[], None] = lambda: None) -> None:
        """Waits for the save under way; one that fails is given up, since a newer one is to take its place."""
        self._wait(0, beat)

    def finish(self, beat: Callable[[], None] = lambda: None) -> bool:
        """Waits for the save under way, a failing one for a few attempts more; whether the last one is durable."""
        self._wait(LAST_ATTEMPTS, beat)
        return self._is_durable

    def collect(self) -> list[Event]:
        """What happened since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events + (self._copier.collect() if self._copier is not None else [])

    def _wait(self, attempts: int, beat: Callable[[], None]) -> None:
        if self._thread is None:
            return
        self._attempts_left = attempts
        self._hurry.set()
        patience = time.monotonic() + PATIENT_SECONDS
        while self._thread.is_alive():
            self._thread.join(BEAT_SECONDS)
            if time.monotonic() < patience:
                beat()
        self._thread = None

    def _run(self, save: _Save) -> None:
        """All that the thread does."""
        try:
            save.stalled_seconds = save.wait_for_copy()
        except BaseException as error:
            self._warn(save.step, "save", f"step {save.step} is not saved: its copy failed: {_tell(error)}")
            return
        try:
            self._try_until_saved(save)
        except BaseException as error:
            self._warn(save.step, "save", f"step {save.step} is not saved: {_tell(error)}")

    def _try_until_saved(self, save: _Save) -> None:
        failures = 0
        while True:
            try:
                has_room = self._save_where_room(save)
            except Exception as error:
                failures += 1
                if failures == 1:
                    self._warn(save.step, "save", f"cannot save step {save.step}: {_tell(error)}; trying again")
                if not self._wait_to_try_again(failures):
                    fate = "is given up" if save.info is None else "is saved, but no tier points to it"
                    self._warn(save.step, "save", f"step {save.step} {fate}: {_tell(error)}")
                    return
                continue
            if has_room:
                self._report(save, failures)
            return

    def _wait_to_try_again(self, failures: int) -> bool:
        """False if it is to be given up."""
        if not self._hurry.is_set():
            self._hurry.wait(_choose_delay(failures))
        elif 0 < self._attempts_left < LAST_ATTEMPTS:
            time.sleep(_choose_delay(LAST_ATTEMPTS - self._attempts_left))
        if self._hurry.is_set():
            self._attempts_left -= 1
            return self._attempts_left >= 0
        return True

    def _save_where_room(self, save: _Save) -> bool:
        """Saves and links, dropping old checkpoints where the disk is full; False if that did not do."""
        needed = measure_checkpoint(save.checkpoint) + MARGIN_BYTES
        while save.info is None and free_bytes(self._folder) < needed:
            # Nothing is dropped in vain.
            is_enough = free_bytes(self._folder) + droppable_bytes(self._folder, self._is_used) >= needed
            if not (is_enough and self._drop_oldest(save.step)):
                return self._pause(save, needed)
        while True:
            try:
                if save.info is None:
                    save.info = save_checkpoint(self._folder, save.checkpoint)
                    self._is_durable = True
                link_tiers(
                    self._folder, save.info.path, save.tiers, self._config.keep_checkpoints, in_use=self._is_used
                )
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not self._drop_oldest(save.step):
                    if save.info is not None:
                        raise  # it is durable and will be found; only its links wait
                    return self._pause(save, needed)
            else:
                return True

    def _drop_oldest(self, step: int) -> bool:
        dropped = drop_oldest_rolling(self._folder, in_use=self._is_used)
        if dropped is not None:
            self._warn(step, "disk", f"the disk is full: dropped {dropped.name} to make room for step {step}")
        return dropped is not None

    def _pause(self, save: _Save, needed: int) -> bool:
        self._is_paused = True
        latest = read_tiers(self._folder).get(LATEST)
        sound = (
            "there is no checkpoint yet" if latest is None else f"the last sound checkpoint is step {read_step(latest)}"
        )
        self._warn(
            save.step,
            "disk",
            f"THE DISK IS FULL: {show_bytes(free_bytes(self._folder))} free, a checkpoint and its margin take "
            f"{show_bytes(needed)}; saving is paused and training goes on; {sound}; make room in {self._folder}",
        )
        return False

    def _report(self, save: _Save, failures: int) -> None:
        assert save.info is not None
        self.last_seconds = time.monotonic() - save.started
        if failures:
            self._warn(save.step, "save", f"step {save.step} is saved after {failures + 1} attempts")
        if self._is_paused:
            self._is_paused = False
            self._warn(save.step, "disk", f"saving goes on: step {save.step} is saved")
        info, seconds = save.info, self.last_seconds
        self._note(
            CheckpointSaved(save.step, str(info.path), info.size_bytes, seconds, save.stalled_seconds, save.tiers)
        )
        if self._copier is not None:
            try:
                self._copier.offer(info.path, save.tiers, save.step)
            except Exception as error:
                self._warn(save.step, "copy", f"step {save.step} is not copied: {_tell(error)}")

    def _is_used(self, path: Path) -> bool:
        return self._copier is not None and self._copier.is_using(path)

    def _warn(self, step: int, about: str, message: str) -> None:
        self._note(Warned(step, about, message))

    def _note(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


def _choose_delay(failures: int) -> float:
    return RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1]


def _tell(error: BaseException) -> str:
    """An exception as part of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
