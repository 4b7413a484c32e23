"""Short trainings as processes of their own, watched by their logs, and killed where one asks for it."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.child import hold_back_signals, make_preparation
from gptmill.runtime.memory import NO_MEMORY

SPARE_BYTES = 1_000_000
PROGRAM = (sys.executable, "-m", "gptmill", "train")
POLL_SECONDS = 0.1
POLL_TO_KILL_SECONDS = 0.002  # a small model does hundreds of steps a second
PROGRESS_SECONDS = 5.0
WAITING_SECONDS = 30.0  # between two words of a run that is not at its first step yet
SHOWN_LINES = 3  # of what a run that failed has said
SENTENCE = re.compile(r"^gptmill: (.+)", re.MULTILINE | re.DOTALL)
ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)

Say = Callable[[str], None]


class TrialError(UserError):
    """A run that failed: how it ended, and the part of its complaints that says why."""

    def __init__(self, name: str, exit_code: int, said: str) -> None:
        lines = said.strip().splitlines() or ["it said nothing"]
        found = SENTENCE.findall(said.strip()) or ERROR.findall(said) or lines
        self.exit_code = exit_code
        self.reason: str = found[-1]
        shown = " | ".join(lines[-SHOWN_LINES:]).removeprefix("gptmill: ")
        super().__init__(f"the run {name} failed with exit code {exit_code}: {shown}")

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it did not fit, by its own word, or because the system killed it: it does that for little else."""
        words = ("out of memory", "OutOfMemoryError", "MemoryError", *NO_MEMORY)
        return self.exit_code == -signal.SIGKILL or any(word in self.reason for word in words)


class Trials:
    """Runs of one recipe in one folder."""

    def __init__(self, folder: Path, arguments: list[str], steps: int, say: Say) -> None:
        self.folder = folder
        self._arguments = arguments
        self._steps = steps
        self._say = say

    def train(self, name: str, *more: str) -> RunDirectory:
        """A run from its first step to its last."""
        run = RunDirectory(self.folder / name)
        with self._open_process(name, [*self._arguments, f"--run_name={name}", *more]) as process:
            self._follow(process, run, POLL_SECONDS, lambda: False, self._steps)
            self._check_end(process, name)
        return run

    def train_until(
        self, name: str, step: int, more: list[str], environment: Mapping[str, str], deadline: float = math.inf
    ) -> RunDirectory | None:
        """A run that is ended once it has logged the step; None if the deadline, on the monotonic clock, came first."""
        run = RunDirectory(self.folder / name)
        with self._open_process(name, [*self._arguments, f"--run_name={name}", *more], environment) as process:

            def is_due() -> bool:
                return read_last_step(run) >= step or time.monotonic() >= deadline

            if not self._follow(process, run, POLL_SECONDS, is_due, step):
                self._check_end(process, name)
        return run if read_last_step(run) >= step else None

    def train_and_kill(self, name: str, step: int) -> tuple[RunDirectory, int]:
        """A run that is killed once it has logged the step and saved something; and the step that it reached."""
        run = RunDirectory(self.folder / name)
        with self._open_process(name, [*self._arguments, f"--run_name={name}"]) as process:

            def is_due() -> bool:
                return read_last_step(run) >= step and bool(list_step_folders(run.checkpoints))

            if not self._follow(process, run, POLL_TO_KILL_SECONDS, is_due, self._steps):
                self._check_end(process, name)
                raise UserError(f"the run of {self._steps} steps ended before it could be killed; use more --steps")
            kill_all(process)
        return run, read_last_step(run)

    def resume(self, run: RunDirectory) -> None:
        """Goes on with a run to its last step."""
        name = run.path.name
        with self._open_process(name, [f"--run_name={name}", f"--logdir={self.folder}", "--resume=latest"]) as process:
            self._follow(process, run, POLL_SECONDS, lambda: False, self._steps)
            self._check_end(process, name)

    @contextmanager
    def _open_process(
        self, name: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A training whose complaints go to a file."""
        with (
            self._find_complaints(name).open("wb") as complaints,
            open_training(arguments, subprocess.DEVNULL, complaints, environment) as process,
        ):
            yield process

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        run: RunDirectory,
        poll_seconds: float,
        is_due: Callable[[], bool],
        last_step: int,
    ) -> bool:
        """Tells how far it is until it ends, or until something is due: then it returns True."""
        first = told_step = read_last_step(run)
        started = told = 0.0
        opened = waited = time.monotonic()
        while process.poll() is None:
            if is_due():
                return True
            now, step = time.monotonic(), read_last_step(run)
            if step != first and not started:  # what came before was loading, preparing and compiling
                first, started = step, now
            if step > max(first, told_step) and now - told >= PROGRESS_SECONDS:
                told, told_step = now, step
                left = timedelta(seconds=round((now - started) / (step - first) * max(0, last_step - step)))
                self._say(f"  step {step:,} of {last_step:,}, about {left} left")
            if not started and now - waited >= WAITING_SECONDS:
                waited = now
                self._say(f"  loading, preparing or compiling for {now - opened:.0f} s now")
            time.sleep(poll_seconds)
        return False

    def _check_end(self, process: subprocess.Popen[bytes], name: str) -> None:
        if process.wait() == 0:
            return
        said = self._find_complaints(name).read_text(encoding="utf-8", errors="replace")
        if not said.strip() and shutil.disk_usage(self.folder).free < SPARE_BYTES:
            raise UserError(f"no space is left at {self.folder.parent}; make room there or choose another --logdir")
        raise TrialError(name, process.returncode, said)

    def _find_complaints(self, name: str) -> Path:
        return self.folder / f"{name}.stderr.txt"


@contextmanager
def open_training(
    arguments: list[str], output: int | IO[bytes], complaints: IO[bytes], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`gptmill train` as a process, which does not outlive the context, nor this process; Ctrl-C does not reach it."""
    preparation, process = make_preparation(signal.SIGKILL), None
    try:
        with hold_back_signals():
            process = subprocess.Popen(
                [*PROGRAM, *arguments],
                stdout=output,
                stderr=complaints,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                preexec_fn=preparation,
            )
        set_oom_score(process)
        yield process
    finally:
        if process is not None:
            kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session, and what it has started there."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.wait()


def set_oom_score(process: subprocess.Popen[bytes]) -> None:
    """Lets Linux, when it runs out of memory, end this process rather than any other."""
    with suppress(OSError):
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="ascii")


@contextmanager
def clean_up_when_ended() -> Iterator[None]:
    """Takes SIGTERM and a lost connection for Ctrl-C, so that what was opened is closed."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def open_trials_folder(kept: str | None, logdir: str) -> Iterator[Path]:
    """A folder for runs: the one that is to be kept, or one that goes in the end.

    That one lies where the user keeps runs: checkpoints may be larger than what a /tmp in memory holds.
    """
    parent = Path(logdir)
    is_new_parent = not parent.exists()
    try:
        if kept is not None:
            folder = Path(kept)
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UserError(f"keep_runs: {folder} is not empty; name another folder")
        else:
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".trials-", dir=parent))
    except OSError as error:
        raise UserError(f"cannot write runs to {kept or logdir}: {error.strerror or error}; choose another") from None
    try:
        with clean_up_when_ended():
            yield folder
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new_parent and not any(parent.iterdir()):
                parent.rmdir()


def read_log(run: RunDirectory) -> list[str]:
    """The whole lines of a run's log.txt, which may not be there yet."""
    try:
        return run.text_log.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []


def read_last_step(run: RunDirectory) -> int:
    """The last step in the log; 0 before the first."""
    lines = read_log(run)
    return int(lines[-1].split()[0]) if lines else 0
