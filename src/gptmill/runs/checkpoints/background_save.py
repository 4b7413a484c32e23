"""Saves one thing at a time in a background thread. Failures are reported and retried, never raised."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo, Held
from gptmill.runs.checkpoints.joint_save import AbandonedError, JointSave
from gptmill.runs.events import Event, Warned

RETRY_SECONDS = (0.5, 2.0, 8.0, 30.0)  # after the first failure, the second, ...; the last one repeats
FINAL_ATTEMPTS = 3  # of a failing save once the caller waits for it
BEAT_SECONDS = 0.5
MAX_BEAT_SECONDS = 3600.0  # then heartbeats stop, so that the watchdog reports a dead disk as a hang


@dataclass
class Save:
    """One checkpoint that is being saved."""

    checkpoint: Checkpoint[Held]
    tiers: list[str]
    wait_for_copy: Callable[[], float]
    started: float
    joint: JointSave | None
    """The save of all ranks that this one is a part of; None where rank 0 saves alone."""
    stalled_seconds: float = 0.0
    info: CheckpointInfo | None = None
    """Set once the checkpoint is durable; its tiers may not be linked yet."""

    @property
    def step(self) -> int:
        return self.checkpoint.step


class BackgroundSaver(ABC):
    """A thread per save, retries, and the events about them."""

    def __init__(self, *, in_background: bool) -> None:
        self.last_seconds = 0.0
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._save: Save | None = None
        self._events: list[Event] = []
        self._lock = threading.Lock()  # for the events
        self._is_awaited = threading.Event()  # the caller waits for the save
        self._attempts_left = 0  # once the caller waits
        self._is_durable = True
        self._saves = 0

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
        self._saves += 1
        joint = self._join(checkpoint)
        save = self._save = Save(checkpoint, self._name_tiers(tiers), wait_for_copy, time.monotonic(), joint)
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
        if not self._in_background:
            self.finish(beat)

    def finish_previous(self, beat: Callable[[], None] = lambda: None) -> None:
        """Waits for the save in progress; if it fails, it is abandoned, since a newer one follows."""
        self._wait(0, beat)

    def finish(self, beat: Callable[[], None] = lambda: None, patience_seconds: float | None = None) -> bool:
        """Waits for the save in progress, with a few more attempts; returns whether the last save is durable.

        With `patience_seconds`, other ranks get no more time than that.
        """
        if patience_seconds is not None and self._save is not None and self._save.joint is not None:
            self._save.joint.hurry(patience_seconds)
        self._wait(FINAL_ATTEMPTS, beat)
        return self._is_durable

    def collect(self) -> list[Event]:
        """Returns the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    @abstractmethod
    def _attempt(self, save: Save) -> bool:
        """Saves, or raises; returns False if it has reported that the save is not possible now."""

    @abstractmethod
    def _report(self, save: Save, failures: int) -> None:
        """Says that it is saved."""

    @abstractmethod
    def _join(self, checkpoint: Checkpoint[Held]) -> JointSave | None: ...

    def _give_up(self, save: Save, reason: str) -> None:
        """Says that it is not saved."""
        self._warn(save.step, "save", f"step {save.step} is not saved: {reason}")

    def _name_tiers(self, tiers: Sequence[str]) -> list[str]:
        return list(tiers)

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

    def _run(self, save: Save) -> None:
        """The body of the thread."""
        try:
            save.stalled_seconds = save.wait_for_copy()
        except BaseException as error:
            self._give_up(save, f"copying it to host memory failed: {describe_error(error)}")
            return
        try:
            self._save_with_retries(save)
        except BaseException as error:
            self._give_up(save, describe_error(error))

    def _save_with_retries(self, save: Save) -> None:
        failures = 0
        while True:
            try:
                is_saved = self._attempt(save)
            except AbandonedError as error:
                self._give_up(save, str(error))
                return
            except Exception as error:
                failures += 1
                if failures == 1:
                    self._warn(save.step, "save", f"cannot save step {save.step}: {describe_error(error)}; retrying")
                if not self._wait_before_retry(failures):
                    self._give_up(save, describe_error(error))
                    return
                continue
            if is_saved:
                self.last_seconds = time.monotonic() - save.started
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

    def _warn(self, step: int, about: str, message: str) -> None:
        self._record(Warned(step, about, message))

    def _record(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


def describe_error(error: BaseException) -> str:
    """Describes an exception as part of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _choose_delay(failures: int) -> float:
    return RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1]
