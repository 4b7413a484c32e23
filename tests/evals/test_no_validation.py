"""Training without a validation split: no validation loss and no best model, and everything else as always."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill

from gptmill.config.run import EvaluationConfig, ModelConfig, RunConfig
from gptmill.data.batches.validation_windows import ValWindows
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.data.shards.shard_manifest import Split, read_manifest, write_manifest
from gptmill.evals.loss import check_validation, has_validation
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, SampleDrawn, StepLogged, Warned

FLAGS = [*TINY_FLAGS, *"--data_dir words --checkpoint_freq 2 --eval_freq 2 --ema_decay 0.9 --run_name run".split()]
CONFIG = RunConfig(model=ModelConfig(context_length=16), evaluation=EvaluationConfig(eval_tokens=640))


def drop_validation(folder: Path) -> None:
    write_manifest(folder, replace(read_manifest(folder), val=Split(0, 0, ())))


@pytest.fixture
def unvalidated(words: list[str], tmp_path: Path) -> Path:  # noqa: ARG001
    drop_validation(tmp_path / "words")
    return tmp_path / "words"


def test_a_run_without_a_validation_split_trains_samples_saves_and_resumes(
    gptmill: GptMill, unvalidated: Path, tmp_path: Path
) -> None:
    output = gptmill("train", *FLAGS, "--max_steps", "4").stdout
    said = "warning: no validation loss and no best_model: a window of context_length + 1 = 17 tokens does not fit"
    assert f"{said} into the validation split ({unvalidated.name} has 0)" in output
    assert "loss by step: training" in output
    gptmill("train", "--run_name", "run", "--resume", "2")
    events = read_events(RunDirectory(tmp_path / "runs/run").events)
    assert not [event for event in events if isinstance(event, EvalDone)]
    assert [event.step for event in events if isinstance(event, SampleDrawn)] == [0, 2, 4]
    assert [event.step for event in events if isinstance(event, StepLogged)] == [1, 2, 3, 4]
    assert {event.about for event in events if isinstance(event, Warned)} == {"validation"}
    listed = gptmill("checkpoints", "list", "run").stdout
    assert "latest" in listed
    assert "best_model" not in listed
    assert "has no best_model" in gptmill("train", "--run_name", "run", "--resume", "best", check=False).stderr


def test_supervised_and_verified_runs_need_no_validation(gptmill: GptMill, unvalidated: Path) -> None:
    assert unvalidated.is_dir()
    gptmill("train", *FLAGS, "--max_steps", "2", "--supervise")
    assert "identical" in gptmill("verify-resume", *FLAGS[:-2], "--steps", "4").stdout


def test_a_window_that_does_not_fit_into_the_validation_split_is_as_good_as_none(
    gptmill: GptMill, words: list[str]
) -> None:
    long = "--context_length 4096 --total_batch_size 4096 --mini_batch_size 1 --eval_tokens 4096 --max_steps 1"
    output = gptmill("train", *TINY_FLAGS, *words, *long.split()).stdout
    assert "no validation loss and no best_model: a window of context_length + 1 = 4,097 tokens does not fit" in output


def test_early_stopping_without_validation_is_refused(gptmill: GptMill, unvalidated: Path, tmp_path: Path) -> None:
    process = gptmill("train", *FLAGS, "--max_steps", "4", "--early_stop_patience", "3", check=False)
    assert process.returncode == 2
    assert "early_stop_patience = 3: there is no validation loss, since a window" in process.stderr
    assert unvalidated.name in process.stderr
    assert not (tmp_path / "runs").exists()


def test_in_a_mixture_the_corpora_with_a_validation_split_are_validated(words: list[str], tmp_path: Path) -> None:
    with_split = open_shards(words[1] if Path(words[1]).is_absolute() else tmp_path / words[1])
    without = replace(with_split, location="bare", val=[])
    weights = (Fraction(1, 4), Fraction(1, 4), Fraction(1, 2))
    corpora = Corpora((without, with_split, replace(with_split, location="other")), weights)
    assert has_validation(CONFIG, corpora)
    assert check_validation(CONFIG, corpora).startswith("the validation loss leaves out bare: a window")
    windows = ValWindows(corpora, 16, 9)
    assert (windows.num_chosen, windows.counts) == (9, [0, 3, 6])
    rows = windows.read(6, 6)
    assert rows.corpora is not None
    assert rows.corpora.tolist()[:3] == [2, 1, 2]
    assert set(rows.corpora.tolist()[3:]) == {1}  # padding


def test_a_corpus_with_validation_windows_needs_no_words(words: list[str], tmp_path: Path) -> None:
    shards: TokenShards = open_shards(tmp_path / words[1])
    assert check_validation(CONFIG, Corpora((shards,))) == ""
