"""A parent that starts a run again when it crashes or hangs, and stops when starting again does not help.

Knows the run by its files and its exit code alone, and needs no torch: it must outlive what can go wrong with that.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from gptmill.config import exit_codes
from gptmill.config.durations import format_duration, parse_duration
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed
from gptmill.runs.history import append_event, find_last_sign, read_history
from gptmill.runtime.child import Ended, Relay, open_relay, run_child
from gptmill.runtime.signals import list_stop_signals

PROGRAM = (sys.executable, "-m", "gptmill", "train")
# How a run ends that would end so again.
LASTING_EXITS = frozenset({0, exit_codes.USER_ERROR, exit_codes.NOT_SAVED, exit_codes.TIME_UP, exit_codes.DIVERGED})
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_EQUAL_CRASHES = 3
# A log ends a step or two before the crash, not always the same.
EQUAL_STEPS = 2
SHOWN_LINES = 15
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Crash:
    """One end of the run that was not meant."""

    step: int
    reason: str
    last_lines: list[str]
    stacks: Path | None


@dataclass
class Crashes:
    """What the crashes so far have in common."""

    furthest_step: int = -1
    equal: int = 0
    """How many in a row came at one step."""
    pause_seconds: float = 0.0
    _step: int = -1

    def add(self, crash: Crash) -> None:
        """A run that has got further than ever before may start at once again; one that has not waits longer."""
        gets_on = crash.step > self.furthest_step
        is_equal = not gets_on and abs(crash.step - self._step) <= EQUAL_STEPS
        self.equal = self.equal + 1 if is_equal else 1
        self.pause_seconds = FIRST_PAUSE_SECONDS if gets_on else min(2 * self.pause_seconds, LONGEST_PAUSE_SECONDS)
        self.furthest_step = max(self.furthest_step, crash.step)
        self._step = crash.step


def supervise(
    arguments: list[str],
    run: RunDirectory,
    max_restarts: int,
    say: Callable[[str], None],
    program: Sequence[str] = PROGRAM,
) -> int:
    """Trains in a child process until that ends as it should, is asked to stop or crashes hopelessly: the exit code."""
    started, saves_before = time.monotonic(), _list_saves(run)
    crashes = Crashes()
    command = _drop_own_flags(arguments)
    with open_relay() as relay:
        for restarts in count():
            begun = time.time()
            code, crash = _train([*program, *command], run, relay)
            if crash is None:
                return code
            if run.path.is_dir() and not _has_told(run, begun):
                append_event(run, RunCrashed(crash.step, crash.reason))
            if relay.asked:
                return code
            crashes.add(crash)
            if crashes.equal >= MAX_EQUAL_CRASHES:
                say(describe_repetition(crash, crashes.equal, run))
                return exit_codes.FAILED
            if restarts == max_restarts:
                say(_describe_end(f"the run crashed {restarts + 1} times, at last after step {crash.step:,}", crash))
                return exit_codes.FAILED
            say(
                f"the run crashed after step {crash.step:,} ({crash.reason}); starting it again in "
                f"{crashes.pause_seconds:.0f} s, restart {restarts + 1} of at most {max_restarts}"
            )
            if relay.wait(crashes.pause_seconds):
                break
            has_saved = bool(_list_saves(run) - saves_before)
            command = make_restart_arguments(arguments, has_saved, time.monotonic() - started)
            if not command:
                return exit_codes.TIME_UP
    return 128 + relay.asked


def make_restart_arguments(arguments: list[str], has_saved: bool, seconds_gone: float) -> list[str]:
    """What to start the run with after a crash; nothing if its time is up.

    A run that was to go on from a step of its past, or from another place, does so until it has saved once: its
    newest checkpoint until then is of the time that was given up.
    """
    kept = _drop_own_flags(arguments)
    resume = find_value(kept, "resume")
    if has_saved or resume in (None, "latest"):
        kept = [*drop_flags(kept, {"resume": True}), "--resume", "auto"]
    limit = find_value(kept, "time_limit")
    if limit is not None:
        left = parse_duration(limit) - seconds_gone
        if left < 1:
            return []
        kept = [*drop_flags(kept, {"time_limit": True}), "--time_limit", format_duration(int(left))]
    return kept


def _has_told(run: RunDirectory, since: float) -> bool:
    """Whether the child has written itself what went wrong."""
    last = read_history(run)[-1:]
    return bool(last) and isinstance(last[0], RunCrashed) and last[0].time >= since


def _drop_own_flags(arguments: list[str]) -> list[str]:
    return drop_flags(arguments, {"supervise": False, "max_restarts": True})


def drop_flags(arguments: list[str], flags: dict[str, bool]) -> list[str]:
    """The arguments without some flags, each given with whether it takes a value."""
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
    """The value that counts, which is the last one given."""
    found = None
    for word, following in pairwise([*arguments, ""]):
        if _read_name(word) == flag:
            found = word.partition("=")[2] if "=" in word else following
    return found


def describe_repetition(crash: Crash, times: int, run: RunDirectory) -> str:
    """Why it is useless to start the run again, and where to look."""
    folder = shlex.quote(str(run.path))
    advice = [
        "It would crash there again. What to look at:",
        f"  the data of the next step: gptmill data show --run {folder} --step {crash.step + 1}",
        "  memory: that of the GPU (a smaller mini_batch_size needs less) and that of the machine",
        f"  the life of the run: gptmill checkpoints ledger {folder}",
    ]
    return "\n".join(
        [_describe_end(f"the run crashed {times} times in a row after step {crash.step:,}", crash), *advice]
    )


def _describe_end(what: str, crash: Crash) -> str:
    lines = [f"{what} ({crash.reason}); it is not started again"]
    if crash.last_lines:
        lines += ["The last it said:", *(f"  {line}" for line in crash.last_lines[-SHOWN_LINES:])]
    if crash.stacks is not None:
        lines.append(f"What every thread was doing when it hung: {crash.stacks}")
    return "\n".join(lines)


def _train(command: list[str], run: RunDirectory, relay: Relay) -> tuple[int, Crash | None]:
    """Runs the child to its end: its exit code, and its crash if it was one."""
    started = time.time()
    ended = run_child(command, relay)
    numbers = {int(number) for number in list_stop_signals()}
    code = ended.code if ended.code >= 0 else 128 - ended.code
    if code in LASTING_EXITS or code - 128 in numbers:
        return code, None  # also one that was asked to stop before it could listen
    if sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)  # the live display had hidden it
        sys.stdout.flush()
    reason = _describe_exit(ended, relay.asked)
    return code, Crash(find_last_sign(run).step, reason, ended.last_lines, _find_stacks(run, code, started))


def _describe_exit(ended: Ended, asked: int) -> str:
    last = next((line.strip() for line in reversed(ended.last_lines) if line.strip()), "")
    if ended.code == -signal.SIGKILL:
        # The kernel's way out of a full memory; a scheduler's, once it has asked in vain.
        return f"killed by SIGKILL {'after it was asked to stop' if asked else '(out of memory?)'}"
    if ended.code < 0:
        known = {int(number): number.name for number in signal.Signals}
        return f"killed by {known.get(-ended.code, f'signal {-ended.code}')}"
    if ended.code == exit_codes.HUNG:
        told = (line for line in reversed(ended.last_lines) if "has made no progress" in line)
        return f"it hung: {next(told, last).removeprefix('gptmill: ')}"
    return f"exit code {ended.code}: {last}" if last else f"exit code {ended.code}"


def _find_stacks(run: RunDirectory, code: int, started: float) -> Path | None:
    """The file in which the child left its stacks, if it hung."""
    # The clocks of a file system and of this machine may differ a little.
    files = [path for path in run.path.glob("hang_*.txt") if path.stat().st_mtime >= started - 1]
    return max(files, key=lambda path: path.stat().st_mtime) if files and code == exit_codes.HUNG else None


def _list_saves(run: RunDirectory) -> set[tuple[str, int]]:
    """Checkpoints as they are now: a step that is saved again is another one."""
    saves = set()
    for path in run.checkpoints.glob("step_*"):
        with suppress(OSError):
            saves.add((path.name, path.stat().st_mtime_ns))
    return saves


def _read_name(word: str) -> str:
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""
