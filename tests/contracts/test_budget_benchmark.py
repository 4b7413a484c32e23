"""The benchmark of budgets goes on where it was stopped, and judges the rows that it was asked for."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT

sys.path.append(str(PROJECT / "benchmarks"))
BUDGET, BUDGET_RESULTS = importlib.import_module("budget"), importlib.import_module("budget_results")


class Trainer:
    """In the place of gptmill: notes what it is called with; each row of the table reaches a loss of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, work: Path, losses: dict[int, float | None], later: float = 0.0
    ) -> None:
        self._monkeypatch, self._work, self._losses = monkeypatch, work, losses
        self.trained: list[int] = []
        self.seeds: list[str] = []

        def call(_: object, words: list[str], folder: Path, *__: object) -> subprocess.CompletedProcess[str]:
            number = int(folder.name.rpartition("-")[2])
            loss = losses[number]
            if words[0] == "train":
                self.trained.append(number)
                self.seeds += words[words.index("--seed") + 1 :][:1] if "--seed" in words else ["default"]
            elif loss is not None:
                loss += later * (folder.name.count("-") > 2)
                (folder / "scores.json").write_text(json.dumps({"bits_per_byte": loss}), encoding="utf-8")
            return subprocess.CompletedProcess(words, int(loss is None), "", "the disk is full")

        monkeypatch.setattr(BUDGET.Machine, "_call", call)
        monkeypatch.setattr(BUDGET, "write_texts", lambda *_: None)

    def run(self, *rows: int, rounds: int = 1) -> int:
        self.trained.clear()
        words = ["--work", str(self._work), "--corpora", "python", "--minutes", "1", "--device", "cpu"]
        numbers = ["--rounds", str(rounds), "--rows", *map(str, rows)]
        self._monkeypatch.setattr(sys, "argv", ["budget.py", *words, *numbers])
        return int(BUDGET.main())


def test_rows_that_are_finished_are_kept_and_the_others_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {0: 2.01, 1: 3.0, 2: 2.0, 5: None}
    trainer = Trainer(monkeypatch, tmp_path, losses)
    assert trainer.run(0, 1, 2, 5) == 0
    assert trainer.trained == [0, 1, 2, 5]
    assert "| python | 60 s | 5 | --num_layers 2 --embd_size 64 | nan |" in capsys.readouterr().out
    losses[5] = 1.9
    (tmp_path / "python-60s-2" / "row.json").unlink()  # as if it had been stopped
    assert trainer.run(0, 1, 2, 5) == 1
    assert trainer.trained == [2, 5]
    assert "budget against the best, --num_layers 2 --embd_size 64 | +5.79% |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "code"),
    [
        ({0: 2.01, 2: 2.0}, 0),
        ({0: 2.03, 2: 2.0}, 1),
        ({0: 2.01, 1: 2.0, 2: 2.0}, 1),
        ({0: 2.01}, 1),
        ({0: None, 2: 2.0}, 1),
        ({3: 2.0, 4: 2.1}, 0),
    ],
    ids=["within 1 %", "not within", "no better than the classic", "no setting", "failed", "settings alone"],
)
def test_a_table_is_judged_by_the_rows_that_it_has(
    losses: dict[int, float | None], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Trainer(monkeypatch, tmp_path, losses).run(*losses) == code


def test_rounds_take_turns_with_another_seed_each_and_the_means_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(monkeypatch, tmp_path, {0: 2.0, 2: 2.1}, later=0.3)
    assert trainer.run(0, 2, rounds=3) == 0
    assert trainer.trained == [0, 2] * 3
    assert trainer.seeds == ["default", "default", "2", "2", "3", "3"]
    printed = capsys.readouterr().out
    assert "| 2 | mean of --tokenizer byte --num_layers 2 --embd_size 64 | 2.3000 |" in printed
    assert f"{2.2 / 2.3 - 1:+.2%}" in printed
    assert {path.name for path in tmp_path.iterdir()} >= {"python-60s-0", "python-60s-r3-0"}


def test_of_a_budget_the_best_run_and_its_tokenizer_are_found() -> None:
    first = "tokenizer   bpe-4096, 3.40 bytes per token\nrivals      4 x 96 first\nrun            runs/run\n"
    rival = "rival       4 layers of width 96, byte, 632 steps: 2.7\nrun            runs/run-4x96\n"
    output = f"{first}{rival}The run is in runs/run-4x96/. Next steps:\n"
    assert BUDGET_RESULTS.find_run(output) == "run-4x96"
    assert [BUDGET_RESULTS.read_vocab_size(output, name) for name in ("run", "run-4x96")] == [4096, 256]
