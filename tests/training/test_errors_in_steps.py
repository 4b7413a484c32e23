"""What is saved and recorded where an error ends a run: a whole state or none, and the first error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY_FLAGS

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.data.batches.data_loader import DataLoaderStoppedError
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed, RunFinished
from gptmill.runs.history import read_history
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.training import loop
from gptmill.training.optimizers import OptimizerContainer
from gptmill.training.step_stats import StepMetrics, StepStats


@pytest.mark.parametrize("place", ["clip_gradients", "step", "share_weights"])
def test_a_half_done_update_is_not_saved(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = getattr(OptimizerContainer, place)
    calls = []

    def fail(self: OptimizerContainer, *arguments: object) -> object:
        calls.append(place)
        result = done(self, *arguments)
        if len(calls) == 3 + (place == "step"):  # one is the optimizer's first, which creates its state
            raise UserError("the link to the other ranks is down; start again")
        return result

    monkeypatch.setattr(OptimizerContainer, place, fail)
    flags = "--max_steps 5 --checkpoint_freq 100 --guard off --sample_tokens 0 --run_name torn".split()
    assert run_guarded(["train", *words, *TINY_FLAGS, *flags]) == 2
    assert list_step_folders(Path("runs/torn/checkpoints")) == []


DEAD = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("failing", "follows", "ends"),
    [
        (6, None, RunCrashed(7, f"AcceleratorError: {DEAD}")),  # read once step 7 is launched
        (8, None, RunCrashed(8, f"AcceleratorError: {DEAD}")),  # read before step 8 is saved
        (6, DataLoaderStoppedError(), RunCrashed(6, f"AcceleratorError: {DEAD}")),
        (6, UserError("the link is down"), RunFinished(6, "stopped: the link is down", 0.0)),
    ],
    ids=["push", "flush", "after a stop", "after an error"],
)
def test_an_error_on_the_device_is_recorded_where_the_host_reads_it(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    follows: Exception | None,
    ends: RunCrashed | RunFinished,
) -> None:
    """The host is a step ahead, as on CUDA, and whatever it reads from the dead device raises the same error again."""
    monkeypatch.chdir(tmp_path)
    flags = "--max_steps 10 --checkpoint_freq 4 --eval_freq 100 --sample_tokens 0 --run_name dead".split()
    read, step_once = StepStats.read, loop.train_step

    def fail(stats: StepStats) -> StepMetrics:
        if stats.step >= failing:
            raise torch.AcceleratorError(DEAD)
        return read(stats)

    def fail_first(state: loop.TrainState, *arguments: object) -> StepStats:
        if state.step == failing and follows is not None:
            raise follows
        return step_once(state, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(DeviceTimestamp, "is_on_device", True)
        patch.setattr(StepStats, "read", fail)
        patch.setattr(loop, "train_step", fail_first)
        if isinstance(ends, RunCrashed):
            with pytest.raises(torch.AcceleratorError, match=DEAD):
                run_guarded(["train", *words, *TINY_FLAGS, *flags])
        else:
            assert run_guarded(["train", *words, *TINY_FLAGS, *flags]) == 2
    run = RunDirectory(Path("runs/dead"))
    last = list(read_history(run))[-1]
    assert (type(last), last.step, last.reason) == (type(ends), ends.step, ends.reason)  # type: ignore[union-attr]
    crashes = [path.name for path in run.path.glob("crash_*")]
    assert crashes == ([f"crash_step_{ends.step:06d}_rank_00000.txt"] if isinstance(ends, RunCrashed) else [])
    assert [path.name for path in list_step_folders(run.checkpoints)] == ["step_000004"]
    assert run_guarded(["train", "--run_name", "dead", "--resume", "latest"]) == 0
    assert [line.split()[0] for line in run.text_log.read_text().splitlines() if " train " in line] == [
        str(step) for step in range(1, 11)
    ]
