"""Runs of `gptmill train` as processes of their own, timed from the start of the process, and what they tell."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.data.shards.opening import holds_shards
from gptmill.data.shards.remote_folder import is_remote
from gptmill.experiments.child_run import interrupt_on_termination, open_child_run
from gptmill.runs.code_fingerprint import make_code_fingerprint
from gptmill.runs.event_log import read_records

POLL_SECONDS = 0.2
SHOWN_CHARACTERS = 3000  # of what a run that failed has said
PROCESS_NAME = "process.json"
USER_ERROR, INTERRUPTED = 2, 130

ENDED = threading.Event()  # tells threads that train that nobody waits for them any longer

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run has written; times are those of `time.time()`."""

    events: list[Event]
    started: float
    """When its process was started; where nobody noted that, when it began to train."""
    origin: dict[str, Any] | None = None
    """What it was trained by; None where nobody noted that."""

    def select(self, kind: str) -> list[Event]:
        """Its events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def is_finished(self) -> bool:
        return any(event["reason"] == "finished" for event in self.select("RunFinished"))

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return max((event["step"] for event in self.select("StepLogged")), default=0)


def run_guarded(main: Callable[[], int]) -> int:
    """Runs a benchmark; ended by Ctrl-C or a signal, it does not leave its training behind."""
    try:
        with interrupt_on_termination():
            return main()
    except UserError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def open_jobs(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that train side by side; Ctrl-C or a signal ends their trainings too."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        ENDED.set()
        pool.shutdown(cancel_futures=True)
        raise


def check_corpus(data_dir: str) -> None:
    """Raises UserError where there is no prepared corpus."""
    if not holds_shards(data_dir):
        raise UserError(f"{data_dir} holds no prepared corpus; make it with: gptmill prepare TEXT --out {data_dir}")


def make_absolute(data_dir: str) -> str:
    """The name of a corpus that holds in every folder."""
    return data_dir if is_remote(data_dir) else str(Path(data_dir).resolve())


def make_place(name: str, logdir: Path) -> Path:
    """The folder of the run of a row."""
    return logdir / name.replace(",", "").replace(" ", "_")


def read_run(path: Path) -> Run | None:
    """The run in a folder, or of an events.jsonl; None for one that has not begun.

    Raises UserError for a file that no run has written.
    """
    path = path / "events.jsonl" if path.is_dir() else path
    if not path.is_file():
        return None
    try:
        events: list[Event] = read_records(path)
        times = [event["time"] for event in events if event["event"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not the events.jsonl of a run; name another, or remove it") from None
    if not events:
        return None
    noted = path.parent / PROCESS_NAME
    if not noted.is_file():
        return Run(events, times[0])
    process = json.loads(noted.read_text(encoding="utf-8"))
    return Run(events, process["started"], process["origin"])


def obtain(
    place: Path,
    recipe: str,
    flags: list[str],
    seconds: float,
    last_step: int | None = None,
    before_end: Callable[[], None] = lambda: None,
    *,
    is_alone: bool = True,
) -> Run | None:
    """The run in a folder; trained, unless it is there, complete, by this code with this recipe and these flags."""
    run = read_run(place)
    if run is not None and run.origin == make_origin(recipe, flags) and is_complete(run, last_step):
        return run
    run = train(place, recipe, flags, seconds, last_step, before_end, is_alone=is_alone)
    return run if run is not None and is_complete(run, last_step) else None


def is_complete(run: Run, last_step: int | None) -> bool:
    return run.is_finished or (last_step is not None and run.last_step >= last_step)


def make_origin(recipe: str, flags: list[str]) -> dict[str, Any]:
    """All that a run's figures depend on, but for the machine."""
    return {"recipe": load_recipe(recipe), "flags": flags, "code": make_code_fingerprint()}


def train(
    place: Path,
    recipe: str,
    flags: list[str],
    seconds: float,
    last_step: int | None,
    before_end: Callable[[], None] = lambda: None,
    *,
    is_alone: bool = True,
) -> Run | None:
    """Trains from the first step; None where that failed or took too long, with what it said on stderr.

    With `last_step` the run is killed once it has logged that step, which saves it the writing of its last checkpoint;
    `before_end` is called just before, while the device is busy. Checkpoints are removed. A run that is not
    alone on the device keeps to itself what it times there, such as matmuls: later runs are to time them undisturbed.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    said = place.with_name(f"{place.name}.txt")
    where = ["--logdir", str(place.parent), "--run_name", place.name]
    environment = {} if is_alone else {"GPTMILL_CACHE": str(place.parent / "cache")}
    is_enough, started = False, time.time()
    with said.open("wb") as output, open_child_run([recipe, *where, *flags], output, output, environment) as process:
        while process.poll() is None and time.time() - started < seconds and not is_enough:
            if ENDED.wait(POLL_SECONDS):
                break
            is_enough = last_step is not None and has_logged(place, last_step)
        if is_enough:
            before_end()
    shutil.rmtree(place / "checkpoints", ignore_errors=True)
    if ENDED.is_set():
        return None
    if not is_enough and process.returncode:
        text = said.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(f"{place.name}: failed after {time.time() - started:.0f} s:\n{text[-SHOWN_CHARACTERS:]}\n")
        return None
    noted = {"started": started, "origin": make_origin(recipe, flags)}
    (place / PROCESS_NAME).write_text(json.dumps(noted), encoding="utf-8")
    return read_run(place)


def has_logged(place: Path, step: int) -> bool:
    """Whether a run that is under way has come so far."""
    run = read_run(place)
    return run is not None and run.last_step >= step
