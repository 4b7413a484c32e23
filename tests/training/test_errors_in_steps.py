"""What is saved where an error ends a run: a whole state or none."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY_FLAGS

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.training.optimizers import OptimizerContainer


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
