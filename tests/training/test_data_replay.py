"""What `gptmill data show --run --step` tells is what training read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_FLAGS

import gptmill.training.loop
from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.batches.data_loader import DataLoader
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import open_shards
from gptmill.runs.directory import RunDirectory
from gptmill.training.data_replay import replay_step

RUN = RunDirectory(Path("runs/seen"))


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[int]]]:
    """The rows that each step took from its feed."""
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for number in range(90):
        Path(f"text/{number:02d}.txt").write_text(f"<{number}>" + "abc def " * (number % 13), encoding="utf-8")
    request = PrepareRequest(out="corpus", tokenizer="byte", split="tail", val_fraction=0.2, shard_tokens=1000)
    prepare_corpus(["text"], request, lambda _progress: None)
    rows: dict[int, list[list[int]]] = {}
    step, take, train_step = 0, DataLoader.next_batch, gptmill.training.loop.train_step

    def remember_step(state: Any, *rest: Any) -> Any:
        nonlocal step
        step = state.step + 1
        rows[step] = []
        return train_step(state, *rest)

    def remember_rows(loader: DataLoader, *rest: Any) -> Any:
        found = take(loader, *rest)
        lengths = torch.full((len(found.tokens),), 16) if found.lengths is None else found.lengths
        rows[step] += [
            row[:length] for row, length in zip(found.tokens.tolist(), lengths.tolist(), strict=True) if length
        ]
        return found

    monkeypatch.setattr("gptmill.training.loop.train_step", remember_step)
    monkeypatch.setattr(DataLoader, "next_batch", remember_rows)
    return rows


def read_shown(step: int) -> list[list[int]]:
    shards = open_shards("corpus")
    names = [shard.file for shard in shards.manifest.train.shards]
    return [
        shards.train[names.index(row.shard)][row.start : row.start + row.length].tolist()
        for row in replay_step(RUN, step)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("documents", ["packed", "whole"])
def test_a_step_shows_what_it_read_also_where_the_batch_was_changed(
    taken: dict[int, list[list[int]]], documents: str
) -> None:
    flags = [*TINY_FLAGS, "--sample_tokens", "0", "--data_dir", "corpus", "--documents", documents]
    assert run_guarded(["train", *flags, "--run_name", "seen", "--max_steps", "3"]) == 0
    more = ["--resume", "latest", "--max_steps", "5", "--total_batch_size", "256", "--allow_changes"]
    assert run_guarded(["train", "--run_name", "seen", *more]) == 0
    assert [read_shown(step) for step in range(1, 6)] == [taken[step] for step in range(1, 6)]
    with pytest.raises(UserError, match="has done 5 steps"):
        read_shown(6)
    request = PrepareRequest(out="corpus", tokenizer="byte", val_fraction=0.3, overwrite=True)
    prepare_corpus(["text"], request, lambda _progress: None)
    with pytest.raises(UserError, match="other tokens"):
        read_shown(1)
