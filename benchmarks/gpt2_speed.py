"""Training throughput of GPT-2 on one GPU by size and precision, and time to the first step, against limits.

    python benchmarks/gpt2_speed.py --data_dir DIR [--rows NAME ...] [--fp8_layers fused] [--ceiling 790]
                                    [--compile_jobs 3] [--loss_check]

DIR is a corpus tokenized with GPT-2's tokenizer. Each row is one `gptmill train RECIPE` with the real data loader,
optimizer, spike detector and log, and one optimizer step per micro-batch; "by 8" accumulates gradients over eight
micro-batches. Figures come from the run's own log: medians of 50 steps after 20 warm-up steps, timed by CUDA events
without synchronising. The run is then killed, so that it writes no last checkpoint. Shares are relative to the rate of
a large matmul (--ceiling, TFLOP/s). The first step is timed from process start.

--compile_jobs fills the compile cache first, several rows at a time: the table is done minutes sooner, and its first
steps are warm starts.

The last two rows start the same run twice; the second finds a warm compile cache. --loss_check also trains 500 steps in
bf16 and in fp8 from the same seed and compares the mean losses of the last 20. A row that is complete in --logdir with
the same code, recipe and flags is read, not run again. Exits with 1 if a row fails or misses its limit.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from runs import Run, check_corpus, make_absolute, make_run_folder, obtain, open_jobs, read_run, run_guarded, train

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.run import Fp8Layers
from gptmill.runs.code_fingerprint import make_code_fingerprint

SETTLED, MEASURED = 20, 50
LAST_STEP = SETTLED + MEASURED
START_STEPS = 3
CLOCKS_NAME = "clocks.txt"
FLAGS = """--device cuda --compile --eval_freq 1000000 --eval_tokens 65536 --sample_tokens 0
    --checkpoint_freq 1000000 --log_freq 1""".split()
LOSS_STEPS, LOSS_MEAN, LOSS_TOLERANCE = 500, 20, 0.02
LOSS_FLAGS = [*FLAGS, *f"--total_batch_size 65536 --mini_batch_size 64 --max_steps {LOSS_STEPS}".split()]
HEADER = ("", "micro-batch", "tokens/s", "TFLOP/s", "of {ceiling:.0f}", "data wait", "memory", "SM clock", "first step")
NUMBER_FORMATS = {"tokens/s": ",.0f", "share": ".1%", "times": ".3f", "seconds": ".1f"}


class Limit(NamedTuple):
    """A unit, a required value and a goal; the unit `times` is the speed relative to another row."""

    unit: str
    must: float | None
    aim: float | None = None
    against: str = ""

    def judge(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        sign = -1.0 if self.unit == "seconds" else 1.0
        is_met = [limit is None or sign * value >= sign * limit for limit in (self.must, self.aim)]
        if not is_met[0]:
            return "missed"
        return "aim" if self.aim is not None and is_met[1] else "met"

    def show(self, value: float | None) -> str:
        return "–" if value is None else f"{value:{NUMBER_FORMATS[self.unit]}} {self.name}".rstrip()

    @property
    def name(self) -> str:
        return "" if self.unit == "share" else f"× {self.against}" if self.unit == "times" else self.unit


class Row(NamedTuple):
    """A run of a recipe: windows per micro-batch, micro-batches per step, and its limit."""

    name: str
    recipe: str
    windows: int
    limit: Limit | None
    micro_batches: int = 1
    is_fp8: bool = False
    is_start: bool = False

    def make_flags(self, fp8_layers: str) -> list[str]:
        context = make_config(self.recipe, {}).model.context_length
        tokens = self.windows * self.micro_batches * context
        precision = f"fp8 --fp8_layers {fp8_layers}" if self.is_fp8 else "bf16"
        return [
            *FLAGS,
            *f"--mini_batch_size {self.windows} --total_batch_size {tokens} --precision {precision}".split(),
        ]


SHARE = Limit("share", 0.60, 0.68)
MODERN_BF16 = "custom-300m-modern bf16"

ROWS = (
    Row("124M bf16", "gpt2-124m", 64, Limit("tokens/s", 590_000, 620_000)),
    Row("124M fp8", "gpt2-124m", 64, Limit("tokens/s", 640_000, 700_000), is_fp8=True),
    Row("124M bf16 by 8", "gpt2-124m", 8, Limit("times", 0.9, None, "124M bf16"), micro_batches=8),
    Row("124M fp8 by 8", "gpt2-124m", 8, Limit("times", None, 0.9, "124M fp8"), micro_batches=8, is_fp8=True),
    Row("350M bf16", "gpt2-350m", 64, SHARE),
    Row("350M fp8", "gpt2-350m", 64, Limit("times", 1.0, 1.2, "350M bf16"), is_fp8=True),
    Row("774M bf16", "gpt2-774m", 32, SHARE),
    Row("774M fp8", "gpt2-774m", 32, Limit("times", 1.0, 1.2, "774M bf16"), is_fp8=True),
    Row("1.5B bf16", "gpt2-1.5b", 16, SHARE),
    Row("1.5B fp8", "gpt2-1.5b", 16, Limit("times", 1.0, 1.2, "1.5B bf16"), is_fp8=True),
    Row(MODERN_BF16, "custom-300m-modern", 32, SHARE),
    Row("custom-300m-modern fp8", "custom-300m-modern", 32, Limit("times", None, 1.2, MODERN_BF16), is_fp8=True),
    Row("start", "gpt2-124m", 64, None, is_start=True),
    Row("start, warm cache", "gpt2-124m", 64, Limit("seconds", 15.0, 8.0), is_start=True),
)


@dataclass(frozen=True)
class Result:
    """Figures from the events of a run."""

    tokens_per_second: float
    tflops: float | None
    data_wait: float
    memory_gb: float
    first_step_seconds: float
    clocks: str = "–"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the training throughput of GPT-2.")
    parser.add_argument("--data_dir", required=True, help="a corpus that gptmill prepare made with GPT-2's tokenizer")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="measure only rows with these names or prefixes")
    parser.add_argument("--fp8_layers", choices=get_args(Fp8Layers), default="fused")
    parser.add_argument("--flags", default="", help="more flags for every run, in quotes")
    parser.add_argument("--ceiling", type=float, default=790.0, help="TFLOP/s that shares are relative to")
    parser.add_argument("--loss_check", action="store_true", help="also compare the losses of fp8 and bf16")
    parser.add_argument("--compile_jobs", type=int, default=0, help="rows to compile concurrently before measuring")
    parser.add_argument("--logdir", default="runs/gpt2_speed")
    parser.add_argument("--row_seconds", type=int, default=400, help="timeout of a run")
    options = parser.parse_args()
    rows = choose_rows(options.rows)
    if not rows:
        parser.error(f"no row is called {' or '.join(options.rows)}; they are: {', '.join(row.name for row in ROWS)}")
    if options.compile_jobs < 0:
        parser.error(f"--compile_jobs {options.compile_jobs}: must not be negative")
    try:
        check_corpus(options.data_dir)
    except UserError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU here; use a machine that has one")
    logdir = Path(options.logdir).resolve()
    more = ["--data_dir", make_absolute(options.data_dir), *options.flags.split()]
    if options.compile_jobs:
        compile_first(rows, options, more)
    print(describe_machine() + "\n")
    print(f"| {' | '.join(HEADER).format(ceiling=options.ceiling)} | must | aim | reached | |")
    print(f"|---|{'---:|' * (len(HEADER) + 2)}---|", flush=True)
    missed = []
    for row in rows:
        flags = [*row.make_flags(options.fp8_layers), *more]
        result = measure(row, make_run_folder(row.name, logdir), flags, options.row_seconds)
        text, is_missed = describe(row, result, logdir, options.ceiling)
        print(text, flush=True)
        missed += [row.name] if is_missed else []
    if options.loss_check and not check_losses(logdir, more, options.fp8_layers, options.row_seconds):
        missed.append("losses")
    if missed:
        print(f"\nfailed or missed the limit: {'; '.join(missed)}")
    return 1 if missed else 0


def choose_rows(names: list[str] | None) -> list[Row]:
    """Returns the rows with these names; a name that no row has is a prefix; None selects all rows."""
    if names is None:
        return list(ROWS)
    known = {row.name for row in ROWS}
    prefixes = tuple(name for name in names if name not in known)
    return [row for row in ROWS if row.name in names or (prefixes and row.name.startswith(prefixes))]


def compile_first(rows: list[Row], options: argparse.Namespace, more: list[str]) -> None:
    """Trains one step of every row, several rows at a time. A row that runs out of memory here compiles later."""
    folder = Path(options.logdir).resolve() / "compiling"

    def compile_row(row: Row) -> None:
        flags = [*row.make_flags(options.fp8_layers), *more]
        train(make_run_folder(row.name, folder), row.recipe, flags, options.row_seconds, 1, is_alone=False)

    with open_jobs(options.compile_jobs) as pool:
        list(pool.map(compile_row, [row for row in rows if not row.is_start]))


def measure(row: Row, folder: Path, flags: list[str], seconds: float) -> Result | None:
    """Trains unless the run is complete; None if training failed."""
    first, last = (0, START_STEPS) if row.is_start else (SETTLED, LAST_STEP)
    run = obtain(folder, row.recipe, flags, seconds, last, lambda: note_clocks(folder))
    return None if run is None else read_result(run, folder, first, last)


def read_result(run: Run, folder: Path, first: int, last: int) -> Result:
    """Returns the figures of the steps after `first` up to `last`."""
    steps = run.select("StepLogged")
    measured = [event for event in steps if first < event["step"] <= last]
    rates = [event["tflops"] for event in measured if event.get("tflops") is not None]
    clocks = folder / CLOCKS_NAME
    return Result(
        tokens_per_second=statistics.median(event["tokens_per_second"] for event in measured),
        tflops=statistics.median(rates) if rates else None,
        data_wait=statistics.fmean(event["data_wait"] for event in measured),
        memory_gb=max(event["memory_gb"] for event in steps),
        first_step_seconds=steps[0]["time"] - run.started,
        clocks=clocks.read_text(encoding="utf-8").strip() if clocks.is_file() else "–",
    )


def describe(row: Row, result: Result | None, logdir: Path, ceiling: float) -> tuple[str, bool]:
    """Returns a row of the table, and whether it misses its limit."""
    if result is None:
        return f"| {row.name} | {row.windows} | failed |" + " |" * (len(HEADER) + 1), True
    share = None if result.tflops is None else result.tflops / ceiling
    cells = [
        *(row.name, str(row.windows), f"{result.tokens_per_second:,.0f}"),
        *("–" if result.tflops is None else f"{result.tflops:.0f}", SHARE.show(share)),
        *(f"{result.data_wait:.2%}", f"{result.memory_gb:.1f} GB", result.clocks, f"{result.first_step_seconds:.1f} s"),
    ]
    if row.limit is None:
        return f"| {' | '.join(cells)} | | | | |", False
    value = find_value(row.limit, result, share, logdir)
    verdict = row.limit.judge(value)
    cells += [*map(row.limit.show, (row.limit.must, row.limit.aim, value)), verdict]
    return f"| {' | '.join(cells)} |", verdict in ("missed", "not measured")


def find_value(limit: Limit, result: Result, share: float | None, logdir: Path) -> float | None:
    """Returns the value to compare with the limit; None if the row that it is relative to is missing."""
    if limit.unit == "tokens/s":
        return result.tokens_per_second
    if limit.unit == "share":
        return share
    if limit.unit == "seconds":
        return result.first_step_seconds
    folder = make_run_folder(limit.against, logdir)
    other = read_run(folder)
    if other is None or other.last_step < LAST_STEP:
        return None
    return result.tokens_per_second / read_result(other, folder, SETTLED, LAST_STEP).tokens_per_second


def check_losses(logdir: Path, flags: list[str], fp8_layers: str, seconds: float) -> bool:
    """Whether fp8 reaches the loss of bf16 on books-124m."""
    means = []
    for name, precision in (("bf16", ["bf16"]), ("fp8", ["fp8", "--fp8_layers", fp8_layers])):
        folder = make_run_folder(f"loss {name}", logdir)
        run = obtain(folder, "books-124m", [*LOSS_FLAGS, "--precision", *precision, *flags], seconds, LOSS_STEPS)
        if run is None:
            return False
        means.append(find_last_loss(run))
    difference = abs(means[0] - means[1])
    print(
        f"\nloss after {LOSS_STEPS} steps, mean of the last {LOSS_MEAN}: bf16 {means[0]:.4f}, fp8 {means[1]:.4f}; "
        f"difference {difference:.4f}, at most {LOSS_TOLERANCE}"
    )
    return difference <= LOSS_TOLERANCE


def find_last_loss(run: Run) -> float:
    losses = [event["loss"] for event in run.select("StepLogged")][-LOSS_MEAN:]
    return statistics.fmean(float("nan") if loss is None else loss for loss in losses)


def describe_machine() -> str:
    """Returns commit, code fingerprint, torch version and GPU."""
    code = f"commit {find_commit()}, code {make_code_fingerprint()}, torch {metadata.version('torch')}"
    gpu = query_gpu("name,driver_version,clocks.max.sm,clocks.max.mem,power.limit")
    return f"{code}; {gpu or 'no nvidia-smi'} (GPU, driver, highest SM and memory clocks, power limit)"


def find_commit() -> str:
    """Returns the commit of the checkout, marked if files differ from it; "unknown" outside of one."""
    folder = Path(__file__).parent

    def ask(*words: str) -> str | None:
        process = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        return None if process.returncode else process.stdout.strip()

    if shutil.which("git") is None or (commit := ask("rev-parse", "--short", "HEAD")) is None:
        return "unknown"
    return f"{commit} with changes" if ask("status", "--porcelain", "--untracked-files=no") else commit


def note_clocks(folder: Path) -> None:
    """Records the current SM clock of the GPU."""
    if clock := query_gpu("clocks.sm"):
        (folder / CLOCKS_NAME).write_text(clock, encoding="utf-8")


def query_gpu(query: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
