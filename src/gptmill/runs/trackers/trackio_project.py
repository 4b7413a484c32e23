"""Trackio: a local project of all runs of a log directory, in one SQLite file. Reaches no network, starts no server.

Written through Trackio's storage instead of its `init` and `log`: those start threads, may ask the Hugging Face Hub who
the user is, and cannot take a step back.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gptmill.runs.directory import RunDirectory
from gptmill.runs.display import make_plain
from gptmill.runs.event_log import read_events
from gptmill.runs.events import CheckpointSaved, Event, HistogramsTaken, RunFinished, RunStarted, SampleDrawn
from gptmill.runs.histogram_buckets import trim
from gptmill.runs.trackers.metric_names import describe_incident, list_histograms, list_scalars

PROJECT = "gptmill"
FLUSH_SECONDS = 2.0  # a transaction costs as much as a hundred rows
LOCK_SECONDS = 30.0


class TrackioProject:
    """Writes each event as one row with an id of its own, so that writing it again changes nothing."""

    def __init__(self, run: RunDirectory, resumed_at: int) -> None:
        self._directory = run
        self._run_id = self._name = run.path.name
        self._rows: list[tuple[Event, dict[str, Any]]] = []
        self._config: dict[str, str] = {}
        self._last_flush = time.monotonic()
        self._storage = _open_storage(run.path.parent / ".trackio")
        self.rewind(resumed_at or -1)  # a new run may have the name of an older one
        for event in read_events(run.events, missing_ok=True):  # a crash may have kept some of it from Trackio
            if event.step <= resumed_at:
                self._add(event)

    def track(self, event: Event) -> None:
        self._add(event)
        is_due = time.monotonic() - self._last_flush > FLUSH_SECONDS
        if is_due or isinstance(event, CheckpointSaved | RunFinished):
            self._flush()

    def rewind(self, step: int) -> None:
        self._flush()
        self._storage.init_db(PROJECT)
        path = self._storage.get_project_db_path(PROJECT)
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS)) as connection, connection:
            for table in ("metrics", "alerts"):
                connection.execute(f"DELETE FROM {table} WHERE run_id = ? AND step > ?", (self._run_id, step))

    def close(self) -> None:
        self._flush()

    def _add(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._config = event.config
        if values := self._make_values(event):
            self._rows.append((event, values))
        if incident := describe_incident(event):
            self._alert(event, make_plain(incident))

    def _make_values(self, event: Event) -> dict[str, Any]:
        values: dict[str, Any] = dict(list_scalars(event))
        if isinstance(event, SampleDrawn):
            from trackio import Table

            rows = [[make_plain(event.prompt), make_plain(text), name] for name, text in event.texts.items()]
            table = Table(columns=["prompt", "text", "sample"], data=rows)
            values["sample"] = table._to_dict(PROJECT, self._name, event.step)
        elif isinstance(event, HistogramsTaken):
            from trackio import Histogram

            for name, counts in list_histograms(event).items():
                if any(counts):
                    values[name] = Histogram(np_histogram=trim(counts))._to_dict()
        return values

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._last_flush = time.monotonic()
        self._storage.bulk_log(
            PROJECT,
            self._name,
            [values for _, values in rows],
            steps=[event.step for event, _ in rows],
            timestamps=[_format_time(event) for event, _ in rows],
            config=self._config or None,
            log_ids=[f"{self._make_key(event)} {next(iter(values))}" for event, values in rows],
            run_id=self._run_id,
        )

    def _alert(self, event: Event, text: str) -> None:
        self._storage.bulk_alert(
            PROJECT,
            self._name,
            titles=["gptmill"],
            texts=[text],
            levels=["warn"],
            steps=[event.step],
            timestamps=[_format_time(event)],
            alert_ids=[f"{self._make_key(event)} {event.time}"],
            run_id=self._run_id,
        )

    def _make_key(self, event: Event) -> str:
        return f"{self._run_id} {event.step} {type(event).__name__}"


def _open_storage(folder: Path) -> Any:
    """Trackio's storage, in this folder unless the user has set another for Trackio."""
    from trackio import sqlite_storage

    if "TRACKIO_DIR" not in os.environ:
        vars(sqlite_storage)["TRACKIO_DIR"] = folder  # else a folder in the user's cache, chosen at import
    return sqlite_storage.SQLiteStorage


def _format_time(event: Event) -> str:
    return datetime.fromtimestamp(event.time, UTC).isoformat()
