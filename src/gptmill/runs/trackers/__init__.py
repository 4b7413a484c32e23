"""Trackers: each is fed every event of a run and writes it where people look. `open_trackers` lists them all."""

from __future__ import annotations

from gptmill.config.run import TrackingConfig
from gptmill.runs.directory import RunDirectory
from gptmill.runs.trackers.console import build_console
from gptmill.runs.trackers.history_file import HistoryFile
from gptmill.runs.trackers.protocol import Tracker, TrackerGroup
from gptmill.runs.trackers.run_files import JsonLines, SampleFiles, TextLog
from gptmill.runs.trackers.tensorboard import TensorBoard


def open_trackers(
    run: RunDirectory, config: TrackingConfig, resumed_at: int, *, is_evaluated: bool = True
) -> TrackerGroup:
    """The run's trackers, set back to the step that it goes on from, so that no step is told twice."""
    trackers: list[Tracker] = [
        HistoryFile(run),  # first: it looks for signs of a crash in what the others cut back
        JsonLines(run.events, resumed_at, is_evaluated=is_evaluated),
        TextLog(run.text_log, resumed_at, is_evaluated=is_evaluated),
        SampleFiles(run.samples, resumed_at),
        build_console(),
    ]
    if config.use_tensorboard:
        trackers.append(TensorBoard(run.tensorboard, resumed_at))
    return TrackerGroup(trackers)


__all__ = ["Tracker", "TrackerGroup", "open_trackers"]
