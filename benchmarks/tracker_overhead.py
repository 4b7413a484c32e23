"""Cost of the trackers: step time with all of them, and with none, in interleaved blocks of one run.

    python benchmarks/tracker_overhead.py [--block 20] train demo --max_steps 440 --use_tensorboard --use_trackio \
        --use_wandb --wandb_mode offline --histogram_freq 20

Runs a gptmill command line in this process. In every other block of steps, no tracker gets any event, events.jsonl
included, and no histograms are taken. Between blocks it waits, untimed, for the trackers' threads; evaluations and
checkpoints are not timed either. The first two blocks are a warm-up. Prints the median step of both kinds of block, and
the median of the differences of neighbours. Every block has the same number of histograms, so that none of them hides
from the median: --block must be a multiple of --histogram_freq.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.runs.events import Event, HistogramsTaken, StepLogged
from gptmill.runs.trackers import protocol
from gptmill.runs.trackers.background import Background
from gptmill.training import loop
from gptmill.training.step_stats import StepStats


class Switch:
    """Replaces the training step and the trackers, and turns the trackers on and off in blocks."""

    def __init__(self, block: int) -> None:
        self._block, self._train_step, self._track = block, loop.train_step, protocol.TrackerGroup.track
        self._evaluate_and_save = loop.evaluate_and_save
        self._group: Any = None
        self._done = 0
        self._started = 0.0
        self._paused_seconds = 0.0
        self._is_on = True
        self.seconds: list[float] = []

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Puts itself in the place of what it replaces, for a while."""
        vars(loop)["train_step"], vars(loop)["evaluate_and_save"] = self.train_step, self.evaluate_and_save
        protocol.TrackerGroup.track = lambda group, event: self.track(group, event)  # type: ignore[method-assign]
        try:
            yield
        finally:
            vars(loop)["train_step"], vars(loop)["evaluate_and_save"] = self._train_step, self._evaluate_and_save
            protocol.TrackerGroup.track = self._track  # type: ignore[method-assign]

    def track(self, group: Any, event: Event) -> None:
        self._group = group
        if self._is_on or not isinstance(event, StepLogged | HistogramsTaken):
            self._track(group, event)

    def evaluate_and_save(self, session: Any, state: Any, metrics: Any) -> None:
        is_pause, started = session.is_something_due(state), time.perf_counter()
        self._evaluate_and_save(session, state, metrics)
        if is_pause:
            self._paused_seconds += time.perf_counter() - started

    def train_step(self, state: Any, loader: Any, config: Any, *others: Any) -> StepStats:
        freq = config.tracking.histogram_freq
        if freq and self._block % freq:
            raise UserError(f"--block {self._block} must be a multiple of --histogram_freq {freq}")
        # Halfway between histograms: events come a step late, and must not fall into the next block.
        if self._done % self._block == self._block // 2:
            self._turn()
        self._done += 1
        if not self._is_on:
            config = replace(config, tracking=replace(config.tracking, histogram_freq=None))
        return self._train_step(state, loader, config, *others)

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._started:
            taken = time.perf_counter() - self._started - self._paused_seconds
            self.seconds.append(taken / self._block)
        for tracker in self._group._trackers:
            while isinstance(tracker, Background) and tracker._actions.qsize():
                time.sleep(0.01)
        self._is_on = len(self.seconds) % 2 == 0
        self._started, self._paused_seconds = time.perf_counter(), 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=20, help="steps with or without trackers in a row")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="train RECIPE …")
    options = parser.parse_args()
    code, pairs = measure(options.command, options.block)
    if code or not pairs:
        return code or parser.error("too few steps for two blocks of each kind")
    report(pairs, options.block)
    return 0


def measure(command: list[str], block: int) -> tuple[int, list[tuple[float, float]]]:
    """Runs the command; returns its exit code, and seconds per step of blocks with trackers and of those without."""
    switch = Switch(block)
    with switch.exchange():
        code = run_guarded(command)
    blocks = switch.seconds[2:]
    return code, list(zip(blocks[::2], blocks[1::2], strict=False))


def report(pairs: list[tuple[float, float]], block: int) -> tuple[float, float]:
    """Prints the median step of both kinds and their difference; returns that, and the step without trackers."""
    with_trackers, without = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    overhead = statistics.median(on - off for on, off in pairs)
    print(
        f"{len(pairs)} pairs of {block} steps: {1000 * with_trackers:.2f} ms a step with the trackers, "
        f"{1000 * without:.2f} ms without; difference {1000 * overhead:+.2f} ms ({overhead / without:+.1%})"
    )
    return overhead, without


if __name__ == "__main__":
    sys.exit(main())
