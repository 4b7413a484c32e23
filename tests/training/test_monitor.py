"""The monitor shows events to checks, forgets what cannot be compared, and never fails the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import EXACT_FLAGS
from steps import make_step
from tiny import make_config, make_shards, plan_for

from gptmill.cli.main import run_guarded
from gptmill.config.errors import ConfigError
from gptmill.config.monitor import MonitorConfig
from gptmill.config.schema import list_fields
from gptmill.config.validation import check_config
from gptmill.runs.event_log import read_events
from gptmill.runs.events import Event, RolledBack, StepLogged, Warned
from gptmill.training.learning_checks import Check
from gptmill.training.machine_checks import ThroughputCheck
from gptmill.training.monitor import Monitor, build_monitor


def check_all(monitor: Monitor, events: list[Event]) -> list[Warned]:
    return [warning for event in events for warning in monitor.check(event)]


def make_drop(at: int, steps: int = 200) -> list[Event]:
    """Throughput that halves after a step."""
    return [make_step(step, tokens_per_second=1e4 if step <= at else 5e3) for step in range(1, steps + 1)]


def test_another_stage_of_a_warm_up_and_a_rollback_are_no_drop_of_throughput() -> None:
    assert len(check_all(Monitor([ThroughputCheck(0.7)]), make_drop(100))) == 1
    assert check_all(Monitor([ThroughputCheck(0.7)], [100]), make_drop(100)) == []
    rolled_back = make_drop(100)
    rolled_back.insert(100, RolledBack(90, 100, "spike", 9.0, 9.0, [0, 8]))
    assert check_all(Monitor([ThroughputCheck(0.7)]), rolled_back) == []


class BrokenCheck(Check):
    about = "gpu"

    def see_step(self, event: StepLogged) -> str:
        raise ZeroDivisionError(f"at step {event.step}")


def test_a_check_that_fails_is_reported_once_and_hurts_no_other() -> None:
    warnings = check_all(Monitor([BrokenCheck(), ThroughputCheck(0.7)]), make_drop(100))
    assert [warning.about for warning in warnings] == ["gpu", "throughput"]
    assert "BrokenCheck failed (at step 4)" in warnings[0].message


def test_none_disables_each_warning(text_file: Path) -> None:
    shards = make_shards(text_file)
    silent = make_config(**{field.name: None for field in list_fields(MonitorConfig)})
    check_config(silent)
    strange = [
        make_step(step, memory_gb=99.0, grad_norm=50.0, data_wait=0.9, telemetry={"gpu_temperature_celsius": 99.0})
        for step in range(1, 800)
    ]
    assert check_all(build_monitor(silent, plan_for(silent, shards), 10**11), [*strange]) == []
    default = make_config()
    warnings = check_all(build_monitor(default, plan_for(default, shards), 10**11), [*strange])
    assert {warning.about for warning in warnings} == {"grad_norm", "plateau", "data_wait", "memory", "gpu"}


@pytest.mark.parametrize(
    ("name", "value"), [("warn_throughput", 70.0), ("warn_plateau_steps", 5), ("warn_grad_norm_rise", 0.5)]
)
def test_limits_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="none"):
        check_config(make_config(**{name: value}))


def test_a_crossed_limit_is_in_every_record_of_the_run_and_changes_nothing(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run again, with a limit that every gradient norm is above."""
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["train", *EXACT_FLAGS, "--run_name", "warned", "--warn_grad_norm", "0.001"]) == 0
    warned = tmp_path / "runs/warned"
    for name in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "log.txt"):
        assert (warned / name).read_bytes() == (straight / name).read_bytes()
    printed = capsys.readouterr().out
    for path in (warned / "events.jsonl", warned / "ledger.jsonl"):
        (warning,) = [event for event in read_events(path) if isinstance(event, Warned)]
        assert warning.about == "grad_norm"
        assert f"warning: {warning.message}" in printed
    assert not any(isinstance(event, Warned) for event in read_events(straight / "ledger.jsonl"))
    steps = [event for event in read_events(warned / "events.jsonl") if isinstance(event, StepLogged)]
    assert all(not name.startswith("gpu") for step in steps for name in step.telemetry)
