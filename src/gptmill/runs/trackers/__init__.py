"""Trackers: each receives every event of a run and records it in its own format. `open_trackers` lists them all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gptmill.config.plugins import PARTS, split_names
from gptmill.config.run import TrackingConfig
from gptmill.runs.directory import RunDirectory
from gptmill.runs.trackers.background import Background
from gptmill.runs.trackers.console import build_console
from gptmill.runs.trackers.detailed_log import DetailedLog
from gptmill.runs.trackers.history_file import HistoryFile
from gptmill.runs.trackers.protocol import Tracker, TrackerGroup
from gptmill.runs.trackers.requirements import check_trackers
from gptmill.runs.trackers.run_files import JsonLines, SampleFiles, TextLog
from gptmill.runs.trackers.tensorboard import TensorBoard
from gptmill.runs.trackers.trackio_project import TrackioProject
from gptmill.runs.trackers.weights_and_biases import WeightsAndBiases, abandon_wandb, find_wandb_mode

TRACKERS: dict[str, Callable[[Path, int, Any], Tracker]] = {}
"""Registered trackers. Each is called with the run's folder, the step that it resumes from (0 for a new run), and its
options."""


def open_trackers(
    run: RunDirectory, config: TrackingConfig, resumed_at: int, *, is_evaluated: bool = True, is_quiet: bool = False
) -> TrackerGroup:
    """Opens the run's trackers, rewound to the step it resumes from, so that no step is recorded twice."""
    trackers: list[Tracker] = [
        HistoryFile(run),  # first: it looks for a crash in the events that the next one truncates
        JsonLines(run.events, resumed_at, is_evaluated=is_evaluated),
        TextLog(run.text_log, resumed_at, is_evaluated=is_evaluated),
        SampleFiles(run.samples, resumed_at),
        DetailedLog(run.detailed_log),
    ]
    if not is_quiet:
        trackers.append(build_console(config.print_freq))
    if config.use_tensorboard:
        trackers.append(TensorBoard(run.tensorboard, resumed_at))
    if config.use_wandb and find_wandb_mode(config) != "disabled":
        trackers.append(
            Background("W&B", partial(WeightsAndBiases, run, config, is_evaluated=is_evaluated), abandon_wandb)
        )
    if config.use_trackio:
        trackers.append(Background("Trackio", partial(TrackioProject, run, resumed_at)))
    for name in split_names(config.trackers):
        options: Any = config.tracker_parts.find(PARTS["tracker", name].options)
        try:
            trackers.append(TRACKERS[name](run.path, resumed_at, options))
        except Exception as error:  # as later: a tracker cannot end a run
            sys.stderr.write(f"warning: tracker {name} cannot be opened ({error}); the run continues without it\n")
    return TrackerGroup(trackers)


__all__ = ["TRACKERS", "Tracker", "TrackerGroup", "check_trackers", "open_trackers"]
