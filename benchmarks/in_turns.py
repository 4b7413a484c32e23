"""How fast several checkouts train on one GPU, in turns: cards differ by more than most changes do.

    python benchmarks/in_turns.py OLD NEW ... --data_dir DIR [--row "124M bf16"] [--turns 2]

Each checkout's own benchmarks/gpt2_speed.py measures the row, with its own code; what they keep, such as compiled code
and the fastest ways to multiply, they share. Prints tokens/s, turn by turn, and how the means stand to the first one's.
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
    parser = argparse.ArgumentParser(description="Compares the speed of checkouts.")
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--data_dir", required=True, help="a corpus that gptmill prepare made with GPT-2's tokenizer")
    parser.add_argument("--row", default="124M bf16", help="of the table of gpt2_speed.py")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns {options.turns}: must be at least 1")
    for checkout in options.checkouts:
        if not (checkout / BENCHMARK).is_file():
            parser.error(f"{checkout} is no checkout of gptmill: it has no {BENCHMARK}")
    try:
        check_corpus(options.data_dir)
    except UserError as error:
        parser.error(str(error))
    speeds: list[list[float]] = [[] for _ in options.checkouts]
    print(f"| turn | {' | '.join(str(checkout) for checkout in options.checkouts)} |")
    print(f"|---|{'---:|' * len(options.checkouts)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for number, checkout in enumerate(options.checkouts):
                logdir = Path(folder) / f"{turn}_{number}"
                speeds[number].append(measure(checkout, options.row, make_absolute(options.data_dir), logdir))
            print(f"| {turn + 1} | {' | '.join(f'{found[-1]:,.0f}' for found in speeds)} |", flush=True)
    means = [statistics.fmean(found) for found in speeds]
    print(f"| mean, × the first | {' | '.join(f'{mean:,.0f}, {mean / means[0]:.4f}' for mean in means)} |")
    return 0


def measure(checkout: Path, row: str, data_dir: str, logdir: Path) -> float:
    """Tokens/s of a row of the table."""
    words = [str(checkout / BENCHMARK), "--data_dir", data_dir, "--rows", row, "--logdir", str(logdir)]
    paths = os.pathsep.join(filter(None, (str((checkout / "src").resolve()), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    return read_speed(process.stdout + process.stderr, row)


def read_speed(said: str, row: str) -> float:
    """From what the benchmark has said; raises UserError where that is no speed."""
    found = re.search(rf"^\| {re.escape(row)} \| \d+ \| ([\d,]+) \|", said, re.MULTILINE)
    if found is None:
        raise UserError(f"no speed of {row} was measured: {said.strip()[-500:]}")
    return float(found[1].replace(",", ""))


if __name__ == "__main__":
    sys.exit(run_guarded(main))
