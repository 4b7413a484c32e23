"""Loss plots: valid SVG, points at the right coordinates, and nothing outside the frame."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import PROJECT

sys.path.append(str(PROJECT / "benchmarks"))
CURVES, RUNS = importlib.import_module("curves"), importlib.import_module("runs")
SVG = "{http://www.w3.org/2000/svg}"


def list_circles(picture: str) -> list[tuple[float, float]]:
    return [(float(item.get("cx", 0)), float(item.get("cy", 0))) for item in parse(picture).iter(f"{SVG}circle")]


def list_texts(picture: str) -> list[str]:
    return [item.text or "" for item in parse(picture).iter(f"{SVG}text")]


def parse(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def write_run(folder: Path) -> Path:
    """Two steps of 1,000,000 tokens, with evaluations at both ends; training starts at 100 s."""
    step = {"event": "StepLogged", "tokens_per_second": 500_000.0, "seconds": 2.0}
    events: list[dict[str, Any]] = [
        {"event": "RunStarted", "step": 0, "time": 100.0},
        {"event": "EvalDone", "step": 0, "time": 101.0, "val_loss": 4.0},
        {**step, "step": 1, "time": 103.0, "loss": 3.5},
        {**step, "step": 2, "time": 105.0, "loss": None},
        {"event": "EvalDone", "step": 2, "time": 106.0, "val_loss": 3.0},
    ]
    folder.mkdir()
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("over", "validation", "training"),
    [
        ("seconds", [(1.0, 4.0), (6.0, 3.0)], [(3.0, 3.5)]),
        ("tokens", [(0.0, 4.0), (2.0, 3.0)], [(1.0, 3.5)]),
        ("steps", [(0.0, 4.0), (2.0, 3.0)], [(1.0, 3.5)]),
    ],
)
def test_a_curve_has_the_losses_of_the_events(
    over: str, validation: list[Any], training: list[Any], tmp_path: Path
) -> None:
    curve = CURVES.make_curve("x", RUNS.read_run(write_run(tmp_path / "run")), over)
    assert curve.validation == validation
    assert curve.training == training


def test_seconds_count_from_process_start_if_it_was_recorded(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path.parent / "process.json").write_text('{"started": 90.0, "origin": {}}', encoding="utf-8")
    assert CURVES.make_curve("x", RUNS.read_run(path)).validation == [(11.0, 4.0), (16.0, 3.0)]


@pytest.mark.parametrize("is_log", [False, True])
def test_lower_losses_are_lower_and_later_ones_further_right(is_log: bool) -> None:
    points = [(10.0, 8.0), (50.0, 4.0), (90.0, 2.0), (100.0, 1.9)]
    circles = list_circles(CURVES.draw([CURVES.Curve("x", points)], is_log=is_log))
    assert len(circles) == len(points)
    assert circles == sorted(circles)
    assert [y for _, y in circles] == sorted(y for _, y in circles)
    assert all(CURVES.LEFT <= x <= CURVES.WIDTH - CURVES.RIGHT for x, _ in circles)
    assert all(CURVES.TOP <= y <= CURVES.HEIGHT - CURVES.BOTTOM for _, y in circles)
    halves = [circles[1][1] - circles[0][1], circles[2][1] - circles[1][1]]  # 8 to 4, and 4 to 2
    assert halves[1] / halves[0] == pytest.approx(1.0 if is_log else 0.5, abs=0.01)


def test_losses_above_the_highest_one_shown_do_not_compress_the_rest() -> None:
    curve = CURVES.Curve("x", [(1.0, 11.0), (50.0, 3.1), (100.0, 3.0)])
    above, *rest = list_circles(CURVES.draw([curve], most=3.2))
    assert above[1] < CURVES.TOP  # clipped by the frame
    assert rest[1][1] - rest[0][1] > 100


def test_every_run_has_its_own_style_and_an_escaped_name() -> None:
    names = [f"<run> & {number}" for number in range(20)]
    picture = CURVES.draw([CURVES.Curve(name, [(1.0, 2.0), (2.0, 1.0)]) for name in names])
    lines = list(parse(picture).iter(f"{SVG}polyline"))
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in lines}) == len(names)
    assert set(names) <= set(list_texts(picture))


@pytest.mark.parametrize(
    ("low", "high", "is_log", "expected"),
    [
        (0.0, 345.0, False, [0, 100, 200, 300]),
        (3.85, 4.42, False, [3.9, 4.0, 4.1, 4.2, 4.3, 4.4]),
        (1.0, 100.0, True, [1, 2, 5, 10, 20, 50, 100]),
        (3.0, 6.0, True, [3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0]),
    ],
)
def test_ticks_are_round_numbers_inside_the_axis(low: float, high: float, is_log: bool, expected: list[float]) -> None:
    assert CURVES.Axis(low, high, 0.0, 1.0, is_log).list_ticks() == pytest.approx(expected)


def test_a_curve_of_a_single_loss_can_be_drawn() -> None:
    assert len(list_circles(CURVES.draw([CURVES.Curve("x", [(0.0, 3.0)])]))) == 1


@pytest.mark.parametrize(
    ("out", "words", "complaint"),
    [
        ("out.svg", ["--most", "1"], "--most 1: the lowest loss is 3; give a number above it"),
        ("out.svg", ["--most", "0"], "--most 0: the lowest loss is 3"),
        ("out.svg", ["--most", "inf"], "--most inf"),
        ("out.svg", ["text=text.jsonl"], "text.jsonl is not the events.jsonl of a run"),
        ("out.svg", ["numbers=numbers.jsonl"], "numbers.jsonl is not the events.jsonl of a run"),
        ("none/out.svg", [], "there is no folder none"),
        ("taken.svg", [], "cannot write taken.svg"),
        ("second=run", [], "ends in .svg"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_one_error_sentence(
    out: str,
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "text.jsonl").write_text("step 1\nstep 2\n", encoding="utf-8")
    (tmp_path / "numbers.jsonl").write_text("1\n2\n", encoding="utf-8")
    (tmp_path / "taken.svg").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["curves.py", out, "run=run", *words])
    with pytest.raises(SystemExit) as ended:
        CURVES.main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_command_plots_runs_and_names_a_missing_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    command = [sys.executable, str(PROJECT / "benchmarks" / "curves.py"), str(tmp_path / "out.svg")]
    subprocess.run([*command, f"file={path}", f"folder={path.parent}", "--over", "tokens"], check=True, timeout=60)
    texts = list_texts((tmp_path / "out.svg").read_text(encoding="utf-8"))
    assert {"file", "folder", "million tokens", "loss (nats)"} <= set(texts)
    process = subprocess.run([*command, f"x={tmp_path}/none"], capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == 2
    assert "there is no run" in process.stderr
