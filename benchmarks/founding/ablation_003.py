"""Founding document 003's table: what each optimization brings in speed and memory, claimed and measured.

    python benchmarks/founding/ablation_003.py [--out runs/ablation_003] [--seconds 140]

Every row is one row of `gptmill bench optimized --ablate`: 003's model, one micro-batch of 64 windows per step, medians
of 10 steps after 10 warm-up steps. A row takes some seconds, a compiled one up to half a minute. Rows that are measured
stay in the folder --out; the script ends after --seconds and, called again, measures the others. When it has all of
them, it prints the table. Exits with 1 until then, and if all together bring less than 003 says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from report import print_heading, print_table, print_verdict
from runs import run_guarded

from gptmill.config.errors import UserError
from gptmill.config.requests import BenchRequest
from gptmill.experiments.bench.ablations import ALL_KEY, NAIVE_KEY, PLAIN_KEY, ROWS, choose_rows
from gptmill.experiments.bench.runner import list_capabilities, run_bench
from gptmill.runtime.device import choose_device

RECIPE, STEPS = "optimized", 10
TINY = ["naive", "plain", "qkv"]
TINY_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "tokenizer": "byte",
    "num_layers": 1,
    "embd_size": 16,
    "num_heads": 2,
    "context_length": 16,
    "mini_batch_size": 4,
}


class Claim(NamedTuple):
    """A row of 003's table: the row of the ablation that measures it, and what 003 says."""

    title: str
    row: str
    speed: str
    memory: str
    baseline: str = ""
    """The row to compare with, where it is not the row's own."""


CLAIMS = (
    Claim("mixed precision", "bf16", "1.5×", "−50 %"),
    Claim("flash attention", "flash", "1.2–2×", "−60 %"),
    Claim("model compilation", "compile", "1.1–1.3×", "–"),
    Claim("optimized data loader", "data", "1.2×", "–"),
    Claim("architecture", "architecture", "1.1–1.5×", "−20 %"),
    Claim("… fused QKV projection", "qkv", "", ""),
    Claim("… SwiGLU", "swiglu", "", ""),
    Claim("… tied embeddings", "tying", "", ""),
    Claim("all together", "all", "2–5×", "−60 to −70 %", PLAIN_KEY),
)
LEAST_SPEED, MOST_SPEED = 2.0, 5.0
LEAST_SAVED = 0.6
ORDER = ("naive", "all", "bf16", "flash", "data", "plain", "architecture", "qkv", "swiglu", "tying", "compile")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the optimizations of founding document 003.")
    parser.add_argument("--out", default="runs/ablation_003", help="folder for the measured rows")
    parser.add_argument("--seconds", type=float, default=140.0, help="time after which no further row is started")
    parser.add_argument("--tiny", action="store_true", help="the smallest model and few rows on the CPU, as a test")
    options = parser.parse_args()
    started, out = time.monotonic(), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    keys = list_keys(TINY if options.tiny else None, "cpu" if options.tiny else "auto")
    for key in keys:
        is_late = time.monotonic() - started > options.seconds - expect_seconds(out)
        if not (out / f"{key}.json").is_file() and not is_late:
            measure(key, out, is_tiny=options.tiny)
    records = {key: record for key in keys if (record := read_record(out, key)) is not None}
    if missing := [key for key in keys if key not in records]:
        print(f"rows that are missing: {', '.join(missing)}; run the same command again")
        return 1
    return report(records)


def list_keys(wanted: list[str] | None, device: str) -> list[str]:
    """The rows that the table needs and others that the machine can run, the most telling ones first."""
    rows, _ = choose_rows(None if wanted is None else ",".join(wanted), list_capabilities(choose_device(device)))
    keys = [row.key for row in rows]
    return [key for key in ORDER if key in keys] + [key for key in keys if key not in ORDER]


def expect_seconds(out: Path) -> float:
    """How long the next row may take: as long as the longest so far."""
    noted = out / "longest.txt"
    return float(noted.read_text(encoding="utf-8")) if noted.is_file() else 0.0


def measure(key: str, out: Path, *, is_tiny: bool) -> None:
    """Measures one row, with the micro-batch that the naive one fitted into memory with."""
    naive, started = read_record(out, NAIVE_KEY), time.monotonic()
    flags = {**(TINY_FLAGS if is_tiny else {}), "logdir": str(out)}
    if naive is not None:
        flags["mini_batch_size"] = naive["mini_batch_size"]
    path = out / f"{key}.json"
    run_bench(RECIPE, flags, BenchRequest(ablate=True, rows=key, steps=2 if is_tiny else STEPS, json=str(path)), say)
    taken = max(expect_seconds(out), time.monotonic() - started)
    (out / "longest.txt").write_text(f"{taken:.1f}", encoding="utf-8")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_record(out: Path, key: str) -> dict[str, Any] | None:
    """A measured row, with the micro-batch that it was measured with; None if it is not measured."""
    path = out / f"{key}.json"
    if not path.is_file():
        return None
    try:
        bench = json.loads(path.read_text(encoding="utf-8"))
        (row,) = bench["rows"]
    except (ValueError, KeyError):
        raise UserError(f"{path} is not a result of gptmill bench; remove it") from None
    return {**row, "mini_batch_size": bench["mini_batch_size"]}


def report(records: dict[str, dict[str, Any]]) -> int:
    """Prints 003's table beside the measured one, the other rows, and the verdicts."""
    print_heading("003: speed and memory of each optimization")
    print(
        "Each optimization alone, on a naive run: fp32, unfused attention, nothing compiled. Those of the\n"
        "architecture are compared with separate QKV projections, GELU and untied embeddings; so are all together.\n"
    )
    cells = []
    for claim in (claim for claim in CLAIMS if claim.row in records):
        speed, memory = compare(records, claim.row, claim.baseline)
        cells.append((claim.title, claim.speed, speed, claim.memory, memory))
    print_table(("", "speed, 003", "measured", "memory, 003", "measured"), cells)
    rows = [(row.title, *describe(records[row.key]), *compare(records, row.key)) for row in ROWS if row.key in records]
    print_table(("row of gptmill bench --ablate", "tokens/s", "memory", "MFU", "speed", "memory"), rows)
    found = [records.get(key, {"problem": "not measured"}) for key in (PLAIN_KEY, ALL_KEY)]
    if any("problem" in record for record in found):
        print("there is no figure for all together")
        return 1
    plain, best = found
    times = best["tokens_per_second"] / plain["tokens_per_second"]
    saved = 1 - best["memory_gb"] / plain["memory_gb"]
    is_fast = print_verdict(
        f"{LEAST_SPEED:g} to {MOST_SPEED:g} times as fast",
        f"{times:.1f} times{', more than that' if times > MOST_SPEED else ''}",
        is_met=times >= LEAST_SPEED,
    )
    is_small = print_verdict("60 to 70 % less memory", f"{saved:.0%} less", is_met=saved >= LEAST_SAVED)
    return 0 if is_fast and is_small else 1


def describe(record: dict[str, Any]) -> tuple[str, str, str]:
    if "problem" in record:
        return record["problem"], "", ""
    mfu = "–" if record["mfu"] is None else f"{record['mfu']:.1%}"
    return f"{record['tokens_per_second']:,.0f}", f"{record['memory_gb']:.2f} GB", mfu


def compare(records: dict[str, dict[str, Any]], key: str, baseline: str = "") -> tuple[str, str]:
    """Speed and memory relative to a baseline, by default the row's own; empty where one of them is missing."""
    record = records[key]
    base = records.get(baseline or next(row.baseline for row in ROWS if row.key == key))
    if base is None or "problem" in record or "problem" in base:
        return "", ""
    speed = record["tokens_per_second"] / base["tokens_per_second"]
    memory = record["memory_gb"] / max(base["memory_gb"], 1e-9) - 1
    return f"{speed:.2f}×", f"{memory:+.0%}".replace("-", "−")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
