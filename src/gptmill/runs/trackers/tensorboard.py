"""TensorBoard: charts, samples, histograms, the config and the HParams tab."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.runs.events import CheckpointSaved, Event
from gptmill.runs.trackers.tensorboard_summaries import list_records, make_purge

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

MAX_UNFLUSHED = 1000
MAX_QUEUED = 1000  # summaries that wait for the writing thread; a slow disk must not hold up training
EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.")


class TensorBoard:
    """Writes one event file per process, and another one after each rollback or failed write.

    Each file's purge step makes TensorBoard discard the later steps of the files before it.
    """

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder = folder
        self._unflushed: list[tuple[int, list[Record]]] = []
        self._writer = _open_writer(folder, resumed_at + 1 if resumed_at else None)

    def track(self, event: Event) -> None:
        records = list_records(event)
        if records:
            self._unflushed.append((event.step, records))
        try:
            self._add(records)
            # After a kill, no step up to the checkpoint may be missing from the curves.
            if isinstance(event, CheckpointSaved) or len(self._unflushed) >= MAX_UNFLUSHED:
                self._flush()
        except OSError:
            self._start_over()

    def rewind(self, step: int) -> None:
        self.close()
        self._writer = _open_writer(self._folder, step + 1)

    def close(self) -> None:
        try:
            self._flush()
        except OSError:
            self._start_over()
        self._writer.close()

    def _add(self, records: list[Record]) -> None:
        for record in records:
            self._writer.add_event(record)

    def _flush(self) -> None:
        self._writer.flush()
        self._unflushed.clear()

    def _start_over(self, attempts: int = 3) -> None:
        """Writes the unflushed events to a new file: the thread that wrote the old one has died of the error."""
        with suppress(OSError):
            self._writer.close()
        try:
            self._writer = _open_writer(self._folder, min((step for step, _ in self._unflushed), default=None))
            for _, records in self._unflushed:
                self._add(records)
            self._flush()
        except OSError:
            if attempts == 1:
                raise
            self._start_over(attempts - 1)


def has_tensorboard_files(folder: Path) -> bool:
    return any(EVENT_FILE.match(path.name) for path in folder.glob("*"))


def _open_writer(folder: Path, purge_step: int | None) -> EventFileWriter:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # slow to import, and few runs need it

    _wait_for_new_timestamp(folder)
    writer = EventFileWriter(str(folder), max_queue_size=MAX_QUEUED)
    if purge_step is not None:
        writer.add_event(make_purge(purge_step))
    return writer


def _wait_for_new_timestamp(folder: Path) -> None:
    """Waits for the next second if needed: TensorBoard sorts files by name, and within a second 10 sorts before 9."""
    seconds = [int(found[1]) for path in folder.glob("*") if (found := EVENT_FILE.match(path.name))]
    if int(time.time()) == max(seconds, default=0):
        time.sleep(1 - time.time() % 1)
