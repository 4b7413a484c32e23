"""`gptmill train --budget` beside eight hand-chosen settings and the classic recipe, all with the same time.

    python benchmarks/budget.py --books books.txt.xz --shakespeare input.txt [--corpora shakespeare python] \
        [--minutes 1 4 15] [--settings 8] [--work runs/budget]

Python's standard library needs no file. Every run is a process of its own on the same text, without ten held-out pieces
and has the same seconds for everything: preparing, measuring, training, evaluating. Hand-chosen settings are
paced like the budget's own, so that their decay is done; the classic recipe, shakespeare-char-cpu, is cut off by its
time limit. All models are scored on the same held-out text, in bits per byte. Prints a Markdown table, row by row, and
exits with 1 if the budget's loss is not within 1 % of the best setting, or not below the classic recipe's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from texts import CORPORA, write_texts

WITHIN = 1.01
GRACE_SECONDS = 120
HAND_CHOSEN = (
    "--tokenizer byte --num_layers 2 --embd_size 64",
    "--tokenizer byte --num_layers 4 --embd_size 128",
    "--tokenizer byte --num_layers 6 --embd_size 192",
    "--num_layers 2 --embd_size 64",
    "--num_layers 3 --embd_size 96",
    "--num_layers 4 --embd_size 128",
    "--num_layers 6 --embd_size 192",
    "--num_layers 4 --embd_size 128 --optimizer adamw",
)
CLASSIC = "shakespeare-char-cpu --tokenizer byte --max_steps 1000000 --warmup_steps 100 --sample_tokens 0"


@dataclass(frozen=True)
class Row:
    """One run: what it reached, and how long it took."""

    name: str
    bits_per_byte: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="text of books, may be .xz")
    parser.add_argument("--shakespeare", help="input.txt")
    parser.add_argument("--corpora", nargs="+", default=CORPORA)
    parser.add_argument("--minutes", nargs="+", type=float, default=[1.0, 4.0, 15.0])
    parser.add_argument("--settings", type=int, default=len(HAND_CHOSEN), help="how many hand-chosen settings to try")
    parser.add_argument("--work", default="runs/budget", help="folder for texts and runs")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    print("| corpus | budget | setting | bits per byte | seconds |\n|---|---:|---|---:|---:|")
    is_good = True
    for corpus in options.corpora:
        write_texts(work, corpus, getattr(options, corpus, None))
        for minutes in options.minutes:
            rows = measure(corpus, minutes, options.settings, work)
            is_good = judge(rows) and is_good
    return 0 if is_good else 1


def measure(corpus: str, minutes: float, settings: int, work: Path) -> list[Row]:
    """All rows of a corpus and a budget; the budget's own is the first, the classic recipe's the last."""
    seconds = round(60 * minutes)
    budget = f"--budget {seconds}s --corpus {corpus}.txt"
    calls = {"budget": budget, **{setting: f"{budget} {setting}" for setting in HAND_CHOSEN[:settings]}}
    calls["classic"] = f"{CLASSIC} --time_limit {seconds}s --corpus {corpus}.txt --data_dir data/{corpus}-classic"
    rows = []
    for number, (name, words) in enumerate(calls.items()):
        row = run(name, f"{corpus}-{seconds}s-{number}", words, corpus, seconds, work)
        rows.append(row)
        print(f"| {corpus} | {seconds} s | {name} | {row.bits_per_byte:.4f} | {row.seconds:.1f} |", flush=True)
    return rows


def run(name: str, run_name: str, words: str, corpus: str, seconds: float, work: Path) -> Row:
    """Trains in a process of its own and scores the model; not a number if that fails."""
    command = [sys.executable, "-m", "gptmill"]
    started = time.monotonic()
    call = [*command, "train", *words.split(), "--run_name", run_name]
    done = subprocess.run(call, cwd=work, capture_output=True, text=True, timeout=seconds + GRACE_SECONDS, check=False)
    taken = time.monotonic() - started
    text = f"{corpus}_val.txt"
    scores = subprocess.run(
        [*command, "eval", run_name, "--text", text, "--json", f"{run_name}.json"],
        cwd=work, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if scores.returncode:
        print(f"{name}: {(done.stderr + scores.stderr).strip()[-300:]}", file=sys.stderr)
        return Row(name, math.nan, taken)
    return Row(name, read_bits(work / f"{run_name}.json"), taken)


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
    own, *chosen, classic = rows
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
