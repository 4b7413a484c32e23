"""Ranks that save together must see one folder; a rank that does not is noticed before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runtime.world import World
from gptmill.training import shared_folder
from gptmill.training.shared_folder import check_shared_folder

TOKEN = "0123abcd"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> World:
    """Rank 1 of two, where rank 0 has found the parent of the run's folder; sums are those of this rank."""
    monkeypatch.setattr(shared_folder, "broadcast_json", lambda _value, _world: [1, TOKEN])
    monkeypatch.setattr(shared_folder, "SIGHT_SECONDS", 0.0)
    monkeypatch.setattr(World, "all_reduce_sum", lambda _world, tensor: tensor)
    return World(1, 2, torch.device("cpu"))


def test_a_rank_that_sees_what_rank_0_writes_goes_on(tmp_path: Path, other: World) -> None:
    (tmp_path / f".gptmill-{TOKEN}.probe").write_text(TOKEN, encoding="utf-8")
    assert check_shared_folder(tmp_path / "runs", other) == TOKEN


def test_a_rank_that_sees_another_folder_ends_the_run_with_a_sentence(tmp_path: Path, other: World) -> None:
    with pytest.raises(UserError, match=r"1 of 2 ranks do not see .*/runs, where all of them save .* --logdir"):
        check_shared_folder(tmp_path / "runs", other)


def test_rank_0_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_world: World, flag: Tensor) -> Tensor:
        seen.extend(path.read_text(encoding="utf-8") for path in tmp_path.glob(".*"))
        return flag

    seen: list[str] = []
    monkeypatch.setattr(World, "all_reduce_sum", read)
    token = check_shared_folder(tmp_path / "runs/one/checkpoints", World(0, 1, torch.device("cpu")))
    assert seen == [token]
    assert list(tmp_path.iterdir()) == []
