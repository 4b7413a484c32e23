"""The training time at a moment: processes add up, the time between them and lost steps do not count."""

from __future__ import annotations

from pathlib import Path

import pytest
from reporting_events import START, make_start, make_step, write_run

from gptmill.runs.events import Event
from gptmill.runs.training_time import read_training_clock

# Steps 6 and later of the first process were lost: the log was cut back to step 5 before the second one started.
EVENTS: list[Event] = [
    make_start(),
    *(make_step(step) for step in range(1, 6)),
    make_start(5, time=START + 1000),
    make_step(6, time=START + 1002),
    make_start(6, time=START + 5000),
]


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [(-1.0, None), (0.0, 0.0), (8.0, 8.0), (1000.0, 10.0), (1002.0, 12.0), (5000.0, 12.0), (5007.0, 19.0)],
)
def test_processes_add_up(tmp_path: Path, moment: float, seconds: float | None) -> None:
    assert read_training_clock(write_run(tmp_path, EVENTS).events).measure(START + moment) == seconds


@pytest.mark.parametrize(
    "text", [None, "", '{"event": "RunStarted", "step"', "x\n" * 9], ids=["no file", "", "cut", "x"]
)
def test_a_damaged_or_missing_log_tells_no_time(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "events.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert read_training_clock(path).measure(START) is None
