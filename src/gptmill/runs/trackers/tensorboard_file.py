"""One event file of TensorBoard, written by a thread: training waits neither for the conversion nor for the disk."""

from __future__ import annotations

import os
import queue
import re
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.runs.events import Event
from gptmill.runs.trackers.crc32c import compute_crc32c
from gptmill.runs.trackers.tensorboard_summaries import list_records, make_header, make_purge

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event as Record

MAX_QUEUED = 1000  # events that wait for the thread
EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.")
MASK = 0xA282EAD8
MIN_LONG = 1000  # bytes; up to that, TensorBoard's own checksum is as fast


class EventFile:
    """Takes events until it is closed. What the thread raises is raised by the next call."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """`purge_step` makes TensorBoard discard this step and later ones of the files before."""
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_new_timestamp(folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (folder / name).open("wb")
        self._write(make_header())
        if purge_step is not None:
            self._write(make_purge(purge_step))
        self._flush_file()
        self._error: Exception | None = None
        self._events: queue.Queue[Event | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="tracker TensorBoard", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        self._raise_error()
        self._events.put(event)

    def flush(self) -> None:
        """Waits until all events are in the file."""
        self._events.join()
        self._raise_error()
        self._flush_file()

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()
        self._file.close()
        self._raise_error()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                if self._error is None:
                    self._convert(event)
            except Exception as error:
                self._error = error
            finally:
                self._events.task_done()

    def _convert(self, event: Event) -> None:
        for record in list_records(event):
            self._write(record)
        if self._events.empty():
            self._flush_file()  # for those who watch

    def _write(self, record: Record) -> None:
        data = record.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _make_checksum(length) + data + _make_checksum(data))

    def _flush_file(self) -> None:
        self._file.flush()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _make_checksum(data: bytes) -> bytes:
    """The masked CRC-32C of the record format."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

    crc: int = crc32c(data) if len(data) < MIN_LONG else compute_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def _wait_for_new_timestamp(folder: Path) -> None:
    """Waits for the next second if needed: TensorBoard sorts files by name, and a second has one file only."""
    seconds = [int(found[1]) for path in folder.glob("*") if (found := EVENT_FILE.match(path.name))]
    if int(time.time()) == max(seconds, default=0):
        time.sleep(1 - time.time() % 1)
