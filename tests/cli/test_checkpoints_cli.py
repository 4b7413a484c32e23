"""gptmill checkpoints, as a user runs it: the table, the check of every byte, pruning, differences and the history."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import GptMill

from gptmill.cli.checkpoints import format_age, print_checkpoints
from gptmill.cli.main import run_guarded
from gptmill.config.run import CheckpointConfig, RunConfig
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import list_step_folders, read_info, save_checkpoint
from gptmill.runs.checkpoints.tiers import (
    BEST,
    link_tier,
    link_tiers,
    make_epoch_name,
    make_rolling_name,
    read_tiers,
)
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runs.event_json import to_json
from gptmill.runs.events import RunStarted, StepLogged, Warned
from gptmill.runs.history import append_event
from gptmill.runs.run_lock import lock_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """`runs/saved`, which has no checkpoints yet and keeps two."""
    monkeypatch.chdir(tmp_path)
    return create_run("runs", "saved", replace(RunConfig(), checkpoints=CheckpointConfig(keep_checkpoints=2)))


@pytest.fixture
def saved(run: RunDirectory) -> RunDirectory:
    """Steps 10, 20 and 30, all rolling; 10 is the best."""
    for step in (10, 20, 30):
        generator = torch.Generator().manual_seed(0)
        model = {"wide": torch.randn(50, 40, generator=generator) + (step == 30), "same": torch.ones(3)}
        values = {"train_loss": step / 10, "val_loss": step / 20, "config": {"max_lr": 1.0 / step, "seed": 1}}
        info = save_checkpoint(run.checkpoints, Checkpoint(step, {"model": model}, values))
        tiers = [make_rolling_name(step)] + ([BEST] if step == 10 else [])
        link_tiers(run.checkpoints, info.path, tiers, keep=10)
    return run


def make_start(step: int, moment: float) -> RunStarted:
    return RunStarted(step, "runs/saved", 30, 64, 9, "CPU", "fp32", 1, "x", "byte:1", "0.1", "2.9", None, time=moment)


def make_step(step: int, moment: float) -> StepLogged:
    return StepLogged(step, 0.1, 2.5, 1e-3, 1.0, 100.0, 1.0, time=moment)


def call(*words: str) -> int:
    return run_guarded(["checkpoints", *words])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_list_is_a_table_of_step_tiers_losses_size_age_and_state(saved: RunDirectory, capsys: Capture) -> None:
    manifest = saved.checkpoints / "step_000020/checkpoint.json"
    manifest.write_text("{}", encoding="utf-8")
    file = saved.checkpoints / "step_000030/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert call("list", "saved") == 0
    head, first, second, third, total, meaning = capsys.readouterr().out.splitlines()
    assert re.split(
        r"  +", head.strip()
    ) == "step/tiers/train loss/val loss/perplexity/elapsed/MB/age/state/path".split("/")
    cells = re.split(r"  +", first.strip())
    assert cells[:7] == ["10", "best_model, rolling_step_000010", "1.0000", "0.5000", "1.65", "-", "0.0"]
    assert re.fullmatch(r"\d+ s", cells[7])
    assert cells[8:] == ["complete", "runs/saved/checkpoints/step_000010"]
    cells = re.split(r"  +", second.strip())
    assert cells[:6] == ["20", "latest_backup, rolling_step_000020", "-", "-", "-", "-"]
    assert "damaged" in cells[8]
    cells = re.split(r"  +", third.strip())
    assert cells[:5] == ["30", "latest, rolling_step_000030", "3.0000", "1.5000", "4.48"]
    assert "model.safetensors" in cells[8]
    bytes_held = sum(path.stat().st_size for path in saved.checkpoints.glob("step_*/*"))
    assert total == f"3 checkpoints, {bytes_held / 1e6:,.1f} MB in total"
    assert meaning == "complete: every file has its size; gptmill checkpoints verify runs/saved reads every byte"


def test_a_validation_loss_belongs_to_the_step_that_was_evaluated(run: RunDirectory, capsys: Capture) -> None:
    for step, evaluated_at in ((10, 10), (15, 10), (20, 20)):
        values = {"train_loss": 3.0, "val_loss": evaluated_at / 20, "evaluated_at": evaluated_at}
        save_checkpoint(run.checkpoints, Checkpoint(step, {"model": {}}, values))
    assert call("list", "saved") == 0
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [(row[0], row[3]) for row in rows] == [("10", "0.5000"), ("15", "-"), ("20", "1.0000")]


def test_the_table_is_the_one_of_the_folder(saved: RunDirectory, capsys: Capture) -> None:
    assert call("list", str(saved.path)) == 0
    listed = capsys.readouterr().out
    print_checkpoints(saved.checkpoints)
    assert capsys.readouterr().out == listed


def test_without_checkpoints_it_says_so(run: RunDirectory, capsys: Capture) -> None:
    for words in (["list"], ["verify"], ["prune"]):
        assert call(*words, "saved") == 0
        assert capsys.readouterr().out == f"{run.path} has no checkpoints yet\n"


def test_verify_reads_every_byte_and_names_the_checkpoint_to_resume_from(saved: RunDirectory, capsys: Capture) -> None:
    assert call("verify", "saved") == 0
    assert capsys.readouterr().out.splitlines() == [
        "step_000010: valid",
        "step_000020: valid",
        "step_000030: valid",
        "--resume latest would resume from step_000030",
    ]
    flip(saved.checkpoints / "step_000030/model.safetensors")
    assert call("list", "saved") == 0
    assert "damaged" not in capsys.readouterr().out, "the quick look cannot see a flipped bit"
    assert call("verify", "saved") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "checksum of model.safetensors" in lines[2]
    assert lines[3] == "--resume latest would resume from step_000020"
    for path in list_step_folders(saved.checkpoints)[:2]:
        (path / "model.safetensors").unlink()
    assert call("verify", "saved") == 1
    assert "no valid checkpoint" in capsys.readouterr().out


def test_prune_keeps_as_many_as_the_run_or_the_flag_says(saved: RunDirectory, capsys: Capture) -> None:
    info = save_checkpoint(saved.checkpoints, Checkpoint(40, {"model": {"x": torch.zeros(250_000)}}, {"val_loss": 9.0}))
    link_tiers(saved.checkpoints, info.path, [make_rolling_name(40)], keep=10)
    assert call("prune", "saved") == 0
    # 10 is the best one; 30 and 40 are the newest two.
    assert capsys.readouterr().out.splitlines() == ["deleted step_000020", "0.0 MB freed, 3 checkpoints kept"]
    info = save_checkpoint(saved.checkpoints, Checkpoint(50, {"model": {}}, {"val_loss": 9.0}))
    link_tiers(saved.checkpoints, info.path, [make_rolling_name(50)], keep=10)
    info = save_checkpoint(saved.checkpoints, Checkpoint(60, {"model": {}}, {"val_loss": 9.0}))
    link_tiers(saved.checkpoints, info.path, [make_rolling_name(60)], keep=10)
    assert call("prune", "saved", "--keep", "1") == 0
    # 50 is latest_backup.
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["deleted step_000030", "deleted step_000040", "1.0 MB freed, 3 checkpoints kept"]
    assert [path.name for path in list_step_folders(saved.checkpoints)] == ["step_000010", "step_000050", "step_000060"]
    assert call("prune", "saved", "--keep", "1") == 0
    assert capsys.readouterr().out == "0.0 MB freed, 3 checkpoints kept\n"


def test_list_tells_the_training_time_until_a_checkpoint(saved: RunDirectory, capsys: Capture) -> None:
    """Without the time between processes: the second one started a day after the first had ended."""
    saved_at = read_info(saved.checkpoints / "step_000030").saved_at
    events = [
        make_start(0, saved_at - 100_000),
        make_step(10, saved_at - 99_900),
        make_start(10, saved_at - 25),
        make_step(30, saved_at),
    ]
    saved.events.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    assert call("list", "saved") == 0
    last = capsys.readouterr().out.splitlines()[3]
    assert re.split(r"  +", last.strip())[5] == "2 min 5 s"


def test_remove_deletes_named_checkpoints_with_their_tiers(saved: RunDirectory, capsys: Capture) -> None:
    assert call("remove", "saved", "rolling_step_000020", "step_000020") == 0
    assert capsys.readouterr().out.splitlines() == ["removed step_000020: 0.0 MB freed", "2 checkpoints left"]
    assert [path.name for path in list_step_folders(saved.checkpoints)] == ["step_000010", "step_000030"]
    assert {path.name for path in read_tiers(saved.checkpoints).values()} == {"step_000010", "step_000030"}
    assert not (saved.checkpoints / "rolling_step_000020").is_symlink()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["30"], "step_000030 is the run's latest; add --force"),
        (["latest"], "step_000030 is the run's latest; add --force"),
        (["20", "10"], "step_000010 is the run's best_model; add --force"),
        (["10", "20", "30"], "the run would have no checkpoint left"),
        (["nothing"], "there is no checkpoint 'nothing'"),
        (["runs"], "is not a checkpoint of"),
        ([], "the usage is"),
        (["10", "--keep", "1"], "--keep applies only to gptmill checkpoints prune"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_remove_refuses_what_the_run_cannot_spare(
    saved: RunDirectory, capsys: Capture, names: list[str], reason: str
) -> None:
    before = read_tiers(saved.checkpoints)
    assert call("remove", "saved", *names) == 2
    assert reason in capsys.readouterr().err
    assert read_tiers(saved.checkpoints) == before
    assert len(list_step_folders(saved.checkpoints)) == 3


def test_remove_keeps_the_only_complete_checkpoint(saved: RunDirectory, capsys: Capture) -> None:
    for step in (10, 30):
        (saved.checkpoints / f"step_{step:06d}/model.safetensors").unlink()
    assert call("remove", "saved", "20") == 2
    assert "no complete checkpoint left" in capsys.readouterr().err


def test_remove_by_force_links_latest_and_best_to_what_remains(saved: RunDirectory, capsys: Capture) -> None:
    assert call("remove", "saved", "30", "10", "--force") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["latest is now step_000020", "best_model is now step_000020", "1 checkpoint left"]
    assert set(read_tiers(saved.checkpoints)) == {"latest", "best_model", "rolling_step_000020"}
    assert call("remove", "saved", "20", "--force") == 0
    assert read_tiers(saved.checkpoints) == {}


def test_remove_does_not_run_beside_training(saved: RunDirectory, capsys: Capture) -> None:
    with lock_run(saved):
        assert call("remove", "saved", "20") == 2
    assert "another process" in capsys.readouterr().err
    assert len(list_step_folders(saved.checkpoints)) == 3


def test_prune_drops_epochs_where_asked(saved: RunDirectory, capsys: Capture) -> None:
    for number, step in ((1, 10), (2, 20)):
        link_tier(saved.checkpoints, make_epoch_name(number), saved.checkpoints / f"step_{step:06d}")
    (saved.checkpoints / "latest_backup").unlink()
    assert call("prune", "saved", "--keep", "0") == 0
    assert len(list_step_folders(saved.checkpoints)) == 3
    assert call("prune", "saved", "--keep", "0", "--keep_epochs", "-1") == 2
    assert call("prune", "saved", "--keep", "0", "--keep_epochs", "0") == 0
    assert "deleted step_000020" in capsys.readouterr().out
    assert set(read_tiers(saved.checkpoints)) == {"latest", "best_model"}


def test_prune_does_not_run_beside_training(saved: RunDirectory, gptmill: GptMill) -> None:
    before = read_tiers(saved.checkpoints)
    with lock_run(saved):
        process = gptmill("checkpoints", "prune", "saved", "--keep", "0", check=False)
    assert process.returncode == 2
    assert "another process" in process.stderr
    assert read_tiers(saved.checkpoints) == before


@pytest.mark.parametrize("words", [["10"], ["best_model", "latest"], ["best", "30"], ["step_000010"], ["10", "PATH"]])
def test_diff_takes_steps_tiers_and_paths(words: list[str], saved: RunDirectory, capsys: Capture) -> None:
    path = str(saved.checkpoints / "step_000030")
    assert call("diff", "saved", *(path if word == "PATH" else word for word in words)) == 0
    output = capsys.readouterr().out
    assert output.startswith("runs/saved/checkpoints/step_000010 -> runs/saved/checkpoints/step_000030\n")
    assert "max_lr: 0.1 -> 0.0333" in output
    assert "step: 10 -> 30" in output
    assert "train_loss: 1.0 -> 3.0" in output
    assert "model: 1 of 2 tensors are bit-identical" in output
    assert "wide: by up to 1, norm by +" in output


@pytest.mark.parametrize("action", ["history", "ledger"])
def test_history_lists_the_events_of_the_run(action: str, saved: RunDirectory, capsys: Capture) -> None:
    append_event(saved, Warned(5, "disk", "nearly full"))
    assert call(action, "saved") == 0
    output = capsys.readouterr().out
    assert "warning: nearly full" in output
    assert "\ngoodput " in output


def test_an_age_is_shown_in_the_largest_unit_that_fits() -> None:
    ages = {5: "5 s", 200: "3 min", 7300: "2 h", 90_000: "1 d", 900_000: "10 d", -3: "0 s"}
    assert {seconds: format_age(seconds) for seconds in ages} == ages


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the usage is"),
        (["list"], "the usage is"),
        (["list", "saved", "10"], "the usage is"),
        (["weigh", "saved"], "the usage is"),
        (["diff", "saved"], "the usage is"),
        (["diff", "saved", "10", "20", "30"], "the usage is"),
        (["diff", "saved", "11"], "there is no checkpoint '11'"),
        (["diff", "saved", "epoch_00001"], "best_model"),
        (["diff", "saved", "."], "checkpoint.json"),
        (["list", "svaed"], "did you mean saved?"),
        (["prune", "saved", "--keep", "-1"], "at least 0"),
        (["list", "saved", "--keep", "1"], "--keep applies only to"),
        (["verify", "saved", "--deep"], "unknown flag"),
    ],
)
@pytest.mark.usefixtures("saved")
def test_mistakes_get_a_sentence(words: list[str], expected: str, capsys: Capture) -> None:
    assert call(*words) == 2
    assert expected in capsys.readouterr().err
