"""The chart and the report at the end of a run, for short, broken and strange runs too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from reporting_events import START, make_events, write_run

from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, Event, RunFinished, SampleDrawn, StepLogged, TrainEvalDone, to_json
from gptmill.runs.reporting.terminal_report import make_report, make_summary
from gptmill.runs.reporting.text_chart import BLANK, draw_chart


def make_run(tmp_path: Path, events: list[Event], ending: str = "") -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.events.write_text("".join(to_json(event) + "\n" for event in events) + ending, encoding="utf-8")
    return run


def make_step(step: int, loss: float) -> StepLogged:
    return StepLogged(step, step / 10, loss, 1e-3, 1.0, 1000.0, 5.0)


def find_row(report: str, name: str) -> str:
    """The cells of a row of a table, one space apart."""
    (row,) = [line for line in report.splitlines() if line.strip().startswith(f"{name} ")]
    return " ".join(row.strip().removeprefix(name).split())


def has_dots(text: str) -> bool:
    return any(BLANK < ord(character) < BLANK + 256 for character in text)


@pytest.mark.parametrize(("width", "height"), [(60, 12), (20, 4), (100, 30)])
def test_a_chart_has_the_size_asked_for(width: int, height: int) -> None:
    curve = [(float(x), math.sin(x)) for x in range(50)]
    lines = draw_chart(curve, [(0.0, 0.5), (49.0, -0.5)], width, height).split("\n")
    rows, axis = lines[:height], lines[height:]
    assert len(axis) == 2
    assert {len(row.partition("┤")[2]) for row in rows} == {width}
    assert axis[0].endswith("└" + "─" * width)
    assert {len(line) for line in lines} == {len(lines[0])}


def test_a_chart_marks_the_marks_and_labels_the_ranges() -> None:
    chart = draw_chart([(0.0, 4.0), (1000.0, 2.0)], [(0.0, 5.0), (500.0, 3.0), (1000.0, 1.0)], 40, 9)
    lines = chart.split("\n")
    assert chart.count("o") == 3
    assert lines[0].startswith("5.000 ┤o")
    assert lines[8].startswith("1.000 ┤")
    assert lines[8].endswith("o")
    assert lines[4].partition("┤")[2].index("o") in (19, 20)
    assert lines[-1].split() == ["0", "1,000"]


def test_a_falling_curve_falls_from_the_left_to_the_right() -> None:
    lines = draw_chart([(float(x), 10.0 - x) for x in range(11)], [], 11, 11).split("\n")[:11]
    places = [[i for i, cell in enumerate(line.partition("┤")[2]) if has_dots(cell)] for line in lines]
    assert places[0][0] == 0
    assert places[-1][-1] == 10
    assert [row[0] for row in places if row] == sorted(row[0] for row in places if row)


def test_a_chart_of_one_point_or_of_a_flat_line_is_drawn() -> None:
    assert has_dots(draw_chart([(1.0, 2.0)], []))
    assert has_dots(draw_chart([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], [(3.0, 2.0), (1.0, 2.0)]))


def test_the_report_holds_the_curve_and_the_first_and_the_last_sample(tmp_path: Path) -> None:
    events: list[Event] = [EvalDone(0, 5.5, 64, 0.1), SampleDrawn(0, "Say ", "first words")]
    events += [make_step(step, 5.0 - step / 100) for step in range(1, 301)]
    events += [SampleDrawn(150, "Say ", "middle words"), EvalDone(300, 2.125, 64, 0.1)]
    events += [SampleDrawn(300, "Say ", "last words"), RunFinished(300, "finished", 3.0)]
    report = make_report(make_run(tmp_path, events))
    assert has_dots(report)
    assert find_row(report, "validation") == "5.5000 2.1250 −61.4 % 2.1250 at step 300 245 → 8.37"
    assert "Say first words" in report
    assert "Say last words" in report
    assert "middle words" not in report
    assert report.index("first words") < report.index("last words")


def test_the_report_tells_the_last_loss_of_each_corpus_and_of_the_averaged_weights(tmp_path: Path) -> None:
    evals: list[Event] = [
        EvalDone(0, 5.5, 64, 0.1, {"data/a": 5.25, "data/b": 5.75}),
        EvalDone(9, 2.5, 64, 0.1, {"data/a": 2.25, "data/b": 2.75}, 2.125),
    ]
    report = make_report(make_run(tmp_path, evals))
    for name, loss in {"of data/a": "2.2500", "of data/b": "2.7500", "of the EMA weights": "2.1250"}.items():
        assert find_row(report, name) == loss
    assert "5.2500" not in report


def test_the_report_of_one_step_is_made(tmp_path: Path) -> None:
    run = make_run(tmp_path, [make_step(1, 5.0), EvalDone(1, 4.5, 64, 0.1), SampleDrawn(1, "a", "bc")])
    report = make_report(run)
    assert find_row(report, "validation") == "4.5000 90.02"
    assert report.count("abc") == 1


def test_the_report_without_evaluations_still_shows_samples(tmp_path: Path) -> None:
    assert "abc" in make_report(make_run(tmp_path, [make_step(1, 5.0), SampleDrawn(1, "a", "bc")]))


def test_the_report_of_a_run_without_events_is_empty(tmp_path: Path) -> None:
    assert make_report(make_run(tmp_path, [])) == ""


def test_losses_that_are_not_finite_are_left_out_of_the_curve(tmp_path: Path) -> None:
    losses = [5.0, math.nan, 4.0, math.inf, 3.0]
    events: list[Event] = [make_step(step, loss) for step, loss in enumerate(losses, 1)]
    events += [EvalDone(2, math.nan, 64, 0.1), EvalDone(5, 3.5, 64, 0.1)]
    report = make_report(make_run(tmp_path, events))
    assert has_dots(report)
    assert "nan" not in report
    assert find_row(report, "validation") == "3.5000 33.12"


def test_a_run_of_nothing_but_nan_is_reported(tmp_path: Path) -> None:
    events = [make_step(1, math.nan), EvalDone(1, math.nan, 64, 0.1), SampleDrawn(1, "a", "bc")]
    assert "abc" in make_report(make_run(tmp_path, events))


def test_control_characters_of_a_sample_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = "a\x1b[2Jb\rc\x07d\x00e\u2028f\x9bg\u202eh\nnext\tline é 漢字"
    report = make_report(make_run(tmp_path, [SampleDrawn(1, "", text)]))
    assert "a·[2Jb·c·d·e·f·g·h\nnext\tline é 漢字" in report
    assert not set("\x1b\r\x07\x00\u2028\x9b\u202e") & set(report)


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    kept: list[Event] = [make_step(1, 5.0), SampleDrawn(1, "", "line\u2028separator")]
    run = make_run(tmp_path, kept, ending=to_json(make_step(2, 4.0))[:40])
    assert read_events(run.events) == kept


def test_events_of_a_newer_version_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, [make_step(1, 5.0)], ending='{"event": "Unheard", "step": 2, "time": 0.0}\n')
    assert read_events(run.events) == read_events(make_run(tmp_path, read_events(run.events)).events)
    assert [event.step for event in read_events(run.events)] == [1]


def test_the_summary_tells_losses_perplexities_tokens_speed_time_and_phases(tmp_path: Path) -> None:
    """The run of `reporting_events`: 100 steps of two seconds, warm-up until step 10, decay from step 81 on."""
    events = make_events()
    events[1:1] = [TrainEvalDone(0, 9.0, 64, 0.0, time=START)]
    events[-1:-1] = [TrainEvalDone(100, 1.5, 64, 0.0, time=START + 200)]
    events = [replace(event, samples_per_second=25.0) if isinstance(event, StepLogged) else event for event in events]
    summary = make_summary(write_run(tmp_path, events))
    assert find_row(summary, "validation") == "10.0000 1.2000 −88.0 % 1.0000 at step 80 22,026 → 3.32"
    assert find_row(summary, "training windows") == "9.0000 1.5000 −83.3 % 1.5000 at step 100 8,103 → 4.48"
    assert find_row(summary, "training  ").startswith("9.8750 1.8333 −81.4 %")
    assert find_row(summary, "tokens") == "100,000 in 100 steps"
    assert find_row(summary, "mean speed") == "500 tokens/s, 25 samples/s, 2,000 ms per step, MFU 20 %"
    assert find_row(summary, "time") == "3 min 20 s (steps 100 %)"
    phases = {name: find_row(summary, name) for name in ("warm-up", "main", "decay")}
    assert phases["warm-up"].startswith("1-10 0.0001 → 0.001 ")
    assert phases["main"].split()[0] == "11-80"
    assert phases["main"].endswith("1.0000 500 2 min 20 s")
    assert phases["decay"].endswith("1.2000 500 40.0 s")


def test_the_summary_in_ascii_has_ascii_only(tmp_path: Path) -> None:
    summary = make_summary(write_run(tmp_path, make_events()), "ascii")
    assert summary.isascii()
    assert "-88.0 %" in summary
    assert "22,026 -> 3.32" in summary


def test_a_run_without_events_has_no_summary(tmp_path: Path) -> None:
    assert make_summary(make_run(tmp_path, [])) == ""
