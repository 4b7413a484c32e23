"""Trials: short training runs in one folder, each a child process, that may be killed at a given step."""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.experiments.child_run import POLL_SECONDS, Say, follow_run, interrupt_on_termination, open_child_run
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_last_step
from gptmill.runtime.child import describe_exit
from gptmill.runtime.memory import NO_MEMORY

MIN_FREE_BYTES = 1_000_000
KILL_POLL_SECONDS = 0.002  # a small model does hundreds of steps a second
SHOWN_LINES = 3  # of the stderr of a failed run
SENTENCE = re.compile(r"^gptmill: (.+)", re.MULTILINE | re.DOTALL)
UNTRACKED: dict[str, Any] = {
    "use_tensorboard": False,
    "use_wandb": False,
    "use_trackio": False,
    "histogram_freq": None,  # which needs one of them
}
"""The flags of a run that no tracker hears of."""
ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)


class TrialError(UserError):
    """A run that failed: its exit code, and the part of its stderr that gives the reason."""

    def __init__(self, name: str, exit_code: int, stderr: str) -> None:
        lines = (stderr.strip() or "nothing on stderr").split("\n")
        found = SENTENCE.findall(stderr.strip()) or ERROR.findall(stderr) or lines
        self.exit_code = exit_code
        self.reason: str = found[-1]
        shown = " | ".join(lines[-SHOWN_LINES:]).removeprefix("gptmill: ")
        super().__init__(f"run {name} failed, {describe_exit(exit_code)}: {shown}")

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it ran out of memory, by its stderr, or by SIGKILL, which rarely has another cause."""
        words = ("out of memory", "OutOfMemoryError", "MemoryError", *NO_MEMORY)
        return self.exit_code == -signal.SIGKILL or any(word in self.reason for word in words)


class Trials:
    """Runs of one recipe in one folder."""

    def __init__(self, folder: Path, arguments: list[str], steps: int, say: Say) -> None:
        self.folder = folder
        self._arguments = arguments
        self._steps = steps
        self._say = say

    def train(self, name: str, *more: str, deadline: float = math.inf) -> RunDirectory:
        """Trains from the first step to the last, or kills the run at the deadline, in monotonic time."""
        run = RunDirectory(self.folder / name)
        self._train(run, self._make_arguments(name, more), lambda: time.monotonic() >= deadline)
        return run

    def train_until(
        self, name: str, step: int, more: list[str], environment: Mapping[str, str], deadline: float = math.inf
    ) -> RunDirectory | None:
        """Trains until the step is logged, then kills the run; None if the deadline, in monotonic time, came first."""
        run = RunDirectory(self.folder / name)

        def is_due() -> bool:
            return read_last_step(run.events) >= step or time.monotonic() >= deadline

        self._train(run, self._make_arguments(name, more), is_due, last_step=step, environment=environment)
        return run if read_last_step(run.events) >= step else None

    def train_and_kill(self, name: str, step: int) -> tuple[RunDirectory, int]:
        """Trains until the step is logged and a checkpoint saved, then kills the run; returns it and its last step."""
        run = RunDirectory(self.folder / name)

        def is_due() -> bool:
            return read_last_step(run.events) >= step and bool(list_step_folders(run.checkpoints))

        if not self._train(run, self._make_arguments(name), is_due, poll_seconds=KILL_POLL_SECONDS):
            raise UserError(f"the run of {self._steps} steps ended before it could be killed; use more --steps")
        return run, read_last_step(run.events)

    def resume(self, run: RunDirectory) -> None:
        """Resumes a run from its latest checkpoint and trains to the last step."""
        self._train(run, [f"--run_name={run.path.name}", f"--logdir={self.folder}", "--resume=latest", "--trust"])

    def _train(
        self,
        run: RunDirectory,
        arguments: Sequence[str],
        is_due: Callable[[], bool] = lambda: False,
        *,
        last_step: int | None = None,
        environment: Mapping[str, str] | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> bool:
        """Trains until the run ends, or kills it when it `is_due`, returning True; raises UserError if it fails."""
        name, last_step = run.path.name, self._steps if last_step is None else last_step
        with self._open_process(name, arguments, environment) as process:
            if follow_run(process, run, last_step, self._say, is_due, poll_seconds):
                return True
            self._check_exit(process, name)
        return False

    @contextmanager
    def _open_process(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        with (
            self._find_stderr(name).open("wb") as stderr,
            open_child_run(arguments, subprocess.DEVNULL, stderr, environment) as process,
        ):
            yield process

    def _check_exit(self, process: subprocess.Popen[bytes], name: str) -> None:
        if process.wait() == 0:
            return
        stderr = self._find_stderr(name).read_text(encoding="utf-8", errors="replace")
        if not stderr.strip() and shutil.disk_usage(self.folder).free < MIN_FREE_BYTES:
            raise UserError(f"no disk space is left in {self.folder.parent}; free some or choose another --logdir")
        raise TrialError(name, process.returncode, stderr)

    def _make_arguments(self, name: str, more: Sequence[str] = ()) -> list[str]:
        return [*self._arguments, f"--run_name={name}", *more]

    def _find_stderr(self, name: str) -> Path:
        return self.folder / f"{name}.stderr.txt"


@contextmanager
def open_trials_folder(kept: str | None, logdir: str) -> Iterator[Path]:
    """Opens a folder for runs: the one to be kept, or a temporary one.

    The temporary one is in the log directory, since checkpoints may be larger than a /tmp in memory.
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
        raise UserError(
            f"cannot write runs to {kept or logdir}: {error.strerror or error}; choose another folder"
        ) from None
    try:
        with interrupt_on_termination():
            yield folder
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new_parent and not any(parent.iterdir()):
                parent.rmdir()
