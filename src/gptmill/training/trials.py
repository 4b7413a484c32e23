"""Short trainings as processes of their own, watched by their logs, and killed where one asks for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.directory import RunDirectory

PROGRAM = (sys.executable, "-m", "gptmill", "train")
POLL_SECONDS = 0.1
POLL_TO_KILL_SECONDS = 0.002  # a small model does hundreds of steps a second
PROGRESS_SECONDS = 5.0
SHOWN_LINES = 3  # of what a run that failed has said

Say = Callable[[str], None]


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
            self._follow(process, run, POLL_SECONDS, lambda: False)
            self._check_end(process, name)
        return run

    def train_and_kill(self, name: str, step: int) -> tuple[RunDirectory, int]:
        """A run that is killed once it has logged the step and saved something; and the step that it reached."""
        run = RunDirectory(self.folder / name)
        with self._open_process(name, [*self._arguments, f"--run_name={name}"]) as process:

            def is_due() -> bool:
                return read_last_step(run) >= step and bool(list_step_folders(run.checkpoints))

            if not self._follow(process, run, POLL_TO_KILL_SECONDS, is_due):
                self._check_end(process, name)
                raise UserError(f"the run of {self._steps} steps ended before it could be killed; use more --steps")
            process.kill()
            process.wait()
        return run, read_last_step(run)

    def resume(self, run: RunDirectory) -> None:
        """Goes on with a run to its last step."""
        name = run.path.name
        with self._open_process(name, [f"--run_name={name}", f"--logdir={self.folder}", "--resume=latest"]) as process:
            self._follow(process, run, POLL_SECONDS, lambda: False)
            self._check_end(process, name)

    @contextmanager
    def _open_process(self, name: str, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A training whose complaints go to a file; it does not outlive the context, and Ctrl-C does not reach it."""
        with self._find_complaints(name).open("wb") as complaints:
            process = subprocess.Popen(
                [*PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=complaints, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _follow(
        self, process: subprocess.Popen[bytes], run: RunDirectory, poll_seconds: float, is_due: Callable[[], bool]
    ) -> bool:
        """Tells how far it is until it ends, or until something is due: then it returns True."""
        first = told_step = read_last_step(run)
        started = told = 0.0
        while process.poll() is None:
            if is_due():
                return True
            now, step = time.monotonic(), read_last_step(run)
            if step != first and not started:  # what came before was loading, preparing and compiling
                first, started = step, now
            if step > max(first, told_step) and now - told >= PROGRESS_SECONDS:
                told, told_step = now, step
                left = timedelta(seconds=round((now - started) / (step - first) * (self._steps - step)))
                self._say(f"  step {step:,} of {self._steps:,}, about {left} left")
            time.sleep(poll_seconds)
        return False

    def _check_end(self, process: subprocess.Popen[bytes], name: str) -> None:
        if process.wait() == 0:
            return
        said = self._find_complaints(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = " | ".join(said[-SHOWN_LINES:]).removeprefix("gptmill: ") or "it said nothing"
        raise UserError(f"the run {name} failed with exit code {process.returncode}: {reason}")

    def _find_complaints(self, name: str) -> Path:
        return self.folder / f"{name}.stderr.txt"


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
            folder = Path(tempfile.mkdtemp(prefix=".verify-resume-", dir=parent))
    except OSError as error:
        raise UserError(f"cannot write runs to {kept or logdir}: {error.strerror or error}; choose another") from None
    try:
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
