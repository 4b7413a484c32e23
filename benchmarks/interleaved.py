"""Interleaved A/B comparison of several checkouts on one GPU: GPUs of one model differ by more than most changes do.

    python benchmarks/interleaved.py OLD NEW ... --data_dir DIR [--row "124M bf16"] [--rounds 2]

Each round measures every checkout once, by its own benchmarks/gpt2_speed.py and its own code. The checkouts share the
compile cache and the GEMM autotuning cache. Prints tokens/s of each round, the means, and their ratio to the first.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import check_corpus, make_absolute, run_guarded

from gptmill.config.errors import UserError

BENCHMARK = Path("benchmarks") / "gpt2_speed.py"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the speed of checkouts, interleaved on one GPU.")
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--data_dir", required=True, help="a corpus that gptmill prepare made with GPT-2's tokenizer")
    parser.add_argument("--row", default="124M bf16", help="row of gpt2_speed.py to measure")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each checkout")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be at least 1")
    for checkout in options.checkouts:
        if not (checkout / BENCHMARK).is_file():
            parser.error(f"{checkout} is not a checkout of gptmill: it has no {BENCHMARK}")
    try:
        check_corpus(options.data_dir)
    except UserError as error:
        parser.error(str(error))
    speeds: list[list[float]] = [[] for _ in options.checkouts]
    print(f"| round | {' | '.join(str(checkout) for checkout in options.checkouts)} |")
    print(f"|---|{'---:|' * len(options.checkouts)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(1, options.rounds + 1):
            for number, checkout in enumerate(options.checkouts):
                logdir = Path(folder) / f"{round_number}_{number}"
                speeds[number].append(measure(checkout, options.row, make_absolute(options.data_dir), logdir))
            print(f"| {round_number} | {' | '.join(f'{found[-1]:,.0f}' for found in speeds)} |", flush=True)
    means = [statistics.fmean(found) for found in speeds]
    print(f"| mean, ratio to the first | {' | '.join(f'{mean:,.0f}, {mean / means[0]:.4f}' for mean in means)} |")
    return 0


def measure(checkout: Path, row: str, data_dir: str, logdir: Path) -> float:
    """Returns the tokens/s of one row."""
    words = [str(checkout / BENCHMARK), "--data_dir", data_dir, "--rows", row, "--logdir", str(logdir)]
    paths = os.pathsep.join(filter(None, (str((checkout / "src").resolve()), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    return read_speed(process.stdout + process.stderr, row)


def read_speed(output: str, row: str) -> float:
    """Parses the tokens/s of a row from the output of gpt2_speed.py; raises UserError if there is none."""
    found = re.search(rf"^\| {re.escape(row)} \| \d+ \| ([\d,]+) \|", output, re.MULTILINE)
    if found is None:
        raise UserError(f"gpt2_speed.py measured no speed of {row}: {output.strip()[-500:]}")
    return float(found[1].replace(",", ""))


if __name__ == "__main__":
    sys.exit(run_guarded(main))
