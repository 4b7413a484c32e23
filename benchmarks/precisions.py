"""Every precision, eager and compiled, with memory-saving options and other models, on one GPU: loss, speed, memory.

    python benchmarks/precisions.py --data_dir DIR [--steps 100] [--rows eager compiled memory modern moe]

Each row is one `gptmill train gpt2-124m` on real tokens, 131,072 a step in micro-batches of 32 windows. The learning
rate is constant after warm-up, so that runs of any length are comparable step by step; fp32 and other slow runs train
fewer steps. Loss is the mean of the last ten steps. Deviation is the largest difference between the loss curve,
smoothed over ten steps, and that of the same model in fp32, over the steps that both have. Tokens/s is the median after
ten steps.

Prints a Markdown table, row by row. A row that is complete in --logdir with the same code, recipe and flags is read,
not run again, so that the groups can be measured one by one; measure eager first, which holds the fp32 reference. Exits
with 1 if a run fails or deviates by more than 0.05.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runs import make_run_folder, obtain, read_run, run_guarded

TOLERANCE = 0.05
SMOOTHED = 10
SETTLED = 10
FLAGS = """--device cuda --total_batch_size 131072 --mini_batch_size 32 --no_compile
    --schedule constant --max_lr 6e-4 --warmup_steps 50 --eval_freq 1000000 --eval_tokens 65536 --sample_tokens 0
    --checkpoint_freq 1000000 --guard warn --log_freq 1""".split()
MODERN = "--norm rmsnorm --positions rope --feed_forward relu2 --no_bias --qk_norm --zero_init"
MOE = "--norm rmsnorm --positions rope --feed_forward moe --no_bias --qk_norm"


class Row(NamedTuple):
    """A run: its flags, the row that its loss curve is compared with, and its share of the steps."""

    name: str
    flags: str
    reference: str = "fp32"
    share: float = 1.0


GROUPS = {
    "eager": (
        Row("fp32", "--precision fp32", share=0.4),
        Row("tf32", "--precision tf32"),
        Row("bf16", "--precision bf16"),
        Row("fp16", "--precision fp16"),
        Row("fp8 in the blocks", "--precision fp8 --fp8_layers blocks"),
    ),
    "compiled": (
        Row("tf32, compiled", "--precision tf32 --compile"),
        Row("bf16, compiled", "--precision bf16 --compile"),
        Row("fp16, compiled", "--precision fp16 --compile"),
        Row("fp8, compiled", "--precision fp8 --compile"),
        Row("fp8 in the feed-forward parts, compiled", "--precision fp8 --fp8_layers feed_forward --compile"),
        Row("fp8 in the blocks, compiled", "--precision fp8 --fp8_layers blocks --compile"),
        Row("fp8 in all layers, compiled", "--precision fp8 --fp8_layers all --compile"),
    ),
    "memory": (
        Row("bf16, selective checkpointing", "--precision bf16 --gradient_checkpointing selective"),
        Row("bf16, full checkpointing", "--precision bf16 --gradient_checkpointing full"),
        Row("bf16, chunked cross-entropy", "--precision bf16 --loss_chunk 4096"),
        Row("bf16, all three, compiled", "--precision bf16 --gradient_checkpointing full --loss_chunk 4096 --compile"),
    ),
    "modern": (
        Row("modern, fp32", f"--precision fp32 {MODERN}", "modern, fp32", 0.4),
        Row("modern, bf16, compiled", f"--precision bf16 --compile {MODERN}", "modern, fp32"),
        Row("modern, fp8, compiled", f"--precision fp8 --compile {MODERN}", "modern, fp32"),
        Row("modern, muon, bf16, compiled", f"--precision bf16 --compile {MODERN} --optimizer muon", ""),
    ),
    "moe": (
        Row("8 experts, fp32", f"--precision fp32 {MOE}", "8 experts, fp32", 0.4),
        Row("8 experts, bf16", f"--precision bf16 {MOE}", "8 experts, fp32"),
        Row("8 experts, bf16, compiled", f"--precision bf16 --compile {MOE}", "8 experts, fp32"),
    ),
}


@dataclass(frozen=True)
class Result:
    """Figures from the events of a run."""

    losses: dict[int, float]
    tokens_per_second: float
    memory_gb: float

    @property
    def loss(self) -> float:
        return statistics.fmean([self.losses[step] for step in sorted(self.losses)][-SMOOTHED:])

    def smooth(self) -> dict[int, float]:
        """At each step, the mean of the last ten."""
        steps = sorted(self.losses)
        ends = range(SMOOTHED, len(steps) + 1)
        return {
            steps[end - 1]: statistics.fmean(self.losses[step] for step in steps[end - SMOOTHED : end]) for end in ends
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains GPT-2 124M in every precision.")
    parser.add_argument("--data_dir", required=True, help="a corpus that gptmill prepare made with GPT-2's tokenizer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows of the groups alone, by their names")
    parser.add_argument("--logdir", default="runs/precisions")
    parser.add_argument("--row_seconds", type=int, default=300, help="timeout of a run")
    options = parser.parse_args()
    if options.steps * 0.4 < 2 * SMOOTHED:
        parser.error(f"--steps {options.steps} leaves fp32 too few steps to compare; use at least {5 * SMOOTHED}")
    data, logdir = str(Path(options.data_dir).resolve()), Path(options.logdir).resolve()
    print("| | steps | loss | deviation from fp32 | tokens/s | peak memory |")
    print("|---|---:|---:|---:|---:|---:|")
    failed = []
    rows = [row for group in options.rows for row in GROUPS[group]]
    for row in (row for row in rows if options.only is None or row.name in options.only):
        result = measure(row, options.steps, data, logdir, options.row_seconds)
        deviation = None if result is None else compare(row, result, logdir)
        if result is None or (deviation is not None and not deviation <= TOLERANCE):
            failed.append(row.name)
        print(describe(row, result, deviation), flush=True)
    if failed:
        print(f"\nfailed, or deviates by more than {TOLERANCE} from fp32: {'; '.join(failed)}")
    return 1 if failed else 0


def measure(row: Row, steps: int, data: str, logdir: Path, seconds: int) -> Result | None:
    """Trains unless the run is complete; returns None on failure and prints the output to stderr."""
    folder = make_run_folder(row.name, logdir)
    flags = ["--data_dir", data, "--max_steps", str(round(steps * row.share)), *FLAGS, *row.flags.split()]
    return None if obtain(folder, "gpt2-124m", flags, seconds) is None else read_result(folder)


def read_result(folder: Path) -> Result | None:
    """Returns None for a run that does not exist or has not finished."""
    run = read_run(folder)
    if run is None or not run.is_finished:
        return None
    steps = run.select("StepLogged")
    losses = {event["step"]: float("nan") if event["loss"] is None else event["loss"] for event in steps}
    speeds = [event["tokens_per_second"] for event in steps if event["step"] > SETTLED]
    return Result(losses, statistics.median(speeds), max(event["memory_gb"] for event in steps))


def compare(row: Row, result: Result, logdir: Path) -> float | None:
    """Returns the largest difference from the smoothed curve of the reference; None if a row has no reference."""
    if row.reference in ("", row.name):
        return None
    reference = read_result(make_run_folder(row.reference, logdir))
    if reference is None:
        sys.stderr.write(
            f"{row.name}: there is no {row.reference} in {logdir} to compare it with; measure that first\n"
        )
        return float("nan")
    own, other = result.smooth(), reference.smooth()
    distances = [abs(own[step] - other[step]) for step in own.keys() & other.keys()]
    # max() would ignore NaN.
    return max(distances) if distances and all(distance == distance for distance in distances) else float("nan")


def describe(row: Row, result: Result | None, deviation: float | None) -> str:
    """Returns a row of the table."""
    if result is None:
        return f"| {row.name} | failed | | | | |"
    distance = "–" if deviation is None else f"{deviation:.4f}"
    numbers = f"{max(result.losses)} | {result.loss:.4f} | {distance} | {result.tokens_per_second:,.0f}"
    return f"| {row.name} | {numbers} | {result.memory_gb:.1f} GB |"


if __name__ == "__main__":
    sys.exit(run_guarded(main))
