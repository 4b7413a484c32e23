"""`gptmill train --budget` beside eight hand-chosen settings and the classic recipe, all with the same time.

    python benchmarks/budget.py --books books.txt.xz --shakespeare input.txt [--corpora shakespeare python] \
        [--minutes 1 4 15] [--device cpu] [--jobs 2] [--settings 3 4 5 6] [--flags="--no_compile"]

Python's standard library needs no file. Every run is a process of its own on the same text, without ten held-out
pieces, and has the same seconds for everything: preparing, measuring, training, evaluating. Hand-chosen settings are
paced like the budget's own, so that their decay is done; the classic recipe, shakespeare-char or on a CPU
shakespeare-char-cpu, is cut off by its time limit. All models are scored on the same held-out text, in bits per byte.
With --jobs, runs are trained side by side: on a CPU each on a core of its own; on a GPU they take turns, so that each
does fewer steps than it would alone. Prints a Markdown table, row by row, and exits with 1 if the budget's loss is not
within 1 % of the best setting, or not below the classic recipe's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from budget_results import RUN_NAME, find_run
from texts import CORPORA, write_texts

WITHIN = 1.01
GRACE_SECONDS, EVAL_SECONDS = 120, 600
HAND_CHOSEN = {
    "cpu": (
        "--tokenizer byte --num_layers 2 --embd_size 64",
        "--tokenizer byte --num_layers 4 --embd_size 128",
        "--tokenizer byte --num_layers 6 --embd_size 192",
        "--num_layers 2 --embd_size 64",
        "--num_layers 3 --embd_size 96",
        "--num_layers 4 --embd_size 128",
        "--num_layers 6 --embd_size 192",
        "--num_layers 4 --embd_size 128 --optimizer adamw",
    ),
    "cuda": (
        "--tokenizer byte --num_layers 6 --embd_size 384",
        "--tokenizer byte --num_layers 8 --embd_size 512",
        "--num_layers 4 --embd_size 128",
        "--num_layers 6 --embd_size 192",
        "--num_layers 6 --embd_size 384",
        "--num_layers 8 --embd_size 512",
        "--num_layers 12 --embd_size 768",
        "--num_layers 6 --embd_size 384 --optimizer adamw",
    ),
}
CLASSIC = {"cpu": "shakespeare-char-cpu", "cuda": "shakespeare-char"}
CLASSIC_FLAGS = "--tokenizer byte --max_steps 1000000 --warmup_steps 100 --sample_tokens 0 --data_dir data/classic"


@dataclass(frozen=True)
class Row:
    """One run: what it reached, and how long it took."""

    corpus: str
    budget: int
    """Seconds."""
    name: str
    bits_per_byte: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="text of books, may be .xz")
    parser.add_argument("--shakespeare", help="input.txt")
    parser.add_argument("--corpora", nargs="+", default=CORPORA)
    parser.add_argument("--minutes", nargs="+", type=float, default=[1.0, 4.0, 15.0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=tuple(CLASSIC))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--settings", nargs="+", type=int, help="numbers of the hand-chosen settings to try (all)")
    parser.add_argument("--flags", default="", help="more flags for all runs, in quotes")
    parser.add_argument("--work", default="runs/budget", help="folder for texts and runs")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    print("| corpus | budget | setting | bits per byte | seconds |\n|---|---:|---|---:|---:|")
    settings = HAND_CHOSEN[options.device]
    chosen = [settings[number] for number in options.settings or range(len(settings))]
    kinds = [(corpus, minutes) for minutes in options.minutes for corpus in options.corpora]
    for corpus in options.corpora:
        write_texts(work, corpus, getattr(options, corpus, None))
    with Machine(options.device, options.jobs, options.flags, work) as machine:
        waiting = [measure(corpus, minutes, chosen, machine) for corpus, minutes in kinds]
        verdicts = [judge(rows) for rows in map(finish, waiting)]
    return 0 if all(verdicts) else 1


class Machine:
    """Trains on this machine, some runs side by side."""

    def __init__(self, device: str, jobs: int, flags: str, work: Path) -> None:
        self.device, self.work = device, work
        self._flags = flags.split()
        self._pool = ThreadPoolExecutor(jobs)
        self._cores: queue.Queue[set[int]] = queue.Queue()
        available = sorted(os.sched_getaffinity(0))
        for number in range(jobs):
            is_pinned = device == "cpu" and jobs > 1
            self._cores.put({available[number]} if is_pinned else set(available))

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, corpus: str, budget: int, name: str, run_name: str, words: str) -> Future[Row]:
        """Trains in a process of its own, when it is its turn, and scores the model; not a number if that fails."""
        return self._pool.submit(self._run, corpus, budget, name, run_name, words)

    def _run(self, corpus: str, budget: int, name: str, run_name: str, words: str) -> Row:
        folder, cores = self.work / run_name, self._cores.get()
        folder.mkdir()
        try:
            started = time.monotonic()
            training = ["train", *words.split(), "--run_name", RUN_NAME, *self._flags]
            trained = self._call(training, folder, cores, budget + GRACE_SECONDS)
            taken = time.monotonic() - started
            scoring = ["eval", find_run(trained.stdout), "--text", f"../{corpus}_val.txt", "--json", "scores.json"]
            scored = self._call(scoring, folder, cores, EVAL_SECONDS)
        finally:
            self._cores.put(cores)
        (folder / "output.txt").write_text(trained.stdout + trained.stderr, encoding="utf-8")
        if scored.returncode:
            print(f"{name}: {(trained.stderr + scored.stderr).strip()[-300:]}", file=sys.stderr)
        bits = math.nan if scored.returncode else read_bits(folder / "scores.json")
        return Row(corpus, budget, name, bits, taken)

    def _call(
        self, words: list[str], folder: Path, cores: set[int], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        command = ["taskset", "-c", ",".join(map(str, sorted(cores))), sys.executable, "-m", "gptmill"]
        # Not every build of torch counts the cores that it may run on.
        threads = {"OMP_NUM_THREADS": str(len(cores))} if self.device == "cpu" else {}
        environment = {**os.environ, **threads}
        return subprocess.run(
            [*command, *words, "--device", self.device],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip


def measure(corpus: str, minutes: float, chosen: list[str], machine: Machine) -> list[Future[Row]]:
    """Starts all rows of a corpus and a budget; the budget's own is the first, the classic recipe's the second."""
    seconds = round(60 * minutes)
    budget, classic = f"--budget {seconds}s --corpus ../{corpus}.txt", f"{CLASSIC[machine.device]} {CLASSIC_FLAGS}"
    calls = {"budget": budget, "classic": f"{classic} --time_limit {seconds}s --corpus ../{corpus}.txt"}
    calls |= {setting: f"{budget} {setting}" for setting in chosen}
    return [
        machine.submit(corpus, seconds, name, f"{corpus}-{seconds}s-{number}", words)
        for number, (name, words) in enumerate(calls.items())
    ]


def finish(waiting: list[Future[Row]]) -> list[Row]:
    """Prints each row as it comes."""
    rows = []
    for future in waiting:
        row = future.result()
        rows.append(row)
        print(
            f"| {row.corpus} | {row.budget} s | {row.name} | {row.bits_per_byte:.4f} | {row.seconds:.1f} |", flush=True
        )
    return rows


def read_bits(path: Path) -> float:
    """The bits per byte in the result of gptmill eval."""

    def find(value: object) -> float | None:
        if isinstance(value, dict):
            if "bits_per_byte" in value:
                found = value["bits_per_byte"]
                return float(found["value"] if isinstance(found, dict) else found)
            value = list(value.values())
        if isinstance(value, list):
            return next((found for item in value if (found := find(item)) is not None), None)
        return None

    return find(json.loads(path.read_text(encoding="utf-8"))) or math.nan


def judge(rows: list[Row]) -> bool:
    """Whether the budget's loss is within 1 % of the best hand-chosen one, and below the classic recipe's."""
    own, classic, *chosen = rows
    scored = [row for row in chosen if not math.isnan(row.bits_per_byte)]
    if not scored:
        print("| | | no hand-chosen setting was trained | | |", flush=True)
        return False
    best = min(scored, key=lambda row: row.bits_per_byte)
    difference = own.bits_per_byte / best.bits_per_byte - 1
    print(f"| | | budget against the best, {best.name} | {difference:+.2%} | |", flush=True)
    return own.bits_per_byte <= WITHIN * best.bits_per_byte and own.bits_per_byte < classic.bits_per_byte


if __name__ == "__main__":
    sys.exit(main())
