"""Cost of the trackers: step time with all of them, and with none, in interleaved blocks of one run.

    python benchmarks/tracker_overhead.py [--block 20] train demo --max_steps 440 --use_tensorboard --use_trackio \
        --use_wandb --wandb_mode offline --histogram_freq 20

Runs a gptmill command line in this process. In every other block of steps, no tracker gets any event, events.jsonl
included, and no histograms are taken. Between blocks it waits, untimed, for the trackers' threads. The first two
blocks are a warm-up. Prints the median step of both kinds of block, and the median of the differences of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from gptmill.cli.main import run_guarded
from gptmill.runs.events import Event, StepLogged
from gptmill.runs.trackers import protocol
from gptmill.runs.trackers.background import Background
from gptmill.training import loop
from gptmill.training.step_stats import StepStats


class Switch:
    """Replaces the training step and the trackers, and turns the trackers on and off in blocks."""

    def __init__(self, block: int) -> None:
        self._block, self._train_step, self._track = block, loop.train_step, protocol.TrackerGroup.track
        self._group: Any = None
        self._done = 0
        self._started = 0.0
        self._is_on = True
        self.seconds: list[float] = []

    def track(self, group: Any, event: Event) -> None:
        self._group = group
        if self._is_on or not isinstance(event, StepLogged):
            self._track(group, event)

    def train_step(self, state: Any, loader: Any, config: Any, *others: Any) -> StepStats:
        if self._done % self._block == 0:
            self._turn()
        self._done += 1
        if not self._is_on:
            config = replace(config, tracking=replace(config.tracking, histogram_freq=None))
        return self._train_step(state, loader, config, *others)

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._started:
            self.seconds.append((time.perf_counter() - self._started) / self._block)
        for tracker in self._group._trackers:
            while isinstance(tracker, Background) and tracker._actions.qsize():
                time.sleep(0.01)
        self._is_on = len(self.seconds) % 2 == 0
        self._started = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=20, help="steps with or without trackers in a row")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="train RECIPE …")
    options = parser.parse_args()
    switch = Switch(options.block)
    vars(loop)["train_step"] = switch.train_step
    protocol.TrackerGroup.track = lambda group, event: switch.track(group, event)  # type: ignore[method-assign]
    code = run_guarded(options.command)
    blocks = switch.seconds[2:]
    if code or len(blocks) < 2:
        return code or parser.error("too few steps for two blocks of each kind")
    pairs = list(zip(blocks[::2], blocks[1::2], strict=False))
    with_trackers, without = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    overhead = statistics.median(on - off for on, off in pairs)
    print(
        f"{len(pairs)} pairs of {options.block} steps: {1000 * with_trackers:.2f} ms a step with the trackers, "
        f"{1000 * without:.2f} ms without; difference {1000 * overhead:+.2f} ms ({overhead / without:+.1%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
