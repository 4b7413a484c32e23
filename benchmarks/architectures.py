"""Every architecture, optimizer and schedule on character-level Shakespeare: parameters, validation loss, seconds.

    python benchmarks/architectures.py PATH/TO/input.txt [--steps 300] [--only NAME ...]

Each row is one `gptmill train shakespeare-char-cpu` (4 layers, width 128, context 64, 12 windows a step) with the flags
of the row, a warm-up of a tenth of the steps, and one evaluation at the end on the same 98,304 validation tokens.
Prints a Markdown table, row by row. Exits with 1 if a run fails or its loss is not below the limit of its row. The
limits hold for 300 steps; shorter runs ignore them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

GPTMILL = [sys.executable, "-m", "gptmill"]
LIMIT_STEPS = 300
FLAGS = """--eval_freq 1000000 --eval_tokens 98304 --sample_tokens 0 --checkpoint_freq 1000000 --guard warn""".split()
ROW_SECONDS = 1200
PAIRS = 2.48  # loss of a bigram model: any model that sees more context must be below it
WELL_BELOW = 2.2  # the baseline reaches 2.36

LLAMA = "--norm rmsnorm --positions rope --feed_forward swiglu --no_bias"
QWEN3 = f"{LLAMA} --qk_norm --num_kv_heads 2"
QWEN3_MOE = "--norm rmsnorm --positions rope --feed_forward moe --no_bias --qk_norm --num_kv_heads 2"
MODERN = "--norm rmsnorm --positions rope --feed_forward relu2 --no_bias --qk_norm --zero_init"
# Losses by learning rate on the classic model: adamw 1e-3 2.39, 2e-3 2.37, 4e-3 (the recipe's) 2.36, 8e-3 2.35; muon's
# matrix_lr 0.01 2.21, 0.02 2.08, 0.04 2.06; lion 5e-4 2.41, 1e-3 2.38, 2e-3 2.38. Only lion runs at its best rate.
MUON = "--optimizer muon --matrix_lr 0.02"
LION = "--optimizer lion --max_lr 1e-3 --min_lr 2e-5"
EIGHT_BITS = "--optimizer adamw8bit"


class Row(NamedTuple):
    """A run: its name, the flags on top of the recipe, and the loss that it must stay below."""

    name: str
    flags: str = ""
    below: float = PAIRS
    data: str = "text"


# {third} stands for a third of the steps.
ROWS = (
    Row("gpt2 classic"),
    Row("without biases", "--no_bias --no_norm_bias"),
    Row("rmsnorm", "--norm rmsnorm"),
    Row("rope", "--positions rope"),
    Row("rope, llama3 scaling", "--positions rope --rope_scaling llama3 --rope_factor 4 --rope_original_context 32"),
    Row("rope, linear scaling", "--positions rope --rope_scaling linear --rope_factor 4"),
    Row("no positions", "--positions none"),
    Row("swiglu", "--feed_forward swiglu"),
    Row("relu2", "--feed_forward relu2"),
    Row("grouped-query attention", "--num_kv_heads 2"),
    Row("qk-norm", "--qk_norm"),
    Row("sliding windows", "--attention_windows 16,16,16,full"),
    Row("document masks (speeches)", "--documents masked", 2.6, "speeches"),
    Row("untied head", "--no_tied_head"),
    Row("logit soft-cap", "--logit_softcap 15"),
    Row("value embeddings", "--value_embeddings 2"),
    Row("zero-init", "--zero_init"),
    # With learned positions these two are still on the initial plateau after 300 steps.
    Row("rope, multi-token prediction", "--positions rope --mtp_heads 1", 2.4),
    Row("rope, mixture of experts", "--positions rope --feed_forward moe", WELL_BELOW),
    Row("llama", LLAMA, WELL_BELOW),
    Row("qwen3", QWEN3, WELL_BELOW),
    Row("qwen3_moe", QWEN3_MOE, WELL_BELOW),
    Row("modern", MODERN, 2.1),
    Row("classic, adamw"),
    Row("classic, muon", MUON, WELL_BELOW),
    Row("classic, lion", LION),
    Row("classic, adamw8bit", EIGHT_BITS),
    Row("modern, adamw", MODERN, 2.1),
    Row("modern, muon", f"{MODERN} {MUON}", 2.0),
    Row("modern, lion", f"{MODERN} {LION}", WELL_BELOW),
    Row("modern, adamw8bit", f"{MODERN} {EIGHT_BITS}"),
    Row("schedule cosine"),
    Row("schedule linear", "--schedule linear"),
    Row("schedule wsd", "--schedule wsd"),
    Row("schedule constant", "--schedule constant"),
    Row("batch-size warm-up", "--mini_batch_size 6 --batch_size_warmup 384:{third}"),
    Row("sequence-length warm-up", "--context_warmup 32:{third}"),
    Row("EMA weights", "--ema_decay 0.98"),
)


@dataclass(frozen=True)
class Result:
    """Figures from the events of a run; the loss is the EMA loss if the run keeps an EMA."""

    parameters: int
    active: int
    loss: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains every architecture, optimizer and schedule.")
    parser.add_argument("text", help="tiny Shakespeare's input.txt")
    parser.add_argument("--steps", type=int, default=LIMIT_STEPS)
    parser.add_argument("--only", nargs="+", default=[], help="train only rows whose name contains one of these")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or any(part in row.name for part in options.only)]
    if not rows:
        parser.error(
            f"no row's name contains {' or '.join(options.only)}; they are: {', '.join(row.name for row in ROWS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(Path(options.text).resolve(), work)
        failed = measure_all(rows, options.steps, work)
    if failed:
        print(f"\nfailed or above the limit: {'; '.join(failed)}")
    return 1 if failed else 0


def prepare(text: Path, work: Path) -> None:
    """Prepares the text twice: as one document, and with one document per speech."""
    command = [*GPTMILL, "prepare", str(text), "--tokenizer", "char", "--val_fraction", "0.1"]
    separated = ["--out", "speeches", "--separator", "\n\n"]
    for more in (["--out", "text"], separated):
        subprocess.run([*command, *more], cwd=work, check=True, stdout=sys.stderr)


def measure_all(rows: list[Row], steps: int, work: Path) -> list[str]:
    """Prints the table; returns the rows that failed or missed their limit."""
    print(f"{steps} steps, {os.cpu_count()} cores\n")
    print("| | flags | parameters (active) | validation loss | below | against classic | seconds |")
    print("|---|---|---:|---:|---:|---:|---:|")
    failed: list[str] = []
    known: dict[tuple[str, str], Result | None] = {}  # rows of different groups may be the same run
    for row in rows:
        flags = row.flags.format(third=max(1, steps // 3))
        if "adamw8bit" in flags and importlib.util.find_spec("torchao") is None:
            print(f"| {row.name} | `{flags}` | skipped: needs `pip install 'gptmill[quant]'` | | | | |", flush=True)
            continue
        key = flags, row.data
        if key not in known:
            known[key] = measure(flags, row.data, steps, work / f"run_{len(known)}", work)
        result = known[key]
        if result is None or (steps >= LIMIT_STEPS and not result.loss < row.below):
            failed.append(row.name)
        print(describe(row, flags, result, known.get(("", "text"))), flush=True)
    return failed


def measure(flags: str, data: str, steps: int, run: Path, work: Path) -> Result | None:
    """Trains; returns None on failure and prints the output to stderr."""
    command = [*GPTMILL, "train", "shakespeare-char-cpu", "--data_dir", data, "--max_steps", str(steps)]
    where = ["--warmup_steps", str(max(1, steps // 10)), "--logdir", str(run.parent), "--run_name", run.name]
    try:
        process = subprocess.run(
            [*command, *where, *FLAGS, *flags.split()],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=ROW_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{flags}: not done after {ROW_SECONDS} s\n")
        return None
    if process.returncode:
        sys.stderr.write(f"{flags}:\n{process.stdout[-1000:]}{process.stderr[-2000:]}")
        return None
    return read_result(run / "events.jsonl")


def read_result(path: Path) -> Result:
    events: list[dict[str, Any]] = [json.loads(line) for line in path.read_bytes().splitlines()]
    (start,) = (event for event in events if event["event"] == "RunStarted")
    *_, last = (event for event in events if event["event"] == "EvalDone")
    seconds = sum(event["seconds"] for event in events if event["event"] == "StepLogged")
    averaged = last["ema_loss"]
    loss = last["val_loss"] if averaged is None else averaged
    return Result(start["parameters"], start["active_parameters"], float("nan") if loss is None else loss, seconds)


def describe(row: Row, flags: str, result: Result | None, classic: Result | None) -> str:
    """Returns a row of the table."""
    if result is None:
        return f"| {row.name} | `{flags}` | failed | | | | |"
    active = f" ({result.active:,})" if 0 < result.active < result.parameters else ""
    gain = f"{result.loss - classic.loss:+.3f}" if classic is not None and row.data == "text" else "–"
    added = flags.removeprefix(f"{MODERN} ")  # the row of the modern block shows these
    shown = f"`{added}`" if added else ""
    numbers = f"{result.parameters:,}{active} | {result.loss:.4f} | {row.below:.2f} | {gain} | {result.seconds:.0f}"
    return f"| {row.name} | {shown} | {numbers} |"


if __name__ == "__main__":
    sys.exit(main())
