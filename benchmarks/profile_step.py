"""Profiles training steps on a GPU: the kernels of one step, longest first.

    python benchmarks/profile_step.py [--after 20] [--steps 3] [--top 40] train gpt2-124m --data_dir DIR …

Runs a gptmill command line in this process. After --after steps it profiles --steps steps, prints the table, and lets
the run finish. Milliseconds are GPU time per step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gptmill.cli.main import run_guarded
from gptmill.training import loop
from gptmill.training.step_stats import StepStats


class Watcher:
    """Replaces the training step and profiles some of the calls."""

    def __init__(self, after: int, steps: int, top: int) -> None:
        self._train_step, self._after, self._steps, self._top = loop.train_step, after, steps, top
        self._profiler: Any = None
        self._done = 0
        self._started = 0.0

    def train_step(self, *arguments: Any) -> StepStats:
        if self._done == self._after:
            torch.cuda.synchronize()
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.__enter__()
            self._started = time.perf_counter()
        stats = self._train_step(*arguments)
        self._done += 1
        if self._done == self._after + self._steps:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self._started
            self._profiler.__exit__(None, None, None)
            print(make_table(self._profiler.events(), self._steps, seconds, self._top), flush=True)
        return stats


def make_table(events: Any, steps: int, seconds: float, top: int) -> str:
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name != "Activity Buffer Request":
            times[event.name].append(event.device_time_total / 1000)
    rows = sorted(times.items(), key=lambda row: -sum(row[1]))
    busy = sum(sum(row) for row in times.values()) / steps
    lines = [
        f"step: {seconds / steps * 1000:.2f} ms, kernels {busy:.2f} ms",
        "| ms | calls | kernel |",
        "|--:|--:|---|",
    ]
    lines += [f"| {sum(row) / steps:.3f} | {len(row) / steps:g} | {name[:150]} |" for name, row in rows[:top]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Profiles the kernels of training steps.")
    parser.add_argument("--after", type=int, default=20, help="steps before the profile starts")
    parser.add_argument("--steps", type=int, default=3, help="steps to profile")
    parser.add_argument("--top", type=int, default=40, help="kernels to print")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="train RECIPE …")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here; use a machine that has one")
    vars(loop)["train_step"] = Watcher(options.after, options.steps, options.top).train_step
    return run_guarded(options.command)


if __name__ == "__main__":
    sys.exit(main())
