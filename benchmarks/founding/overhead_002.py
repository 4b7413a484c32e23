"""Founding document 002's overheads: checkpoints every 250 steps, and trackers, which it puts below 1 %.

    python benchmarks/founding/overhead_002.py [checkpoints] [trackers]

GPT-2 124M, compiled. Checkpoints: steps of 131,072 tokens, a save after 250 of them and a snapshot in host memory every
50, by benchmarks/checkpoint_stall.py. Trackers: steps of 65,536 tokens, all trackers that are installed in interleaved
blocks of one run with and without them, by benchmarks/tracker_overhead.py; and once more with histograms of all weights
and gradients, whose cost is then spread over 250 steps. Exits with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

from report import TINY_FLAGS, print_heading, print_verdict  # isort: skip: it finds the modules that follow
from checkpoint_stall import Cadence
from checkpoint_stall import report as report_stalls
from checkpoint_stall import train as train_with_saves
from runs import run_guarded
from tracker_overhead import measure as measure_blocks
from tracker_overhead import report as report_blocks

from gptmill.config.errors import UserError
from gptmill.experiments.bench.random_corpus import write_random_corpus

PARTS = ("checkpoints", "trackers")
CHECKPOINTS_LIMIT, TRACKERS_LIMIT = 0.005, 0.01
STEPS, TINY_STEPS = "290", "14"
TINY_CADENCE = Cadence(save=6, snapshot=3, settled=2, after=3)
HISTOGRAM_FREQ = 250
BLOCK, TINY_BLOCK = 20, 2
BLOCKS = 7  # two of warm-up, two pairs, and half a block at either end
TOKENS, TINY_TOKENS = 10_000_000, 20_000
FLAGS = """--tokenizer gpt2 --device cuda --compile --total_batch_size 65536 --mini_batch_size 64 --sample_tokens 0
    --eval_freq 1000000 --eval_tokens 65536 --checkpoint_freq 1000000 --warmup_steps 10""".split()
TRACKERS = {
    "tensorboard": ["--use_tensorboard"],
    "trackio": ["--use_trackio"],
    "wandb": ["--use_wandb", "--wandb_mode", "offline"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures what checkpoints and trackers cost.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure (default: both)")
    parser.add_argument("--tiny", action="store_true", help="the smallest model on the CPU, to test this script")
    options = parser.parse_args()
    parts = options.parts or PARTS
    print_heading("002: what checkpoints and trackers cost")
    verdicts = [check_checkpoints(is_tiny=options.tiny)] if "checkpoints" in parts else []
    verdicts += [check_trackers(is_tiny=options.tiny)] if "trackers" in parts else []
    return 0 if all(verdicts) else 1


def check_checkpoints(*, is_tiny: bool) -> bool:
    """Whether saves and snapshots cost less than their limit."""
    cadence = TINY_CADENCE if is_tiny else Cadence()
    sizes = (TINY_STEPS, TINY_FLAGS, cadence, TINY_TOKENS) if is_tiny else (STEPS, [], cadence)
    events = train_with_saves(*sizes)
    print("```text")
    share = report_stalls(events, cadence)
    print("```")
    return print_verdict(
        f"a checkpoint every {cadence.save} steps at less than {CHECKPOINTS_LIMIT:.1%}",
        f"{share:.2%} of the time, snapshots included",
        is_met=share < CHECKPOINTS_LIMIT,
    )


def check_trackers(*, is_tiny: bool) -> bool:
    """Whether all trackers together cost less than their limit, histograms every 250 steps included."""
    installed = ["tensorboard"] if is_tiny else [name for name in TRACKERS if find_spec(name) is not None]
    block = TINY_BLOCK if is_tiny else BLOCK
    flags = [word for name in installed for word in TRACKERS[name]]
    with tempfile.TemporaryDirectory() as folder:
        write_random_corpus(Path(folder) / "data", "gpt2", TINY_TOKENS if is_tiny else TOKENS, 70_000)
        print("```text")
        scalars, step = measure(folder, "scalars and texts", block, flags, is_tiny=is_tiny)
        drawn, _ = measure(folder, "histograms too", block, [*flags, "--histogram_freq", str(block)], is_tiny=is_tiny)
        print("```")
    histogram = max(0.0, drawn - scalars) * block  # seconds of one
    share = (scalars + histogram / HISTOGRAM_FREQ) / step
    print(f"a set of histograms costs {1000 * histogram:.0f} ms\n")
    return print_verdict(
        f"{', '.join(installed)}, with histograms every {HISTOGRAM_FREQ} steps, at less than {TRACKERS_LIMIT:.0%}",
        f"{share:+.2%} of a step, {scalars / step:+.2%} without histograms",
        is_met=share < TRACKERS_LIMIT,
    )


def measure(folder: str, name: str, block: int, more: Sequence[str], *, is_tiny: bool) -> tuple[float, float]:
    """Seconds that trackers add to a step, and those of a step without them."""
    command = [
        "train",
        "--data_dir",
        str(Path(folder) / "data"),
        "--logdir",
        folder,
        "--run_name",
        name.split()[0],
        *FLAGS,
    ]
    command += [*(TINY_FLAGS if is_tiny else []), "--max_steps", str(BLOCKS * block), *more]
    with redirect_stdout(sys.stderr):
        code, pairs = measure_blocks(command, block)
    if code or not pairs:
        raise UserError(f"the run {name} failed with exit code {code}")
    print(f"{name}: ", end="")
    return report_blocks(pairs, block)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
