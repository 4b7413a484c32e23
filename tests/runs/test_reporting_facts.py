"""The facts of a report, on recorded events with known answers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from reporting_events import LOSSES, START, make_events, make_start, make_step, write_run

from gptmill.config.errors import UserError
from gptmill.runs.events import (
    EvalDone,
    Event,
    LastStepMoved,
    RolledBack,
    RunFinished,
    StepLogged,
    UpdateSkipped,
    Warned,
)
from gptmill.runs.reporting.facts import RunFacts, collect_facts, find_reported
from gptmill.runs.reporting.record import record_events
from gptmill.runs.reporting.series import Series


def find_facts(folder: Path, events: list[Event], price: float | None = None) -> RunFacts:
    return collect_facts(write_run(folder, events), price)


def test_the_gain_and_the_step_that_captured_most_of_it(tmp_path: Path) -> None:
    learning = find_facts(tmp_path, make_events()).learning
    assert learning is not None
    assert (learning.initial.loss, learning.final.loss, learning.best.loss) == (10.0, 1.2, 1.0)
    assert learning.improvement == pytest.approx(0.88)
    assert learning.most is not None
    assert (learning.most.step, learning.most.elapsed_seconds) == (60, 120.0)
    assert learning.final.perplexity == pytest.approx(math.exp(1.2))


def test_the_last_step_is_the_one_that_a_budget_has_moved_it_to(tmp_path: Path) -> None:
    start = find_facts(tmp_path, [make_start(), make_step(1), LastStepMoved(1, 60, time=START + 3)]).start
    assert start is not None
    assert start.max_steps == 60


def test_cost_and_what_early_stopping_would_have_saved(tmp_path: Path) -> None:
    cost = find_facts(tmp_path, make_events(), price=9.0).cost
    assert cost.device_hours == pytest.approx(400 / 3600)
    assert cost.dollars == pytest.approx(1.0)
    assert cost.dollars_per_million_tokens == pytest.approx(10.0)  # 100 steps of 1,000 tokens
    assert cost.after_best is not None
    assert (cost.after_best.at.step, cost.after_best.seconds, cost.after_best.fraction) == (80, 40.0, 0.2)
    assert cost.after_best.dollars == pytest.approx(0.2)
    assert cost.after_most is not None
    assert (cost.after_most.at.step, cost.after_most.fraction) == (60, 0.4)
    assert not cost.is_typical


@pytest.mark.parametrize(("device", "price"), [("NVIDIA H200", 3.5), ("CPU, 2 threads", None)], ids=["H200", "CPU"])
def test_without_a_price_a_typical_one_is_taken(tmp_path: Path, device: str, price: float | None) -> None:
    cost = find_facts(tmp_path, make_events(device=device)).cost
    assert cost.price_per_hour == price
    assert (cost.dollars is None) == (price is None)
    assert cost.is_typical == (price is not None)


def test_energy_is_the_integral_of_power_over_time() -> None:
    steps = [make_step(step, telemetry={"gpu_power_watts": 100.0 * step}) for step in (1, 2, 3)]
    assert record_events("run", [make_start(), *steps]).joules == pytest.approx(2 * (100 + 200 + 300))


def test_phases_follow_the_learning_rate(tmp_path: Path) -> None:
    phases = find_facts(tmp_path, make_events()).phases
    assert [(phase.name, phase.first_step, phase.last_step) for phase in phases] == [
        ("warm-up", 1, 10),
        ("main", 11, 80),
        ("decay", 81, 100),
    ]
    assert [phase.seconds for phase in phases] == [20.0, 140.0, 40.0]
    assert [phase.val_loss for phase in phases] == [None, 1.0, 1.2]
    assert {phase.tokens_per_second for phase in phases} == {500.0}


def test_a_rate_that_always_falls_decays_below_half_its_peak(tmp_path: Path) -> None:
    steps = [make_step(step, lr=min(step, 10) * (101 - step) / 1000) for step in range(1, 101)]
    phases = find_facts(tmp_path, [make_start(), *steps]).phases
    assert [phase.name for phase in phases] == ["warm-up", "main", "decay"]
    assert phases[-1].lr_range[0] < 0.46  # the peak is 0.91


def test_the_timeline_has_every_evaluation_with_its_checkpoint(tmp_path: Path) -> None:
    timeline = find_facts(tmp_path, make_events()).timeline
    assert {row.point.step: row.point.loss for row in timeline} == LOSSES
    assert [row.checkpoint for row in timeline] == [f"step_{step:06d}" for step in LOSSES]
    assert [row.point.step for row in timeline if row.is_best] == [80]


def test_a_long_timeline_is_thinned_out_and_keeps_the_best(tmp_path: Path) -> None:
    evaluations = [EvalDone(step, 0.5 if step == 333 else 2.0, 1, 0.0) for step in range(1000)]
    timeline = find_facts(tmp_path, [make_start(), *evaluations]).timeline
    assert len(timeline) < 20
    assert {0, 333, 999} <= {row.point.step for row in timeline}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data_wait": 0.3}, "Data bounds it: steps waited 30 %"),
        ({}, "Neither data nor overhead bounds it"),
        ({}, "a micro-batch has only 4 × 64 tokens"),
        ({"mfu": 0.55}, "MFU is 55 % of the peak in this precision, which is good"),
        ({"mfu": None}, "is not known, since the peak rate of NVIDIA H200 is not"),
        ({"seconds": 0.2}, "Overhead bounds it: only 10 % of the time"),
    ],
    ids=["data", "none", "small", "good", "unknown", "overhead"],
)
def test_what_bounds_the_speed_is_named(tmp_path: Path, changes: dict[str, float | None], says: str) -> None:
    events = [replace(event, **changes) if isinstance(event, StepLogged) else event for event in make_events()]  # type: ignore[arg-type]
    assert says in " ".join(find_facts(tmp_path, events).explanations)


def test_incidents_are_told_in_order(tmp_path: Path) -> None:
    incidents: list[Event] = [
        UpdateSkipped(30, math.nan, 1.0, [0, 8], time=START + 60),
        Warned(31, "plateau", "the loss is flat", time=START + 62),
        RolledBack(40, 45, "loss spike", 9.0, 1.0, [0, 8], time=START + 90),
    ]
    events = make_events()
    texts = [item.text for item in find_facts(tmp_path, [*events[:-1], *incidents, events[-1]]).incidents]
    assert [text.split()[0] for text in texts] == ["update", "warning:", "rolled"]


def test_a_killed_and_resumed_run(tmp_path: Path) -> None:
    later = START + 5000.0
    events = [event for event in make_events() if event.step <= 40 and not isinstance(event, RunFinished)]
    events.append(make_start(40, time=later, resumed_from="runs/known/checkpoints/step_000040"))
    events += [make_step(step, time=later + 2.0 * (step - 40)) for step in range(41, 101)]
    events.append(EvalDone(100, 1.2, 64, 0.0, time=later + 120.0))
    facts = find_facts(tmp_path, events)
    assert facts.state == "crashed"
    assert facts.goodput.restarts == 1
    assert facts.goodput.running_seconds == pytest.approx(200.0)
    assert facts.timeline[-1].point.elapsed_seconds == pytest.approx(200.0)
    assert facts.incidents[0].text.startswith("crashed at step 40")


def test_the_middle_sample_is_the_one_nearest_the_middle(tmp_path: Path) -> None:
    assert [sample.step for sample in find_facts(tmp_path, make_events()).samples] == [0, 40, 100]


def test_losses_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    events = [make_start(), EvalDone(0, 5.0, 1, 0.0), EvalDone(1, math.nan, 1, 0.0), EvalDone(2, 4.0, 1, 0.0)]
    learning = find_facts(tmp_path, events).learning
    assert learning is not None
    assert (learning.final.loss, learning.not_finite) == (4.0, 1)


def test_without_evaluations_the_training_loss_is_taken(tmp_path: Path) -> None:
    steps = [make_step(step) for step in range(1, 101)]
    learning = find_facts(tmp_path, [make_start(), *steps]).learning
    assert learning is not None
    assert learning.kind == "training"
    assert learning.final.loss < learning.initial.loss


def test_a_curve_keeps_its_spikes_in_bounded_memory() -> None:
    series = Series(max_groups=64)
    for step in range(20_000):
        series.add(step, 99.0 if step == 7777 else 1.0)
    assert len(series.groups) <= 64
    assert max(group.high for group in series.groups) == 99.0
    assert sum(group.count for group in series.groups) == 20_000
    assert len(series.smooth(points=20)) == 20


def test_a_step_that_is_logged_again_replaces_what_followed() -> None:
    series = Series()
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0)):
        series.add(step, value)
    assert [(group.first, group.mean) for group in series.groups] == [(1, 1.0), (2, 5.0)]


def test_a_long_run_is_recorded_in_bounded_memory() -> None:
    steps = (make_step(step) for step in range(1, 5001))
    record = record_events("long", steps)
    assert record.logged_steps == 5000
    assert all(len(series.groups) <= 2048 for series in (*record.curves.values(), record.elapsed))
    assert record.tokens == pytest.approx(5000 * 1000)


def test_a_run_is_found_by_its_name_its_folder_or_its_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", make_events())
    for name in ("known", str(run.path), str(run.events)):
        assert find_reported(name, str(tmp_path / "runs")).path == run.path


def test_a_run_without_events_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "imported"
    (folder / "checkpoints/step_000000").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    with pytest.raises(UserError, match="it was imported, or the file is lost"):
        find_reported("imported", str(tmp_path))
    with pytest.raises(UserError, match="there is no run 'other'"):
        find_reported("other", str(tmp_path))
