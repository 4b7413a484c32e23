"""Saves checkpoints in a background thread. Failures are reported and retried, never raised."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gptmill.config.run import CheckpointConfig
from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo, Held
from gptmill.runs.checkpoints.disk_space import (
    MARGIN_BYTES,
    deletable_bytes,
    delete_oldest_rolling,
    format_bytes,
    free_bytes,
)
from gptmill.runs.checkpoints.storage import measure_checkpoint, read_step, remove_leftovers, save_checkpoint
from gptmill.runs.checkpoints.tiers import LATEST, link_tiers, read_tiers
from gptmill.runs.events import CheckpointSaved, Event, Warned

RETRY_SECONDS = (0.5, 2.0, 8.0, 30.0)  # after the first failure, the second, ...; the last one repeats
FINAL_ATTEMPTS = 3  # of a failing save once the caller waits for it
BEAT_SECONDS = 0.5
MAX_BEAT_SECONDS = 3600.0  # then heartbeats stop, so that the watchdog reports a dead disk as a hang
FULL = (errno.ENOSPC, errno.EDQUOT)


class Mirror(Protocol):
    """Copies finished checkpoints to remote storage."""

    def offer(self, path: Path, tiers: Sequence[str], step: int) -> None: ...

    def is_using(self, path: Path) -> bool: ...

    def collect(self) -> list[Event]: ...


@dataclass
class _Save:
    """One checkpoint that is being saved."""

    checkpoint: Checkpoint[Held]
    tiers: list[str]
    wait_for_copy: Callable[[], float]
    started: float
    stalled_seconds: float = 0.0
    info: CheckpointInfo | None = None
    """Set once the checkpoint is durable; its tiers may not be linked yet."""

    @property
    def step(self) -> int:
        return self.checkpoint.step


class CheckpointWriter:
    """Writes one checkpoint at a time, links its tiers and offers it to the mirror."""

    def __init__(self, folder: Path, config: CheckpointConfig, mirror: Mirror | None = None) -> None:
        self.last_seconds = 0.0
        self._folder = folder
        self._config = config
        self._mirror = mirror
        self._thread: threading.Thread | None = None
        self._events: list[Event] = []
        self._lock = threading.Lock()  # for the events
        self._is_awaited = threading.Event()  # the caller waits for the save
        self._attempts_left = 0  # once the caller waits
        self._is_durable = True
        self._is_paused = False
        remove_leftovers(folder)

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress; while it is, its tensors must not change."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        checkpoint: Checkpoint[Held],
        tiers: Sequence[str],
        wait_for_copy: Callable[[], float],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to save host tensors, after waiting for the previous save with regular heartbeats.

        The tensors are complete once `wait_for_copy` returns, with the seconds for which training was blocked.
        """
        self.finish_previous(beat)
        names = list(dict.fromkeys([LATEST, *tiers]))
        save = _Save(checkpoint, names, wait_for_copy, time.monotonic())
        self._is_awaited.clear()
        self._is_durable = False
        thread = threading.Thread(target=self._run, args=(save,), name="gptmill-save", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: save synchronously
            self._attempts_left = FINAL_ATTEMPTS
            self._is_awaited.set()
            self._run(save)
        else:
            self._thread = thread
        if not self._config.save_in_background:
            self.finish(beat)

    def finish_previous(self, beat: Callable[[], None] = lambda: None) -> None:
        """Waits for the save in progress; if it fails, it is abandoned, since a newer one follows."""
        self._wait(0, beat)

    def finish(self, beat: Callable[[], None] = lambda: None) -> bool:
        """Waits for the save in progress, with a few more attempts; returns whether the last save is durable."""
        self._wait(FINAL_ATTEMPTS, beat)
        return self._is_durable

    def collect(self) -> list[Event]:
        """Returns the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events + (self._mirror.collect() if self._mirror is not None else [])

    def _wait(self, attempts: int, beat: Callable[[], None]) -> None:
        if self._thread is None:
            return
        self._attempts_left = attempts
        self._is_awaited.set()
        last_beat = time.monotonic() + MAX_BEAT_SECONDS
        while self._thread.is_alive():
            self._thread.join(BEAT_SECONDS)
            if time.monotonic() < last_beat:
                beat()
        self._thread = None

    def _run(self, save: _Save) -> None:
        """The body of the thread."""
        try:
            save.stalled_seconds = save.wait_for_copy()
        except BaseException as error:
            self._warn(
                save.step,
                "save",
                f"step {save.step} is not saved: copying it to host memory failed: {_describe_error(error)}",
            )
            return
        try:
            self._save_with_retries(save)
        except BaseException as error:
            self._warn(save.step, "save", f"step {save.step} is not saved: {_describe_error(error)}")

    def _save_with_retries(self, save: _Save) -> None:
        failures = 0
        while True:
            try:
                is_saved = self._save_if_space(save)
            except Exception as error:
                failures += 1
                if failures == 1:
                    self._warn(save.step, "save", f"cannot save step {save.step}: {_describe_error(error)}; retrying")
                if not self._wait_before_retry(failures):
                    fate = "is not saved" if save.info is None else "is saved, but no tier links to it"
                    self._warn(save.step, "save", f"step {save.step} {fate}: {_describe_error(error)}")
                    return
                continue
            if is_saved:
                self._report(save, failures)
            return

    def _wait_before_retry(self, failures: int) -> bool:
        """Returns False if the save is to be abandoned."""
        if not self._is_awaited.is_set():
            self._is_awaited.wait(_choose_delay(failures))
        elif 0 < self._attempts_left < FINAL_ATTEMPTS:
            time.sleep(_choose_delay(FINAL_ATTEMPTS - self._attempts_left))
        if self._is_awaited.is_set():
            self._attempts_left -= 1
            return self._attempts_left >= 0
        return True

    def _save_if_space(self, save: _Save) -> bool:
        """Saves and links, deleting old checkpoints if the disk is full; returns False if that is not enough."""
        needed = measure_checkpoint(save.checkpoint) + MARGIN_BYTES
        while save.info is None and free_bytes(self._folder) < needed:
            # Delete nothing unless that frees enough.
            is_enough = free_bytes(self._folder) + deletable_bytes(self._folder, self._is_used) >= needed
            if not (is_enough and self._delete_oldest(save.step)):
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
                if not self._delete_oldest(save.step):
                    if save.info is not None:
                        raise  # it is durable and `find_unlinked` finds it; only its links are missing
                    return self._pause(save, needed)
            else:
                return True

    def _delete_oldest(self, step: int) -> bool:
        deleted = delete_oldest_rolling(self._folder, in_use=self._is_used)
        if deleted is not None:
            self._warn(step, "disk", f"the disk is full: deleted {deleted.name} to free space for step {step}")
        return deleted is not None

    def _pause(self, save: _Save, needed: int) -> bool:
        self._is_paused = True
        latest = read_tiers(self._folder).get(LATEST)
        last = "there is no checkpoint yet" if latest is None else f"the last checkpoint is step {read_step(latest)}"
        self._warn(
            save.step,
            "disk",
            f"THE DISK IS FULL: {format_bytes(free_bytes(self._folder))} free, a checkpoint and a margin need "
            f"{format_bytes(needed)}; saving is paused, training continues; {last}; free disk space in {self._folder}",
        )
        return False

    def _report(self, save: _Save, failures: int) -> None:
        assert save.info is not None
        self.last_seconds = time.monotonic() - save.started
        if failures:
            self._warn(save.step, "save", f"step {save.step} is saved after {failures + 1} attempts")
        if self._is_paused:
            self._is_paused = False
            self._warn(save.step, "disk", f"saving has resumed: step {save.step} is saved")
        info, seconds = save.info, self.last_seconds
        self._record(
            CheckpointSaved(save.step, str(info.path), info.size_bytes, seconds, save.stalled_seconds, save.tiers)
        )
        if self._mirror is not None:
            try:
                self._mirror.offer(info.path, save.tiers, save.step)
            except Exception as error:
                self._warn(save.step, "copy", f"step {save.step} is not mirrored: {_describe_error(error)}")

    def _is_used(self, path: Path) -> bool:
        return self._mirror is not None and self._mirror.is_using(path)

    def _warn(self, step: int, about: str, message: str) -> None:
        self._record(Warned(step, about, message))

    def _record(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


def _choose_delay(failures: int) -> float:
    return RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1]


def _describe_error(error: BaseException) -> str:
    """Describes an exception as part of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
