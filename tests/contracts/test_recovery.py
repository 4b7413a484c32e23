"""Whatever happens to its files, its time or its disk, a run goes on from the newest sound state to its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EXACT_FLAGS, EXACT_STEPS, TINY_FLAGS, GptMill, MountTmpfs, RunRanks, Start, wait_for_text
from safetensors import safe_open

from gptmill.cli.main import run_guarded
from gptmill.evals.loss import ValidationLoss
from gptmill.models.gpt import GPT
from gptmill.runs.events import EvalDone

STEPS, RUN = EXACT_STEPS, EXACT_FLAGS

# gptmill, which tries again at once what the disk has refused.
IMPATIENT = """
from gptmill.runs.checkpoints import background_save
background_save.RETRY_SECONDS = (0.02,)
from gptmill.cli.main import main
raise SystemExit(main())
"""


@pytest.fixture
def inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> GptMill:
    """As `gptmill`, but in this process, where torch is loaded already."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = list(map(str, arguments))
        capsys.readouterr()
        code = run_guarded(words)
        done = subprocess.CompletedProcess(words, code, *capsys.readouterr())
        assert not check or code == 0, f"exit {code}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(autouse=True)
def _words(words: list[str]) -> None:
    assert words == ["--data_dir", "words"]


def assert_same_end(tmp_path: Path, one: str, other: str) -> None:
    for name in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "log.txt"):
        first, second = ((tmp_path / "runs" / run / name).read_bytes() for run in (one, other))
        assert first == second, name


def flip_a_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(folder: Path) -> None:
    os.truncate(folder / "optimizer.safetensors", 1000)


def lose_the_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, lose_the_manifest])
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, straight: Path, inline: GptMill, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(straight, tmp_path / "runs/damaged", symlinks=True)
    checkpoints = tmp_path / "runs/damaged/checkpoints"
    damage((checkpoints / "latest").resolve())
    damage((checkpoints / "latest_backup").resolve())
    verified = inline("checkpoints", "verify", "damaged", check=False)
    assert verified.returncode == 1
    assert "step_000024" in verified.stdout.splitlines()[-1]
    sampled = inline("sample", "damaged", "--device", "cpu", "--max_new_tokens", "3")
    assert ("using step 24 instead" in sampled.stderr) == (damage is not cut_short)  # which leaves the model whole
    resumed = inline("train", "--run_name", "damaged", "--resume", "latest")
    assert resumed.stderr.count("resuming from step 24 instead") == 2
    assert_same_end(tmp_path, "straight", "damaged")


def test_with_nothing_sound_left_a_run_says_so_and_touches_nothing(tmp_path: Path, inline: GptMill) -> None:
    inline("train", *RUN, "--max_steps", "8", "--run_name", "lost")
    (folder,) = (tmp_path / "runs/lost/checkpoints").glob("step_*")
    flip_a_bit(folder)
    before = sorted(path.name for path in folder.parent.iterdir())
    for resume in ("latest", "auto", "best", "8"):
        refused = inline("train", "--run_name", "lost", "--resume", resume, check=False)
        assert refused.returncode == 2
        assert "checksum" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert sorted(path.name for path in folder.parent.iterdir()) == before


@pytest.fixture
def small_disk(tmp_path: Path, mount_tmpfs: MountTmpfs) -> Path:
    """A file system of 4 MB; checkpoints of these tests take about half of one."""
    return mount_tmpfs(tmp_path / "disk", "4m")


def test_a_disk_that_fills_up_does_not_end_the_run(
    tmp_path: Path, inline: GptMill, start: Start, small_disk: Path
) -> None:
    wide = ["--embd_size", "32", "--keep_checkpoints", "20"]
    inline("train", *RUN, *wide, "--run_name", "straight")
    other = small_disk / "other"
    other.write_bytes(bytes(800_000))
    place = ["--logdir", str(small_disk), "--run_name", "full"]
    process = start("train", *RUN, *wide, "--checkpoint_freq", "2", *place, program=("-c", IMPATIENT))
    checkpoints = small_disk / "full/checkpoints"
    while not (checkpoints / "latest").exists() and process.poll() is None:
        time.sleep(0.005)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    other.write_bytes(bytes(800_000 + max(0, free - 700_000)))  # what is left is not enough for a second one
    output, _ = process.communicate(timeout=120)
    log = (small_disk / "full/log.txt").read_text()
    assert f"\n{STEPS} train" in log, output
    assert "the disk is full: deleted" in output or "THE DISK IS FULL" in output
    assert process.returncode in (0, 74), output
    other.unlink()
    inline("train", *place, "--resume", "latest")
    assert_same_end_on(tmp_path / "runs/straight", small_disk / "full")


def assert_same_end_on(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one / "checkpoints/latest" / name).read_bytes() == (other / "checkpoints/latest" / name).read_bytes()
    assert (one / "log.txt").read_text() == (other / "log.txt").read_text()


def test_a_run_that_could_never_save_does_not_begin(inline: GptMill, small_disk: Path) -> None:
    refused = inline("train", *RUN, "--embd_size", "256", "--logdir", str(small_disk), check=False)
    assert refused.returncode == 2
    assert "free disk space" in refused.stderr
    assert list(small_disk.glob("*/config.toml")) == []


def test_a_run_stops_before_its_time_limit_and_goes_on(tmp_path: Path, gptmill: GptMill) -> None:
    long = ["--max_steps", "100000", "--eval_freq", "1000000"]
    stopped = gptmill("train", *RUN, *long, "--run_name", "late", "--time_limit", "4s", check=False)
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    assert "stopped by its time limit" in stopped.stdout
    last = int((tmp_path / "runs/late/checkpoints/latest").resolve().name.removeprefix("step_"))
    assert last > 0
    assert f"{last} train" in (tmp_path / "runs/late/log.txt").read_text()


@pytest.mark.parametrize("slow", ["--eval_tokens=3000", "--sample_tokens=120"])
def test_a_signal_is_heard_in_the_middle_of_an_evaluation(
    tmp_path: Path, inline: GptMill, start: Start, slow: str
) -> None:
    """Many windows one at a time, or a long sample: seconds that a scheduler may not grant."""
    inline("prepare", "words.txt", "--tokenizer", "byte", "--val_fraction", "0.5", "--out", "half")
    short = "--total_batch_size 32 --mini_batch_size 1 --max_steps 7 --eval_freq 6 --data_dir half".split()
    flags = ["train", *RUN, slow, *short]
    inline(*flags, "--run_name", "straight")
    process = start(*flags, "--run_name", "stopped")
    log = tmp_path / "runs/stopped/log.txt"
    wait_for_text(process, log, "\n6 train")  # what comes next is the evaluation
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "\n6 train" in log.read_text()
    assert "\n6 val" not in log.read_text()
    inline("train", "--run_name", "stopped", "--resume", "latest")
    assert_same_end(tmp_path, "straight", "stopped")
    samples = [(tmp_path / "runs" / run / "samples/step_000006.txt").read_text() for run in ("straight", "stopped")]
    assert samples[0] == samples[1]


def test_early_stopping_keeps_the_best_model_and_survives_a_kill(tmp_path: Path, inline: GptMill, start: Start) -> None:
    """So high a rate that the loss soon rises again."""
    flags = [*RUN, "--max_steps", "200", "--eval_freq", "5", "--early_stop_patience", "3", "--max_lr", "0.3"]
    flags += ["--guard", "off", "--warmup_steps", "0"]
    done = inline("train", *flags, "--run_name", "straight")
    assert "stopped early" in done.stdout
    log = [line.split() for line in (tmp_path / "runs/straight/log.txt").read_text().splitlines()]
    losses = {int(step): float(loss) for step, kind, loss in log if kind == "val" and int(step) > 0}
    best = min(losses, key=lambda step: (losses[step], step))
    assert max(losses) == best + 15
    assert (tmp_path / "runs/straight/checkpoints/best_model").resolve().name == f"step_{best:06d}"
    killed = start("train", *flags, "--run_name", "killed")
    wait_for_text(killed, tmp_path / "runs/killed/log.txt", f"\n{best + 7} train")
    killed.kill()
    killed.communicate()
    for _ in range(2):  # the second time there is nothing left to do
        resumed = inline("train", "--run_name", "killed", "--resume", "latest")
        assert f"stopped early at step {best + 15}" in resumed.stdout
    assert_same_end(tmp_path, "straight", "killed")
    assert (tmp_path / "runs/killed/checkpoints/best_model").resolve().name.startswith(f"step_{best:06d}")


def test_a_run_begins_with_another_one_s_checkpoint(tmp_path: Path, straight: Path, inline: GptMill) -> None:
    path = "runs/straight/checkpoints/rolling_step_000024"
    inline("train", "--resume", path, "--run_name", "daughter")
    for name in ("model.safetensors", "optimizer.safetensors"):
        mother, daughter = (
            (run / "checkpoints/latest" / name).read_bytes() for run in (straight, tmp_path / "runs/daughter")
        )
        assert mother == daughter
    assert "step_000024" in inline("checkpoints", "ledger", "daughter").stdout
    refused = inline("train", "--resume", path, "--run_name", "other", "--max_lr", "0.5", check=False)
    assert (refused.returncode, "--allow_changes" in refused.stderr) == (2, True)
    inline("train", "--resume", path, "--run_name", "other", "--max_lr", "0.5", "--allow_changes")


def test_going_back_on_purpose_keeps_what_was_there_until_it_is_pruned(straight: Path, inline: GptMill) -> None:
    inline("train", "--run_name", "straight", "--resume", "16", "--max_steps", str(STEPS + 1))
    checkpoints = straight / "checkpoints"
    assert (checkpoints / f"abandoned_step_{STEPS:06d}").resolve().is_dir()
    # Its logs were cut meanwhile, which is no damage.
    branch = inline("train", "--run_name", "straight", "--resume", str(STEPS), "--max_steps", str(STEPS + 2))
    assert "damaged" not in branch.stdout + branch.stderr
    inline("checkpoints", "prune", "straight")
    assert not (checkpoints / f"abandoned_step_{STEPS:06d}").exists()
    assert f"step_{STEPS + 2:06d}" in inline("checkpoints", "verify", "straight").stdout.splitlines()[-1]


def test_ranks_of_ddp_and_one_process_write_the_same_files(
    tmp_path: Path, inline: GptMill, run_ranks: RunRanks
) -> None:
    flags = [*RUN, "--no_exact_ranks", "--max_steps", "2"]
    inline("train", *flags, "--run_name", "one")
    run_ranks("train", *flags, "--run_name", "two")
    for group in ("model", "optimizer"):
        names = []
        for run in ("one", "two"):
            with safe_open(tmp_path / f"runs/{run}/checkpoints/latest/{group}.safetensors", "pt") as file:
                names.append(sorted((name, tuple(file.get_slice(name).get_shape())) for name in file.keys()))  # noqa: SIM118
        assert names[0] == names[1]
        assert not [name for name, _ in names[0] if "_orig_mod" in name or "module." in name]


def test_a_run_that_changed_its_optimizer_and_was_killed_goes_on(tmp_path: Path, inline: GptMill, start: Start) -> None:
    """Its config names the new one by then, and its newest checkpoint is still from the old."""
    flags = [*TINY_FLAGS, "--data_dir", "words", "--sample_tokens", "0", "--run_name", "changed"]
    inline("train", *flags, "--max_steps", "4", "--checkpoint_freq", "4", "--ema_decay", "0.9")
    change = (
        "--run_name changed --resume latest --allow_changes --optimizer lion --max_steps 2000 --checkpoint_freq 1900"
    )
    process = start("train", *change.split())
    log = tmp_path / "runs/changed/log.txt"
    wait_for_text(process, log, "\n9 train")
    process.kill()
    process.communicate()
    inline("train", "--run_name", "changed", "--resume", "latest", "--max_steps", "12")
    assert "\n12 train" in log.read_text(encoding="utf-8")


def test_ctrl_c_while_something_is_compiled_saves_and_stops(
    tmp_path: Path, inline: GptMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reaches the compiler that torch has started as well, and torch then fails."""
    evaluate = ValidationLoss.evaluate

    def break_off(self: ValidationLoss, model: GPT, step: int, *rest: Any) -> EvalDone:
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            from torch._dynamo.exc import BackendCompilerFailed

            raise BackendCompilerFailed(evaluate, RuntimeError("the compiler was ended"), None)
        return evaluate(self, model, step, *rest)

    monkeypatch.setattr(ValidationLoss, "evaluate", break_off)
    flags = [*TINY_FLAGS, "--data_dir", "words", "--sample_tokens", "0", "--max_steps", "9", "--eval_freq", "4"]
    assert inline("train", *flags, "--run_name", "broken", check=False).returncode == 130
    assert (tmp_path / "runs/broken/checkpoints/latest").resolve().name == "step_000004"
