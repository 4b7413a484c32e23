"""Markdown of the benchmarks of the founding documents: the command, the machine, tables and verdicts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpt2_speed import describe_machine

# The smallest model and batch, on a CPU: shows that a script works, and measures nothing.
TINY_FLAGS = """--device cpu --precision fp32 --no_compile --num_layers 1 --embd_size 16 --num_heads 2 --ffn_size 32
    --context_length 16 --mini_batch_size 2 --total_batch_size 64 --warmup_steps 0 --eval_tokens 32
    --sample_tokens 0""".split()


def print_heading(title: str) -> None:
    """Prints what is measured, by which command, and on which machine."""
    script = Path(sys.argv[0])
    path = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    print(f"## {title}\n\n```text\n{shlex.join(['python', str(path), *sys.argv[1:]])}\n```\n{describe_machine()}\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is text and whose others are numbers."""
    print(f"| {' | '.join(header)} |\n|---|{'---:|' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def print_verdict(claim: str, found: str, *, is_met: bool) -> bool:
    """Prints whether a claim holds, with what was found; returns it."""
    print(f"- {claim}: {found}, {'met' if is_met else 'missed'}", flush=True)
    return is_met
