"""A killed preparation resumes and writes the same bytes as an uninterrupted one."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import Start
from zygote import Process

from gptmill.data.shards.shard_manifest import read_manifest

KILLS = 5
# Small chunks and a journal after each, so that a short corpus has many moments to be killed at.
DRIVER = """
import sys
from gptmill.config.requests import CleaningOptions, PrepareRequest, ReadingOptions
from gptmill.data.pipeline import chunks, corpus_writer
from gptmill.data.prepare import prepare_corpus
from gptmill.data.sources import parts

chunks.CHUNK_BYTES, corpus_writer.JOURNAL_SECONDS = 4000, 0.0
parts.SMALL_FILE_BYTES, parts.PART_BYTES = 10_000, 6000
if __name__ == "__main__":
    out, processes, *inputs = sys.argv[1:]
    cleaning = CleaningOptions(drop_duplicates=True, min_chars=30)
    request = PrepareRequest(
        out=out,
        shard_tokens=7000,
        processes=int(processes),
        val_fraction=0.1,
        split="documents",
        cleaning=cleaning,
        reading=ReadingOptions(on_error="skip"),
    )
    prepare_corpus(inputs, request, lambda progress: print(progress.text_bytes, flush=True))
"""


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """A long stream, lines that are read in parts, and many small files, with duplicates and errors across them."""
    generator = random.Random(1)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    texts = [" ".join(generator.choices(words, k=generator.randrange(1, 120))) for _ in range(600)]
    texts += generator.choices(texts, k=80)
    lines = "\n".join(
        json.dumps({"text": text}) + "\n{broken" * (number % 40 == 0) for number, text in enumerate(texts)
    )
    (tmp_path / "stream.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "lines.jsonl").write_text(lines.upper().replace('"TEXT"', '"text"'), encoding="utf-8")
    (tmp_path / "small").mkdir()
    for number, text in enumerate(texts[:60]):
        (tmp_path / "small" / f"{number:03d}.txt").write_text(text + f" {number % 50}", encoding="utf-8")
    return [str(tmp_path / name) for name in ("stream.jsonl.gz", "lines.jsonl", "small")]


@pytest.fixture
def start_preparing(start: Start, tmp_path: Path, corpus: list[str]) -> Start:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER, encoding="utf-8")

    def run(out: Path, processes: int = 2) -> Process:
        return start(out, str(processes), *corpus, program=[str(driver)], stderr=2, leads_session=True)

    return run


def finish(process: Process) -> list[int]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [int(line) for line in output.split()]


def read_all(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def list_family(session: int) -> list[int]:
    """The process that leads the session, and its children, whoever their parent is now."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [number for number in numbers if _is_of_session(number, session)]


def _is_of_session(number: int, session: int) -> bool:
    try:
        state, _parent, _group, found = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return int(found) == session and state != "Z"


def wait_for_family(session: int) -> None:
    """Returns once no process of the session is left."""
    deadline = time.monotonic() + 30
    while list_family(session):
        assert time.monotonic() < deadline, "a worker outlives the preparation"
        time.sleep(0.01)


def test_killed_again_and_again_it_gives_the_same_bytes(tmp_path: Path, start_preparing: Start) -> None:
    reports = finish(start_preparing(tmp_path / "whole", processes=1))
    assert len(reports) > 2 * KILLS
    generator = random.Random(7)
    done = 0
    for _ in range(KILLS):
        process = start_preparing(tmp_path / "killed")
        assert process.stdout is not None
        for _ in range(generator.randrange(1, 5)):
            done = int(process.stdout.readline())
        time.sleep(generator.random() / 50)  # anywhere in the work that follows a report
        process.kill()
        process.communicate()
    assert not (tmp_path / "killed").exists()
    assert 0 < done < reports[-1], "it was never killed in the middle"
    rest = finish(start_preparing(tmp_path / "killed"))
    assert rest[0] > reports[KILLS // 2], "it started over instead of resuming"
    assert read_all(tmp_path / "killed") == read_all(tmp_path / "whole")
    assert read_manifest(tmp_path / "whole").defects["malformed"]["count"] == 2 * 17
    assert not (tmp_path / "killed.partial").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_a_preparation(tmp_path: Path, start_preparing: Start, end: signal.Signals) -> None:
    process = start_preparing(tmp_path / "out")
    assert process.stdout is not None
    process.stdout.readline()
    assert len(list_family(process.pid)) >= 3
    process.send_signal(end)
    process.communicate(timeout=60)
    wait_for_family(process.pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ctrl_c_while_the_workers_start_is_one_line(tmp_path: Path, start: Start) -> None:
    """The terminal sends the signal to the workers too, which may not have run a line of ours yet."""
    (tmp_path / "large.txt").write_bytes(b"some words " * 12_000_000)
    for delay in (0.0, 0.005, 0.02, 0.05, 0.1):
        options = ["--tokenizer", "char", "--processes", "3", "--out", "out"]
        process = start("prepare", "large.txt", *options, leads_session=True)
        while process.poll() is None and len(list_family(process.pid)) < 3:
            time.sleep(0.001)
        time.sleep(delay)
        assert process.poll() is None, "it was done before it could be interrupted"
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (130, "gptmill: interrupted\n"), delay
        wait_for_family(process.pid)


INTERRUPTED_SPAWN = """
import os, signal, sys, threading, time
from multiprocessing import util
from gptmill.cli.main import main

def spawn_and_interrupt(path, command, descriptors):
    number = spawn(path, command, descriptors)
    if not any("resource_tracker" in str(word) for word in command):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # the other thread takes the signal
    return number

spawn, util.spawnv_passfds = util.spawnv_passfds, spawn_and_interrupt
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sys.exit(main())
"""


@pytest.mark.skipif(os.name == "nt", reason="starts processes in another way")
def test_ctrl_c_between_the_start_of_a_worker_and_its_orders_is_one_line(tmp_path: Path, start: Start) -> None:
    """The process has other threads, which do not block the signal; a worker without orders prints a traceback."""
    (tmp_path / "words.txt").write_bytes(b"some words " * 1000)
    options = ["--tokenizer", "char", "--processes", "2", "--out", "out"]
    process = start("prepare", "words.txt", *options, program=("-c", INTERRUPTED_SPAWN), leads_session=True)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "gptmill: interrupted\n")
