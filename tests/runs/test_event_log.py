"""Event logs are read while they grow, after a kill, and after a newer version has written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptmill.runs.event_log import TAIL_BYTES, read_events, read_last_step, read_recent_events, read_records
from gptmill.runs.events import Event, SampleDrawn, StepLogged, Warned, to_json
from gptmill.runs.trackers.run_files import JsonLines

UNKNOWN = '{"event": "Unheard", "step": 9, "time": 0.0, "detail": 1}'


def make_step(step: int) -> StepLogged:
    return StepLogged(step, 0.0, 2.0, 0.1, 1.0, 1.0, 0.0, time=0.0)


def write(path: Path, *lines: Event | str, ending: str = "\n") -> None:
    path.write_text("\n".join(line if isinstance(line, str) else to_json(line) for line in lines) + ending)


def test_a_missing_log_is_empty_only_where_that_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_last_step(path) == 0
    assert read_recent_events(path) == read_events(path, missing_ok=True) == []
    with pytest.raises(FileNotFoundError):
        read_events(path)


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_step(1), "{}", "[]", "null", '"text"', '{"event": "StepLogged", "step": "2"}', UNKNOWN, "\x00")
    assert read_events(path) == [make_step(1)]


def test_a_line_nested_deeply_is_no_event_and_no_record(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_step(1), '{"event": ' + "[" * 100_000)
    assert read_events(path) == [make_step(1)]
    with pytest.raises(ValueError, match="nested too deeply"):
        read_records(path)
    JsonLines(path, resumed_at=1).close()
    assert path.read_text() == to_json(make_step(1)) + "\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    assert read_recent_events(tmp_path / "events.jsonl") == []


def test_records_keep_what_this_version_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_step(1), UNKNOWN, '{"event": "St', ending="")
    assert [record["event"] for record in read_records(path)] == ["StepLogged", "Unheard"]
    assert read_records(path)[1]["detail"] == 1


def test_the_last_step_of_a_growing_log_is_that_of_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_step(7), Warned(8, "disk", "full"), to_json(make_step(9))[:30], ending="")
    assert read_last_step(path) == 7
    write(path, make_step(7), make_step(8))
    assert read_last_step(path) == 8
    write(path, make_step(5))  # a resumed run has truncated it
    assert read_last_step(path) == 5


def test_the_last_step_is_found_before_a_long_tail_of_other_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_step(3), SampleDrawn(3, "", "x" * TAIL_BYTES, time=0.0))
    assert read_last_step(path) == 3
    assert len(read_recent_events(path)) == 2
    write(path, *map(make_step, range(1, 1001)))
    recent = read_recent_events(path)
    assert 1 < len(recent) < 1000
    assert recent[-1] == make_step(1000)
