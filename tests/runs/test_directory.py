"""A run's folder: never written over, found by name or path, and the newest of its recipe."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.runs.checkpoints.storage import Checkpoint, save_checkpoint
from gptmill.runs.directory import RunDirectory, create_run, find_newest_run, find_run, list_runs, make_run_name


def make_run(logdir: Path, name: str, started: float = 0.0, *, has_checkpoint: bool = True) -> RunDirectory:
    run = create_run(str(logdir), name, RunConfig())
    if has_checkpoint:
        save_checkpoint(run.checkpoints, Checkpoint(1, {"model": {"w": torch.zeros(1)}}, {}))
    os.utime(run.config, (started, started))
    return run


def test_a_new_run_holds_its_config(tmp_path: Path) -> None:
    config = RunConfig()
    config = replace(config, training=replace(config.training, seed=7, max_steps=12))
    run = create_run(str(tmp_path / "deep" / "runs"), "first", config)
    assert run.path == tmp_path / "deep" / "runs" / "first"
    assert build_config(RunConfig, load_recipe(str(run.config))) == config


def test_a_run_with_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, "precious")
    run.events.write_text("history\n", encoding="utf-8")
    with pytest.raises(UserError, match="already has checkpoints") as error:
        create_run(str(tmp_path), "precious", RunConfig())
    assert "--resume latest" in str(error.value)
    assert "--run_name" in str(error.value)
    assert run.events.read_text(encoding="utf-8") == "history\n"


def test_a_folder_without_checkpoints_is_used_again_without_the_old_logs(tmp_path: Path) -> None:
    run = make_run(tmp_path, "crashed", has_checkpoint=False)
    run.events.write_text("old\n", encoding="utf-8")
    run.text_log.write_text("old\n", encoding="utf-8")
    again = create_run(str(tmp_path), "crashed", RunConfig())
    assert again == run
    assert again.config.is_file()
    assert not again.events.exists()
    assert not again.text_log.exists()


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="--logdir"):
        create_run(str(tmp_path / "file"), "run", RunConfig())


def test_a_run_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    run = make_run(tmp_path, "alpha")
    assert find_run("alpha", str(tmp_path)) == run
    assert find_run(str(run.path), "elsewhere") == run


def test_a_run_found_by_the_path_dot_knows_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(tmp_path, "alpha").path)
    assert find_run(".", "runs").path.name == "alpha"


def test_a_missing_run_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    make_run(tmp_path, "shakespeare_a")
    make_run(tmp_path, "other")
    with pytest.raises(UserError, match=re.escape("did you mean shakespeare_a?")):
        find_run("shakspeare_a", str(tmp_path))


def test_a_missing_run_without_a_near_name_gets_no_suggestion(tmp_path: Path) -> None:
    make_run(tmp_path, "alpha")
    with pytest.raises(UserError, match="there is no run 'zzzzzz'") as error:
        find_run("zzzzzz", str(tmp_path))
    assert "did you mean" not in str(error.value)


def test_the_newest_run_is_the_one_that_started_last(tmp_path: Path) -> None:
    make_run(tmp_path, "demo_20250101_000000", started=200)
    newest = make_run(tmp_path, "demo_20250102_000000", started=300)
    make_run(tmp_path, "demo_20250103_000000", started=100)
    assert find_newest_run(str(tmp_path), None) == newest
    assert find_newest_run(str(tmp_path), "demo") == newest


def test_the_newest_run_of_a_recipe_is_of_that_recipe(tmp_path: Path) -> None:
    wanted = make_run(tmp_path, "demo_20250101_000000", started=100)
    make_run(tmp_path, "gpt2-124m_20250102_000000", started=200)
    assert find_newest_run(str(tmp_path), "demo") == wanted
    assert find_newest_run(str(tmp_path), "recipes/demo.toml") == wanted


def test_a_recipe_whose_name_begins_like_another_is_not_taken_for_it(tmp_path: Path) -> None:
    wanted = make_run(tmp_path, "demo_20250101_000000", started=100)
    make_run(tmp_path, "demo_large_20250102_000000", started=200)
    assert find_newest_run(str(tmp_path), "demo") == wanted


def test_no_run_of_the_recipe_is_a_user_error(tmp_path: Path) -> None:
    make_run(tmp_path, "gpt2-124m_20250102_000000")
    with pytest.raises(UserError, match="no run of recipe demo"):
        find_newest_run(str(tmp_path), "demo")


def test_no_logdir_means_no_runs(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path / "none")) == []
    with pytest.raises(UserError, match="leave out --resume"):
        find_newest_run(str(tmp_path / "none"), None)


def test_the_default_name_says_the_recipe_and_the_time() -> None:
    assert re.fullmatch(r"demo_\d{8}_\d{6}", make_run_name("demo"))
    assert re.fullmatch(r"mine_\d{8}_\d{6}", make_run_name("some/place/mine.toml"))
    assert re.fullmatch(r"gpt_\d{8}_\d{6}", make_run_name(None))


def test_every_default_name_is_found_as_a_run_of_its_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_run_name("some/place/mine.toml"))
    assert find_newest_run(str(tmp_path), "some/place/mine.toml") == run
