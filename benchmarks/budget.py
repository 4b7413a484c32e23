"""`gptmill train --budget` beside eight hand-chosen settings and the classic recipe, all with the same time.

    python benchmarks/budget.py --books books.txt.xz --shakespeare input.txt [--corpora shakespeare python] \
        [--minutes 1 4 15] [--device cpu] [--jobs 2] [--rows 0 6 7] [--rounds 3] [--flags="--no_compile"]

Python's standard library needs no file. Every run is a process of its own on the same text, without ten held-out
pieces, and has the same seconds for everything: preparing, measuring, training, evaluating. Hand-chosen settings are
paced like the budget's own, so that their decay is done; the classic recipe, shakespeare-char or on a CPU
shakespeare-char-cpu, is cut off by its time limit. All models are scored on the same held-out text, in bits per byte.
With --jobs, runs are trained side by side: on a CPU each on a core of its own; on a GPU they take turns, so that each
does fewer steps than it would alone. Row 0 is the budget's own choice, 1 the classic recipe, and the others are the
settings; --rows leaves out the rest. With --rounds, all of them are trained several times, by turns and each time with
another seed, and the means are compared: single short runs differ by up to 2 %. A run that is finished in the folder
--work is kept, so that a benchmark that was stopped goes on. Prints a Markdown table, run by run, and exits with 1 if
the budget's loss is not within 1 % of the best setting, or not below the classic recipe's, as far as these are among
the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from budget_results import CLASSIC, OWN, RUN_NAME, find_run
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
CLASSIC_RECIPE = {"cpu": "shakespeare-char-cpu", "cuda": "shakespeare-char"}
CLASSIC_FLAGS = "--tokenizer byte --max_steps 1000000 --warmup_steps 100 --sample_tokens 0 --data_dir data/classic"


@dataclass(frozen=True)
class Call:
    """One run to be: what gptmill is called with."""

    corpus: str
    budget: int
    """Seconds."""
    number: int
    """Of its row."""
    name: str
    words: str
    round: int = 1

    @property
    def folder(self) -> str:
        again = "" if self.round == 1 else f"-r{self.round}"
        return f"{self.corpus}-{self.budget}s{again}-{self.number}"


@dataclass(frozen=True)
class Row:
    """One run: what it reached, and how long it took."""

    corpus: str
    budget: int
    number: int
    name: str
    bits_per_byte: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="text of books, may be .xz")
    parser.add_argument("--shakespeare", help="input.txt")
    parser.add_argument("--corpora", nargs="+", default=CORPORA, choices=CORPORA)
    parser.add_argument("--minutes", nargs="+", type=float, default=[1.0, 4.0, 15.0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=tuple(HAND_CHOSEN))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--rows", nargs="+", type=int, default=range(10), choices=range(10), help="rows to try (all)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each row is trained")
    parser.add_argument("--flags", default="", help="more flags for all runs, in quotes")
    parser.add_argument("--work", default="runs/budget", help="folder for texts and runs")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    for corpus in {*options.corpora} & {"books", "shakespeare"}:
        if not (work / f"{corpus}.txt").exists() and not Path(getattr(options, corpus) or "none").is_file():
            parser.error(f"no text for {corpus}: name its file with --{corpus}, or leave {corpus} out of --corpora")
    work.mkdir(parents=True, exist_ok=True)
    print("| corpus | budget | row | setting | bits per byte | seconds |\n|---|---:|---:|---|---:|---:|")
    for corpus in options.corpora:
        write_texts(work, corpus, getattr(options, corpus, None))
    tables = [
        [
            call
            for number in range(1, options.rounds + 1)
            for call in list_calls(corpus, round(60 * minutes), options.device, number)
            if call.number in options.rows
        ]
        for minutes in options.minutes
        for corpus in options.corpora
    ]
    with Machine(options.device, options.jobs, options.flags, work) as machine:
        waiting = [[machine.submit(call) for call in calls] for calls in tables]
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

    def submit(self, call: Call) -> Future[Row]:
        """Trains in a process of its own, when it is its turn, and scores the model; not a number if that fails."""
        return self._pool.submit(self._obtain, call)

    def _obtain(self, call: Call) -> Row:
        """The row as it was measured before, or else now."""
        folder = self.work / call.folder
        kept = folder / "row.json"
        if kept.exists():
            return Row(**json.loads(kept.read_text(encoding="utf-8")))
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        folder.mkdir()
        row = self._run(call, folder)
        if not math.isnan(row.bits_per_byte):
            kept.write_text(json.dumps(asdict(row)), encoding="utf-8")
        return row

    def _run(self, call: Call, folder: Path) -> Row:
        cores = self._cores.get()
        try:
            started = time.monotonic()
            training = ["train", *call.words.split(), "--run_name", RUN_NAME, *self._flags]
            trained = self._call(training, folder, cores, call.budget + GRACE_SECONDS)
            taken = time.monotonic() - started
            scoring = ["eval", find_run(trained.stdout), "--text", f"../{call.corpus}_val.txt", "--json", "scores.json"]
            scored = self._call(scoring, folder, cores, EVAL_SECONDS)
        finally:
            self._cores.put(cores)
        (folder / "output.txt").write_text(trained.stdout + trained.stderr, encoding="utf-8")
        if scored.returncode:
            print(f"{call.name}: {(trained.stderr + scored.stderr).strip()[-300:]}", file=sys.stderr)
        bits = math.nan if scored.returncode else read_bits(folder / "scores.json")
        return Row(call.corpus, call.budget, call.number, call.name, bits, taken)

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


def list_calls(corpus: str, seconds: int, device: str, round_number: int) -> list[Call]:
    """All rows of a corpus and a budget; the first round has the seed that users have."""
    text = f"--corpus ../{corpus}.txt" + (f" --seed {round_number}" if round_number > 1 else "")
    budget, classic = f"--budget {seconds}s {text}", f"{CLASSIC_RECIPE[device]} {CLASSIC_FLAGS}"
    calls = {"budget": budget, "classic": f"{classic} --time_limit {seconds}s {text}"}
    calls |= {setting: f"{budget} {setting}" for setting in HAND_CHOSEN[device]}
    return [
        Call(corpus, seconds, number, name, words, round_number) for number, (name, words) in enumerate(calls.items())
    ]


def finish(waiting: list[Future[Row]]) -> list[Row]:
    """Prints each row as it comes."""
    rows = []
    for future in waiting:
        row = future.result()
        rows.append(row)
        start = f"| {row.corpus} | {row.budget} s | {row.number} | {row.name}"
        print(f"{start} | {row.bits_per_byte:.4f} | {row.seconds:.1f} |", flush=True)
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
    losses = {row.number: fmean(each.bits_per_byte for each in rows if each.number == row.number) for row in rows}
    names = {row.number: row.name for row in rows}
    if len(rows) > len(losses):
        for number, loss in losses.items():
            print(f"| | | {number} | mean of {names[number]} | {loss:.4f} | |", flush=True)
    own, classic = losses.pop(OWN, None), losses.pop(CLASSIC, math.inf)
    settings = {number: loss for number, loss in losses.items() if not math.isnan(loss)}
    if own is None or not settings:
        print("| | | | nothing to compare | | |", flush=True)
        return own is None
    best = min(settings, key=lambda number: settings[number])
    print(f"| | | | budget against the best, {names[best]} | {own / settings[best] - 1:+.2%} | |", flush=True)
    return own <= WITHIN * settings[best] and own < classic


if __name__ == "__main__":
    sys.exit(main())
