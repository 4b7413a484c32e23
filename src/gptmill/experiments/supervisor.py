"""A parent process that restarts a run when it crashes or hangs, and gives up when restarting does not help.

Knows the run only by its files and its exit code. Does not import torch: it must survive whatever can go wrong there.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from gptmill.config import exit_codes
from gptmill.config.durations import format_duration, parse_duration
from gptmill.config.text import find_raw
from gptmill.experiments.child_run import PROGRAM, Say
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed
from gptmill.runs.history import append_event, find_last_activity, read_history
from gptmill.runtime.child import ChildExit, SignalRelay, describe_exit, open_relay, run_child
from gptmill.runtime.signals import list_stop_signals

# Exits that a restart would only repeat.
FINAL_EXITS = frozenset({0, exit_codes.USER_ERROR, exit_codes.NOT_SAVED, exit_codes.TIME_UP, exit_codes.DIVERGED})
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_REPEATED_CRASHES = 3
STEP_TOLERANCE = 2  # the log ends a step or two before the crash, which varies
SHOWN_LINES = 15
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Crash:
    """One unexpected end of the run."""

    step: int
    reason: str
    last_lines: list[str]
    stacks: Path | None


@dataclass
class Crashes:
    """Decides from the crashes so far how long to wait before the next restart."""

    furthest_step: int = -1
    repeated: int = 0
    """How many in a row came at the same step."""
    pause_seconds: float = 0.0
    _step: int = -1

    def add(self, crash: Crash) -> None:
        """Counts a crash; the pause starts over when the run got further than before, and doubles when it did not."""
        has_progressed = crash.step > self.furthest_step
        is_repeated = not has_progressed and abs(crash.step - self._step) <= STEP_TOLERANCE
        self.repeated = self.repeated + 1 if is_repeated else 1
        longer_seconds = min(2 * self.pause_seconds, LONGEST_PAUSE_SECONDS)
        self.pause_seconds = FIRST_PAUSE_SECONDS if has_progressed else longer_seconds
        self.furthest_step = max(self.furthest_step, crash.step)
        self._step = crash.step


def supervise(
    arguments: list[str],
    run: RunDirectory,
    max_restarts: int,
    say: Say,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Trains in a child process, restarting it after crashes, and returns the exit code.

    Ends when the child ends by itself, is asked to stop, crashes repeatedly at one step or too many times.
    """
    started, saves_before = time.monotonic(), _list_saves(run)
    crashes = Crashes()
    command = _drop_own_flags(arguments)
    with open_relay() as relay:
        for restarts in count():
            child_started = time.time()
            code, crash = _train([*program, *command], run, relay)
            if crash is None:
                return code
            if run.path.is_dir() and not _has_recorded_crash(run, child_started):
                append_event(run, RunCrashed(crash.step, crash.reason))
            if relay.received:
                return code
            crashes.add(crash)
            if crashes.repeated >= MAX_REPEATED_CRASHES:
                say(describe_repetition(crash, crashes.repeated, run))
                return exit_codes.FAILED
            if restarts == max_restarts:
                say(_describe_end(f"the run crashed {restarts + 1} times, last after step {crash.step:,}", crash))
                return exit_codes.FAILED
            say(
                f"the run crashed after step {crash.step:,} ({crash.reason}); restarting it in "
                f"{crashes.pause_seconds:.0f} s, restart {restarts + 1} of at most {max_restarts}"
            )
            if relay.wait(crashes.pause_seconds):
                break
            has_saved = bool(_list_saves(run) - saves_before)
            command = make_restart_arguments(arguments, has_saved, time.monotonic() - started)
            if not command:
                return exit_codes.TIME_UP
    return 128 + relay.received


def make_restart_arguments(arguments: list[str], has_saved: bool, elapsed_seconds: float) -> list[str]:
    """Returns the arguments of a restart; empty if the time limit is reached.

    A run started with --resume STEP or --resume PATH keeps that until it has saved once: until then its newest
    checkpoint belongs to the steps that it was to discard.
    """
    kept = _drop_own_flags(arguments)
    resume = find_value(kept, "resume")
    if has_saved or resume in (None, "latest"):
        kept = [*drop_flags(kept, {"resume": True}), "--resume", "auto"]
    limit = find_value(kept, "time_limit")
    if limit is not None:
        left = parse_duration(limit) - elapsed_seconds
        if left < 1:
            return []
        kept = [*drop_flags(kept, {"time_limit": True}), "--time_limit", format_duration(int(left))]
    return kept


def _has_recorded_crash(run: RunDirectory, since: float) -> bool:
    """Whether the child itself has recorded the crash."""
    last = read_history(run)[-1:]
    return bool(last) and isinstance(last[0], RunCrashed) and last[0].time >= since


def _drop_own_flags(arguments: list[str]) -> list[str]:
    return drop_flags(arguments, {"supervise": False, "max_restarts": True})


def drop_flags(arguments: list[str], flags: dict[str, bool]) -> list[str]:
    """Returns the arguments without these flags; the values of `flags` say whether a flag takes a value."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name = _read_name(word)
        if name not in flags:
            kept.append(word)
        elif flags[name] and "=" not in word:
            next(words, None)
    return kept


def find_value(arguments: list[str], flag: str) -> str | None:
    """Returns the flag's value; the last one if it is given several times."""
    found = None
    for word, following in pairwise([*arguments, ""]):
        if _read_name(word) == flag:
            found = word.partition("=")[2] if "=" in word else following
    return found


def describe_repetition(crash: Crash, times: int, run: RunDirectory) -> str:
    """Describes why restarting is useless, and where to look."""
    folder = shlex.quote(str(run.path))
    advice = [
        "It would crash there again. Look at:",
        f"  the data of the next step: gptmill data show --run {folder} --step {crash.step + 1}",
        "  memory: of the GPU (a smaller mini_batch_size needs less) and of the host",
        f"  the run history: gptmill checkpoints history {folder}",
    ]
    return "\n".join(
        [_describe_end(f"the run crashed {times} times in a row after step {crash.step:,}", crash), *advice]
    )


def _describe_end(what: str, crash: Crash) -> str:
    lines = [f"{what} ({crash.reason}); it is not restarted"]
    if crash.last_lines:
        lines += ["Its last lines:", *(f"  {line}" for line in crash.last_lines[-SHOWN_LINES:])]
    if crash.stacks is not None:
        lines.append(f"Stack traces of all threads when it hung: {crash.stacks}")
    return "\n".join(lines)


def _train(command: list[str], run: RunDirectory, relay: SignalRelay) -> tuple[int, Crash | None]:
    """Runs the child to its end; returns its exit code, and the crash if it was one."""
    started = time.time()
    ended = run_child(command, relay)
    numbers = {int(number) for number in list_stop_signals()}
    code = ended.code if ended.code >= 0 else 128 - ended.code
    if code in FINAL_EXITS or code - 128 in numbers:
        return code, None  # a stop signal also ends a child that has not installed its handlers yet
    if (terminal := find_raw(sys.stdout)).isatty():
        terminal.write(SHOW_CURSOR)  # the live display had hidden it
        sys.stdout.flush()
    reason = _describe_crash(ended, is_stopping=bool(relay.received))
    step = find_last_activity(run).step
    return code, Crash(step, reason, ended.last_lines, _find_stacks(run, code, started))


def _describe_crash(ended: ChildExit, *, is_stopping: bool) -> str:
    last = next((line.strip() for line in reversed(ended.last_lines) if line.strip()), "")
    if ended.code == -signal.SIGKILL:
        # Sent by the kernel when memory is full, or by a scheduler after its grace period.
        return describe_exit(ended.code) + (" after it was asked to stop" if is_stopping else " (out of memory?)")
    if ended.code == exit_codes.HUNG:
        reports = (line for line in reversed(ended.last_lines) if "has made no progress" in line)
        return f"it hung: {next(reports, last).removeprefix('gptmill: ')}"
    return describe_exit(ended.code) + (f": {last}" if last and ended.code > 0 else "")


def _find_stacks(run: RunDirectory, code: int, started: float) -> Path | None:
    """Returns the file with the child's stack traces, if it hung."""
    # The clocks of the file system and of this machine may differ slightly.
    files = [path for path in run.path.glob("hang_*.txt") if path.stat().st_mtime >= started - 1]
    return max(files, key=lambda path: path.stat().st_mtime) if files and code == exit_codes.HUNG else None


def _list_saves(run: RunDirectory) -> set[tuple[str, int]]:
    """Returns the checkpoints with their times, so that a step saved again counts as new."""
    saves = set()
    for path in run.checkpoints.glob("step_*"):
        with suppress(OSError):
            saves.add((path.name, path.stat().st_mtime_ns))
    return saves


def _read_name(word: str) -> str:
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""
