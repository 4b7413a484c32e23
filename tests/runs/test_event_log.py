"""Event logs are read while they grow, after a kill, and after a newer version has written them."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gptmill.config.run import TrackingConfig
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import TAIL_BYTES, read_events, read_last_step, read_recent_events, read_records
from gptmill.runs.events import EvalDone, Event, RunStarted, SampleDrawn, StepLogged, Warned, to_json
from gptmill.runs.history_text import describe_history
from gptmill.runs.reporting.terminal_report import make_report
from gptmill.runs.trackers import open_trackers
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


STEP_RECORD = json.loads(to_json(make_step(3)))
START_RECORD = json.loads(to_json(RunStarted(0, "r", 9, 8, 1, "CPU", "fp32", 1, "c", "t", "0", "2", None, time=1.0)))
EVAL_RECORD = json.loads(to_json(EvalDone(3, 2.0, 64, 0.1, time=2.0)))
HOSTILE = [
    *({**STEP_RECORD, "event": value} for value in ([], ["StepLogged"], {}, 7, None, True)),
    *({**STEP_RECORD, "step": value} for value in ("3", 3.5, None, True, -1, 10**30, 10**400, [3], math.nan)),
    *({**STEP_RECORD, "time": value} for value in ("0", None, -5.0, 1e300, 10**400, math.inf, math.nan, [])),
    *({**STEP_RECORD, "loss": value} for value in ("2.0", [], {}, True, 10**400)),
    *({**STEP_RECORD, "seconds": value} for value in ("1", [1.0])),
    *({**STEP_RECORD, "by_corpus": value} for value in ({"a": "b"}, [1.0], "text")),
    *({**EVAL_RECORD, "val_loss": value} for value in ("low", [1.0], 10**400)),
    *({**EVAL_RECORD, "ema_loss": value} for value in ("low", {})),
    *({**START_RECORD, "max_steps": value} for value in ("many", None, 1e3, 10**30)),
    *({**START_RECORD, "changes": value} for value in ("text", [1], None, {"a": 1})),
    *({**START_RECORD, "version": value} for value in (1, None, ["0"])),
]


@pytest.mark.parametrize("record", HOSTILE, ids=lambda record: ", ".join(list_strange(record)))
def test_values_that_no_event_has_make_no_event(record: dict[str, Any], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lines = [json.dumps(START_RECORD), json.dumps(STEP_RECORD), json.dumps(EVAL_RECORD)]
    for path in (run.events, run.history):
        write(path, lines[0], json.dumps(record), *lines[1:], json.dumps(record))
    assert len(read_events(run.events)) == 3
    assert re.search(r"^validation +2\.0000 +7\.39$", make_report(run), re.MULTILINE)
    assert "last activity, at step 3" in describe_history(run)
    for tracker in open_trackers(run, TrackingConfig(), 3)._trackers:
        tracker.close()
    assert [event.step for event in read_events(run.events)] == [0, 3, 3]


def list_strange(record: dict[str, Any]) -> list[str]:
    usual = (STEP_RECORD, EVAL_RECORD, START_RECORD)
    found = min(([name for name in record if record[name] != each.get(name)] for each in usual), key=len)
    return [f"{name} {record[name]!r:.20}" for name in found]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320])
def test_numbers_out_of_all_proportion_are_reported_without_a_traceback(value: float, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    floats = [name for name, known in STEP_RECORD.items() if isinstance(known, float) and name != "time"]
    strange = {**STEP_RECORD, **dict.fromkeys(floats, value), "step": 4}
    evaluated = {
        **EVAL_RECORD,
        "step": 4,
        "val_loss": value,
        "ema_loss": value,
        "seconds": value,
        "by_corpus": {"a": value},
    }
    start = {**START_RECORD, "val_loss": value, "flops_per_token": value}
    lines = [json.dumps(record) for record in (start, STEP_RECORD, strange, EVAL_RECORD, evaluated, strange)]
    write(run.events, *lines)
    write(run.history, lines[0])
    assert "2.000" in make_report(run)
    assert "goodput" in describe_history(run)


def test_a_heartbeat_from_the_end_of_time_is_ignored(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write(run.history, json.dumps(START_RECORD))
    run.heartbeat.mkdir()
    for number, text in enumerate(["NaN", "1e300", "Infinity", "1" * 400, "[" * 100_000, '"x"']):
        (run.heartbeat / f"rank_{number}.json").write_text(f'{{"time": {text}}}', encoding="utf-8")
    assert "last activity, at step 0" in describe_history(run)
