"""Damage to a file of a run or of its corpus is noticed, or changes nothing: its time stays the same, as on a bad disk.

A short version belongs to every test run; the long one, hundreds of damages, is behind the marker `torture`.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import GptMill

from gptmill.data.shards.shard_manifest import NAMES_NAME
from gptmill.data.shards.verification import verify_corpus

pytestmark = pytest.mark.slow
RESUMED = 32
# And where what belongs to the steps after that begins.
LOGS = {"runs/straight/events.jsonl": b'{"event": "StepLogged", "step": 33', "runs/straight/log.txt": b"33 train"}
CORPUS = (
    "manifest.json",
    "train_000000.npy",
    "val_000000.npy",
    "documents/train_000000.npy",
    "documents/val_000000.npy",
)
ORIGINS = (f"origins/{NAMES_NAME}", "origins/train_000000.npy", "origins/val_000000.npy")
EVENTS, LOG = LOGS
NUMBERS = re.compile(rb'{"event": "(?:StepLogged|EvalDone|SampleDrawn)", "step": (\d+),')


def flip(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)) :]


def zero(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    end = min(len(content), start + 512)
    content[start:end] = bytes(end - start)


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, truncate, zero)


class Patient:
    """The run `straight`, resumed from a checkpoint after damage to one file, and compared with what it was."""

    def __init__(self, folder: Path, gptmill: GptMill) -> None:
        self._folder, self._gptmill = folder, gptmill
        self._whole = folder / "whole"
        shutil.copytree(folder / "runs/straight", folder / "reference", symlinks=True)
        for name, later in LOGS.items():
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(content[: content.index(later)])
        for name in ("runs", "words"):
            shutil.copytree(folder / name, self._whole / name, symlinks=True)

    def damage(self, name: str, hurt: Callable[[bytearray, random.Random], None], seed: str) -> str:
        """Damages a file and uses it: "refused", "warned", "harmless", or what went wrong."""
        for part in ("runs", "words"):
            shutil.rmtree(self._folder / part)
            shutil.copytree(self._whole / part, self._folder / part, symlinks=True)
        path = self._folder / name
        content, status = path.read_bytes(), path.stat()
        damaged = bytearray(content)
        hurt(damaged, random.Random(seed))
        path.write_bytes(damaged)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if damaged == content:
            return "harmless"
        if "origins" in name:
            problems = verify_corpus(self._folder / "words", lambda *_: None)
            return "refused" if any(str(path) in problem for problem in problems) else "called valid"
        return self._resume(path)

    def _resume(self, path: Path) -> str:
        process = self._gptmill("train", "--run_name", "straight", "--resume", str(RESUMED), check=False)
        if "Traceback" in process.stderr or process.returncode not in (0, 2):
            return f"failed with {process.returncode}: {process.stderr[-1000:]}"
        if process.returncode == 2:
            return "refused" if path.name in process.stderr or "words" in process.stderr else process.stderr
        runs = [self._folder / "reference", self._folder / "runs/straight"]
        for name in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "log.txt"):
            if len({(run / name).read_bytes() for run in runs}) > 1:
                return f"{name} differs"
        if f"{path.name} is damaged" in process.stdout + process.stderr:
            return "warned" if path.with_name(f"{path.name}.damaged").exists() else "warned, but no copy was kept"
        return "harmless" if read_numbers(runs[0]) == read_numbers(runs[1]) else "events.jsonl differs"


def read_numbers(run: Path) -> list[bytes]:
    """The lines of what was trained and evaluated before the resume."""
    lines = (run / "events.jsonl").read_bytes().splitlines()
    return [line for line in lines if (found := NUMBERS.match(line)) is not None and int(found[1]) <= RESUMED]


@pytest.fixture
def patient(straight: Path, tmp_path: Path, gptmill: GptMill) -> Patient:
    assert straight.is_dir()
    return Patient(tmp_path, gptmill)


@pytest.mark.parametrize(
    ("name", "hurt", "outcome"),
    [
        (EVENTS, zero, "warned"),
        (EVENTS, flip, "warned"),
        (LOG, truncate, "warned"),
        ("words/train_000000.npy", flip, "refused"),
        ("words/documents/val_000000.npy", zero, "refused"),
    ],
)
def test_damage_is_noticed_and_a_run_goes_on_where_it_can(
    patient: Patient, name: str, hurt: Callable[[bytearray, random.Random], None], outcome: str
) -> None:
    assert patient.damage(name, hurt, "1") == outcome


@pytest.mark.torture
def test_all_damage_is_noticed_or_harmless(patient: Patient) -> None:
    outcomes = {
        (name, hurt.__name__): Counter(patient.damage(name, hurt, f"{hurt.__name__} {seed}") for seed in range(12))
        for name in [*LOGS, *(f"words/{name}" for name in (*CORPUS, *ORIGINS))]
        for hurt in DAMAGES
    }
    for (name, damage), counts in outcomes.items():
        print(f"{name:32} {damage:9} {dict(counts)}")  # noqa: T201
    assert {outcome for counts in outcomes.values() for outcome in counts} <= {"refused", "warned", "harmless"}
