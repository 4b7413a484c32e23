"""Events survive their line of JSON, whatever the numbers and whoever wrote them."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest

from gptmill.runs.events import (
    EVENTS,
    READERS,
    CheckpointSaved,
    EvalDone,
    Event,
    LastStepMoved,
    RolledBack,
    RunCrashed,
    RunFinished,
    RunStarted,
    SampleDrawn,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
    UpdateSkipped,
    Warned,
    from_json,
    to_json,
)

EXAMPLES: list[Event] = [
    ScoresDone(4, {"probe/loss": 2.5, "rhymes": 0.5}, 0.25, time=1.5),
    RunStarted(0, "runs/a", 10, 128, 999, "CPU", "fp32", 1, "data/x", "byte:1", "0.1", "2.9", 3.5, time=1.5),
    StepLogged(3, 0.25, 2.5, 6e-4, 1.25, 1000.0, 60.0, by_corpus={"data/ä": 2.5}, objective=2.75, mfu=0.4, time=2.5),
    StepLogged(4, 0.25, 2.5, 6e-4, 1.25, 1000.0, 60.0, telemetry={"gpu_power_watts": 612.5}, time=2.6),
    EvalDone(4, 2.25, 4096, 0.5, {"data/a": 2.0, "data/b": 2.5}, 2.125, time=3.5),
    SampleDrawn(4, "Once ", 'a "fox"\n\u2028\x00 \U0001f98a', time=4.5),
    TrainEvalDone(5, 3.0, 64, 0.1, {"data/a": 2.5}, time=5.4),
    CheckpointSaved(5, "runs/a/checkpoints/step_000005", 12345, 0.1, time=5.5),
    UpdateSkipped(6, 3.5, 1.5, [40, 48], time=5.6),
    RolledBack(5, 7, "spike", 9.5, 120.0, [48, 64], time=5.7),
    Warned(7, "disk", "the disk is full", time=5.8),
    LastStepMoved(8, 10, time=5.9),
    RunFinished(10, "finished", 12.5, time=6.5),
    RunCrashed(11, "killed by signal 9", time=7.5),
]
STEP = StepLogged(3, 0.25, 2.5, 6e-4, 1.25, 1000.0, 60.0, time=2.5)


def read_strict_json(line: str) -> dict[str, object]:
    """JSON as the standard has it: Python's own reader takes NaN and Infinity, which others refuse."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert isinstance(record, dict)
    return record


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_from_its_line(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    assert read_strict_json(line)["event"] == type(event).__name__
    assert from_json(line) == event


def test_every_event_type_has_an_example_here() -> None:
    assert {type(event).__name__ for event in EXAMPLES} == EVENTS.keys()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm", "tokens_per_second", "seconds_left"])
def test_numbers_that_are_not_finite_are_null_in_the_line_and_nan_after(name: str, value: float) -> None:
    line = to_json(replace(STEP, **{name: value}))
    assert read_strict_json(line)[name] is None
    event = from_json(line)
    assert isinstance(event, StepLogged)
    assert math.isnan(getattr(event, name))
    others = [field.name for field in fields(STEP) if field.name != name]
    assert [getattr(event, other) for other in others] == [getattr(STEP, other) for other in others]


def test_losses_by_corpus_that_are_not_finite_are_null_in_the_line_and_nan_after() -> None:
    line = to_json(replace(STEP, by_corpus={"data/a": math.inf, "data/b": 2.5}))
    assert read_strict_json(line)["by_corpus"] == {"data/a": None, "data/b": 2.5}
    event = from_json(line)
    assert isinstance(event, StepLogged)
    assert math.isnan(event.by_corpus["data/a"])
    assert event.by_corpus["data/b"] == 2.5


def test_an_event_of_an_older_version_lacks_what_came_later() -> None:
    old = json.loads(to_json(STEP))
    for name in ("by_corpus", "experts", "memory_gb", "objective", "tflops", "mfu"):
        del old[name]
    assert from_json(json.dumps(old)) == STEP


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_evaluation_that_is_not_finite_is_valid_json(loss: float) -> None:
    line = to_json(EvalDone(1, loss, 64, 0.1))
    assert read_strict_json(line)["val_loss"] is None
    event = from_json(line)
    assert isinstance(event, EvalDone)
    assert math.isnan(event.val_loss)


def test_an_event_that_only_a_newer_version_knows_is_skipped() -> None:
    assert from_json('{"event": "ModelMerged", "step": 3, "time": 1.0, "partners": [1, 2]}') is None


def test_a_field_that_only_a_newer_version_knows_does_not_break_the_reader() -> None:
    line = json.dumps({**json.loads(to_json(STEP)), "nobody_knows": 8})
    assert from_json(line) in (STEP, None)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert EvalDone(1, math.log(50.0), 64, 0.1).perplexity == pytest.approx(50.0)
    assert read_strict_json(to_json(EvalDone(1, math.log(50.0), 64, 0.1)))["perplexity"] == pytest.approx(50.0)


@pytest.mark.parametrize("loss", [709.0, 710.0, 1e6, 1e300, math.inf])
def test_perplexity_of_a_huge_loss_does_not_overflow(loss: float) -> None:
    perplexity = EvalDone(1, loss, 64, 0.1).perplexity
    assert perplexity > 1e300
    read_strict_json(to_json(EvalDone(1, loss, 64, 0.1)))


def test_perplexity_of_nan_is_nan() -> None:
    assert math.isnan(EvalDone(1, math.nan, 64, 0.1).perplexity)


def test_every_field_of_an_event_can_be_read_back() -> None:
    types = {str(item.type) for kind in EVENTS.values() for item in fields(kind)}
    assert types <= READERS.keys()


def test_a_step_from_before_telemetry_was_measured_has_none() -> None:
    record = json.loads(to_json(STEP))
    del record["telemetry"]
    assert from_json(json.dumps(record)) == STEP
