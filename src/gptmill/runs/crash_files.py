"""Why ranks ended: a text file per crash in the run's folder, its first line a sentence, with the stacks below.

Does not import torch, so that readers of a run need none.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from gptmill.config.regular_files import read_regular
from gptmill.runs.directory import RunDirectory

PATTERN = "crash_step_*_rank_*.txt"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
TIME_CHARS = len("2026-01-01 00:00:00 ")
MAX_SENTENCE = 1000


def write_crash(run: RunDirectory, rank: int, step: int, sentence: str, stacks: str) -> Path | None:
    """The file; None where the folder is not there, as on a machine that does not share it, or cannot be written.

    A later crash of the rank at the same step, as of a run that was resumed, has a number after its name.
    """
    stem = f"crash_step_{step:06d}_rank_{rank:05d}"
    names = chain([stem], (f"{stem}_{number}" for number in count(2)))
    path = next(path for name in names if not os.path.lexists(path := run.path / f"{name}.txt"))
    with suppress(OSError):
        path.write_text(f"{time.strftime(TIME_FORMAT)} {' '.join(sentence.split())}\n\n{stacks}", encoding="utf-8")
        return path
    return None


def has_crash(run: RunDirectory, rank: int, since: float) -> bool:
    """Whether a crash of the rank was written after that time."""
    return any(_read_time(path) >= since for path in run.path.glob(f"crash_step_*_rank_{rank:05d}[._]*"))


def find_crash_sentence(run: RunDirectory, since: float) -> str:
    """What the first crash after that time says; empty if there is none."""
    paths = [path for path in run.path.glob(PATTERN) if _read_time(path) >= since]
    for path in sorted(paths, key=_read_time):
        with suppress(OSError):
            first = read_regular(path).decode(errors="replace").partition("\n")[0]
            return f"{first[TIME_CHARS:][:MAX_SENTENCE]} ({path.name})"
    return ""


def _read_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
