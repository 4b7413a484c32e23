"""The tracker that writes ledger.jsonl."""

from __future__ import annotations

from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import Event, to_json
from gptmill.runs.history import KEPT, find_crash
from gptmill.runs.trackers.append_file import AppendedFile


class HistoryFile:
    """What the run lived through, never cut back. Open it before events.jsonl is: that holds the last signs of a crash.

    Every entry survives a power cut; one that a full disk refuses is written with the next.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._file = AppendedFile(run.ledger, durable=True)
        self._file.keep_only(lambda _line: True)  # but for one that a kill cut short
        crash = find_crash(run)
        if crash is not None:
            self.track(crash)

    def track(self, event: Event) -> None:
        if isinstance(event, KEPT):
            self._file.write_line(to_json(event))

    def rewind(self, step: int) -> None:
        """Forgets nothing: that the run went back is part of its life."""

    def close(self) -> None:
        self._file.close()
