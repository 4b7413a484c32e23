"""A killed preparation resumes and writes the same bytes as an uninterrupted one."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

KILLS = 10
# Small chunks and a journal after each, so that a short corpus has many moments to be killed at.
DRIVER = """
import sys
from gptmill.config.requests import CleaningOptions, PrepareRequest
from gptmill.data.pipeline import chunks, corpus_writer
from gptmill.data.prepare import prepare_corpus
from gptmill.data.sources import parts

chunks.CHUNK_BYTES, corpus_writer.JOURNAL_SECONDS = 4000, 0.0
parts.SMALL_FILE_BYTES, parts.PART_BYTES = 10_000, 6000
if __name__ == "__main__":
    out, processes, *inputs = sys.argv[1:]
    cleaning = CleaningOptions(drop_duplicates=True, min_chars=30)
    request = PrepareRequest(
        out=out, shard_tokens=7000, processes=int(processes), val_fraction=0.1, split="documents", cleaning=cleaning
    )
    prepare_corpus(inputs, request, lambda progress: print(progress.text_bytes, flush=True))
"""


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """A long stream, lines that are read in parts, and many small files, with duplicates across them."""
    generator = random.Random(1)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    texts = [" ".join(generator.choices(words, k=generator.randrange(1, 120))) for _ in range(600)]
    texts += generator.choices(texts, k=80)
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "stream.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "lines.jsonl").write_text(lines.upper().replace('"TEXT"', '"text"'), encoding="utf-8")
    (tmp_path / "small").mkdir()
    for number, text in enumerate(texts[:60]):
        (tmp_path / "small" / f"{number:03d}.txt").write_text(text + f" {number % 50}", encoding="utf-8")
    return [str(tmp_path / name) for name in ("stream.jsonl.gz", "lines.jsonl", "small")]


def start(folder: Path, out: Path, corpus: list[str], processes: int = 2) -> subprocess.Popen[str]:
    driver = folder / "driver.py"
    driver.write_text(DRIVER, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(driver), str(out), str(processes), *corpus],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPTMILL_TEST_FAMILY": str(folder)},
    )


def finish(process: subprocess.Popen[str]) -> list[int]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [int(line) for line in output.split()]


def read_all(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def list_family(folder: Path) -> list[int]:
    """Processes that were started by `start`, and their children, whoever their parent is now."""
    mark = f"GPTMILL_TEST_FAMILY={folder}".encode()
    return [int(process.name) for process in _list_processes() if mark in _read_environment(process)]


def _list_processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _read_environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def test_killed_ten_times_it_gives_the_same_bytes(tmp_path: Path, corpus: list[str]) -> None:
    reports = finish(start(tmp_path, tmp_path / "whole", corpus, processes=1))
    assert len(reports) > 2 * KILLS
    generator = random.Random(7)
    done = 0
    for _ in range(KILLS):
        process = start(tmp_path, tmp_path / "killed", corpus)
        assert process.stdout is not None
        for _ in range(generator.randrange(1, 5)):
            done = int(process.stdout.readline())
        time.sleep(generator.random() / 50)  # anywhere in the work that follows a report
        process.kill()
        process.communicate()
    assert not (tmp_path / "killed").exists()
    assert 0 < done < reports[-1], "it was never killed in the middle"
    rest = finish(start(tmp_path, tmp_path / "killed", corpus))
    assert rest[0] > reports[KILLS // 2], "it started over instead of resuming"
    assert read_all(tmp_path / "killed") == read_all(tmp_path / "whole")
    assert not (tmp_path / "killed.partial").exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_a_preparation(tmp_path: Path, corpus: list[str], end: signal.Signals) -> None:
    process = start(tmp_path, tmp_path / "out", corpus)
    assert process.stdout is not None
    process.stdout.readline()
    assert len(list_family(tmp_path)) >= 3
    process.send_signal(end)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while list_family(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list_family(tmp_path)
