"""Founding document 001's speed: 49,300 tokens/s for its 300M model on four A100s; here the same model on one GPU.

    python benchmarks/founding/throughput_001.py [--rows fp16 bf16]

Each row is `gptmill bench custom-300m` on random tokens: steps of 4 micro-batches of 32 windows of 2,048 tokens, with
data loader, AdamW, gradient clipping and log; medians of 10 steps after 10 warm-up steps. fp16 is what 001 used, bf16
what gptmill is fastest in. Exits with 1 if no row has four times the speed of 001's four GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import print_heading, print_table, print_verdict
from runs import run_guarded

from gptmill.config.recipes import make_config
from gptmill.config.requests import BenchRequest
from gptmill.experiments.bench.runner import run_bench
from gptmill.models.flops import count_flops
from gptmill.models.gpt import pad_vocab
from gptmill.runtime.gpu_catalog import find_gpu

RECIPE, GPT2_TOKENS = "custom-300m", 50_257
SPEED_001, GPUS_001 = 49_300.0, 4
TIMES = 4.0
STEPS = 10
PRECISIONS = ("fp16", "bf16")
BATCH = {"mini_batch_size": 32, "total_batch_size": 4 * 32 * 2048}
TINY: dict[str, Any] = {
    "device": "cpu",
    "compile": False,
    "tokenizer": "byte",
    "num_layers": 1,
    "embd_size": 16,
    "num_heads": 2,
    "ffn_size": 32,
    "context_length": 16,
    "mini_batch_size": 2,
    "total_batch_size": 64,
}
HEADER = ("", "tokens/s", "× 001's four A100s", "× one of them", "TFLOP/s", "MFU", "memory", "first step")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the speed of founding document 001's model.")
    parser.add_argument("--rows", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="precisions to measure")
    parser.add_argument("--tiny", action="store_true", help="the smallest model on the CPU, to test this script")
    options = parser.parse_args()
    print_heading("001: the 300M model's tokens per second")
    measured = {"fp32": measure({**TINY, "precision": "fp32"}, 2)} if options.tiny else {}
    if not options.tiny:
        measured = {name: measure({**BATCH, "precision": name}, STEPS) for name in options.rows}
    return report(measured)


def measure(flags: dict[str, Any], steps: int) -> dict[str, Any]:
    """The bench's record of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        run_bench(RECIPE, {**flags, "logdir": folder}, BenchRequest(steps=steps, json=str(path)), say)
        (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return row  # type: ignore[no-any-return]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(measured: dict[str, dict[str, Any]]) -> int:
    """Prints the table and the verdict; returns the exit code."""
    print_table(HEADER, [make_001(), *(make_row(f"gptmill, {name}", row) for name, row in measured.items())])
    fastest = max(row["tokens_per_second"] for row in measured.values())
    is_met = print_verdict(
        f"at least {TIMES:g} times 001's {SPEED_001:,.0f} tokens/s on one GPU",
        f"{fastest:,.0f} tokens/s, {fastest / SPEED_001:.2f} times",
        is_met=fastest >= TIMES * SPEED_001,
    )
    return 0 if is_met else 1


def make_001() -> tuple[str, ...]:
    """001's row. Its speed and the model's FLOPs say how well it used its GPUs."""
    model = make_config(RECIPE, {}).model
    rate = SPEED_001 * count_flops(model, pad_vocab(GPT2_TOKENS), model.context_length)
    peak = GPUS_001 * (find_gpu("A100").find_peak_rate("fp16") or 0.0)
    return (
        "001, four A100 40GB",
        f"{SPEED_001:,.0f}",
        "1.00",
        "4.00",
        f"{rate / 1e12:.0f}",
        f"{rate / peak:.1%}",
        "",
        "",
    )


def make_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    speed = row["tokens_per_second"]
    return (
        name,
        f"{speed:,.0f}",
        f"{speed / SPEED_001:.2f}",
        f"{GPUS_001 * speed / SPEED_001:.2f}",
        "–" if row["tflops"] is None else f"{row['tflops']:.0f}",
        "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{row['memory_gb']:.1f} GB",
        f"{row['first_step_seconds']:.1f} s",
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
