"""The tracker that writes the run history, ledger.jsonl."""

from __future__ import annotations

from gptmill.runs.append_file import AppendOnlyFile
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_json import to_json
from gptmill.runs.events import Event
from gptmill.runs.history import HISTORY_EVENTS, find_crash


class HistoryFile:
    """Appends to the run history. Open it before events.jsonl is truncated, which holds the last activity of a crash.

    Every entry survives a power failure; one that a full disk refuses is written with the next.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._file = AppendOnlyFile(run.history, durable=True)
        self._file.keep_only(lambda _line: True)  # drops a line that a kill cut short
        crash = find_crash(run)
        if crash is not None:
            self.track(crash)

    def track(self, event: Event) -> None:
        if isinstance(event, HISTORY_EVENTS):
            self._file.write_line(to_json(event))

    def rewind(self, step: int) -> None:
        """Keeps all entries: a rollback is part of the history."""

    def close(self) -> None:
        self._file.close()
