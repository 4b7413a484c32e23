"""Run: what a finished, a stopped and a damaged run say of themselves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EXACT_STEPS

import gptmill
from gptmill.runs.events import EvalDone, RunCrashed, RunFinished
from gptmill.runs.history import append_event
from gptmill.runs.run_lock import lock_run


@pytest.fixture
def run(straight: Path) -> gptmill.Run:
    return gptmill.open_run(straight)


def test_metrics_and_evaluations_are_arrays_of_equal_length(run: gptmill.Run) -> None:
    assert run.metrics["step"].tolist() == list(range(1, EXACT_STEPS + 1))
    assert {"loss", "lr", "grad_norm", "tokens_per_second"} <= run.metrics.keys()
    assert {len(array) for array in run.metrics.values()} == {EXACT_STEPS}
    assert np.isfinite(run.metrics["loss"]).all()
    assert run.evaluations["step"].tolist() == [0, 10, 20, 30, 40]
    losses = [event.val_loss for event in run.events if isinstance(event, EvalDone)]
    assert run.evaluations["val_loss"].tolist() == losses
    assert np.isnan(run.evaluations["ema_loss"]).all()


def test_config_samples_and_checkpoints_are_those_of_the_folder(run: gptmill.Run, straight: Path) -> None:
    assert (run.name, run.path, run.step) == ("straight", straight, EXACT_STEPS)
    assert run.config.model.num_layers == 2
    assert [sample.step for sample in run.samples] == [0, 10, 20, 30, 40]
    assert run.samples[0].prompt == run.config.evaluation.sample_prompt
    newest = run.checkpoints[-1]
    assert (newest.step, newest.path) == (EXACT_STEPS, straight / "checkpoints/step_000040")
    assert "latest" in newest.tiers
    assert newest.val_loss == run.evaluations["val_loss"][-1]


def test_a_run_is_found_by_name_and_by_path(straight: Path) -> None:
    assert gptmill.open_run("straight", logdir=straight.parent) == gptmill.open_run(str(straight))
    with pytest.raises(gptmill.UserError, match="did you mean straight"):
        gptmill.open_run("strait", logdir=straight.parent)


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (RunFinished(40, "finished", 1.0), "finished"),
        (RunFinished(40, "stopped early: no improvement", 1.0), "finished"),
        (RunFinished(40, "stopped by SIGTERM", 1.0), "stopped"),
        (RunFinished(40, "stopped: disk full", 1.0), "stopped"),
        (RunFinished(40, "gave up: loss nan", 1.0), "diverged"),
        (RunCrashed(40, "killed"), "crashed"),
    ],
)
def test_the_state_is_how_the_last_process_ended(run: gptmill.Run, event: RunFinished, state: str) -> None:
    history = run.directory.history
    lines = history.read_text(encoding="utf-8").splitlines(keepends=True)
    history.write_text("".join(line for line in lines if "RunFinished" not in line), encoding="utf-8")
    append_event(run.directory, event)
    assert run.state == state
    assert f"{state} at step 40, val loss" in repr(run)


def test_a_run_that_is_trained_or_was_never_started_says_so(run: gptmill.Run) -> None:
    with lock_run(run.directory):
        assert run.state == "running"
    assert run.state == "finished"
    run.directory.events.unlink()
    run.directory.history.unlink()
    assert (run.state, run.step, run.samples) == ("model only", 0, [])
    shutil.rmtree(run.directory.checkpoints)
    assert run.state == "not started"


def test_models_of_a_run_load_by_name_checkpoint_and_folder(run: gptmill.Run, straight: Path) -> None:
    latest = run.load(device="cpu")
    expected = latest([1, 2, 3])
    for model in (
        gptmill.load("straight", device="cpu", logdir=straight.parent),
        gptmill.load(straight, "latest", device="cpu"),
        gptmill.load(straight / "checkpoints/latest", device="cpu"),
        gptmill.load(straight / "checkpoints/step_000040", device="cpu"),
    ):
        assert torch.equal(model([1, 2, 3]), expected)
    assert (latest.step, run.load(24, device="cpu").step) == (EXACT_STEPS, 24)
    for path in (straight, straight / "checkpoints/step_000040"):
        with pytest.raises(gptmill.UserError, match="without ema_decay"):
            gptmill.load(path, weights="ema", device="cpu")
    with pytest.raises(gptmill.UserError, match="is a checkpoint; leave out"):
        gptmill.load(straight / "checkpoints/latest", "best")
    with pytest.raises(gptmill.ConfigError, match="device = 'gpu': expected one of"):
        gptmill.load(straight, device="gpu")


def test_an_unreadable_checkpoint_is_left_out(run: gptmill.Run) -> None:
    shutil.rmtree(run.path / "checkpoints/step_000024")
    (run.path / "checkpoints/step_000032/checkpoint.json").write_text("{}")
    assert [entry.step for entry in run.checkpoints] == [8, 16, 40]


def test_a_table_has_the_steps_and_the_validation_losses(run: gptmill.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    table = run.to_dataframe()
    assert table.index.tolist() == list(range(EXACT_STEPS + 1))
    assert table["val_loss"].dropna().tolist() == run.evaluations["val_loss"].tolist()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(gptmill.UserError, match=r"pip install 'gptmill\[pandas\]'"):
        run.to_dataframe()
