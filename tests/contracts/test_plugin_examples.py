"""The examples of plug-ins are short, and as safe as what is built in: killed and resumed, they end the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import PROJECT, TINY_FLAGS, GptMill, Start, wait_for_text

STEPS = 24
EXAMPLES = {
    "gated_attention.py": "--attention gated --gate_bias 1.0",
    "signum.py": "--optimizer signum --max_lr 1e-3 --min_lr 1e-4",
    "probe_text.py": "--evaluators probe --probe_file words.txt --probe_chars 40",
}
FLAGS = [
    *TINY_FLAGS,
    *f"--data_dir words --max_steps {STEPS} --checkpoint_freq 6 --eval_freq 6 --dropout 0.1 --sample_tokens 2".split(),
]


def read_end(run: Path) -> dict[str, bytes]:
    tensors = sorted((run / "checkpoints/latest").resolve().glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in [*tensors, run / "log.txt"]}


@pytest.mark.parametrize(("name", "flags"), EXAMPLES.items())
@pytest.mark.usefixtures("words")
def test_a_killed_run_of_an_example_resumes_exactly(
    gptmill: GptMill, start: Start, tmp_path: Path, name: str, flags: str
) -> None:
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    command = ["train", *FLAGS, "--plugin", f"examples/{name}", *flags.split()]
    gptmill(*command, "--run_name", "straight")
    killed = start(*command, "--run_name", "killed")
    log = tmp_path / "runs/killed/log.txt"
    wait_for_text(killed, log, "9 train")
    killed.kill()
    killed.communicate()
    assert f"{STEPS} train" not in log.read_text()
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    assert read_end(tmp_path / "runs/killed") == read_end(tmp_path / "runs/straight")


@pytest.mark.usefixtures("words")
def test_what_the_examples_add_is_recorded(gptmill: GptMill, tmp_path: Path) -> None:
    plugins = ",".join(str(PROJECT / "examples" / name) for name in EXAMPLES)
    flags = [*" ".join(EXAMPLES.values()).split(), "--use_tensorboard", "--run_name", "all"]
    gptmill("train", *FLAGS, "--plugin", plugins, *flags)
    run = tmp_path / "runs/all"
    saved = json.loads((run / "checkpoints/latest/checkpoint.json").read_text())["values"]["plugins"]
    assert saved.keys() == {"attention gated", "optimizer signum"}
    assert all(code.startswith("sha256:") for code in saved.values())
    lines = (run / "log.txt").read_text().splitlines()
    assert sum(line.startswith("12 probe/bits_per_byte ") for line in lines) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [scalar.step for scalar in board.Scalars("evals/probe/loss")] == [0, 6, 12, 18, 24]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_short(name: str) -> None:
    assert len((PROJECT / "examples" / name).read_text().splitlines()) <= 40
