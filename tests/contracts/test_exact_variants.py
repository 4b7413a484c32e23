"""Exact resume holds for every optimizer, schedule, precision and architecture: a run that goes back half way and
trains on ends with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY_FLAGS
from digest_rows import VARIANTS

from gptmill.cli.main import run_guarded

pytestmark = pytest.mark.slow

STEPS, HALF = 8, 4
FLAGS = [
    *TINY_FLAGS,
    *("--data_dir words --sample_tokens 0 --dropout 0.1").split(),
    *(f"--max_steps {STEPS} --checkpoint_freq {HALF} --eval_freq {HALF} --run_name run").split(),
]


@pytest.fixture
def run(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["prepare", str(text_file), "--tokenizer", "byte", "--out", "words"]) == 0
    return tmp_path / "runs/run"


def read_end(run: Path) -> dict[str, bytes]:
    """Every byte that the last checkpoint holds of the state, and the log."""
    tensors = sorted((run / "checkpoints/latest").resolve().glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in [*tensors, run / "log.txt"]}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_run_that_goes_back_ends_with_the_same_bytes(run: Path, flags: str) -> None:
    if "adamw8bit" in flags:
        pytest.importorskip("torchao")
    assert run_guarded(["train", *FLAGS, *flags.split()]) == 0
    end = read_end(run)
    assert run_guarded(["train", "--run_name", "run", "--resume", str(HALF)]) == 0
    assert (run / "checkpoints/latest").resolve().name == f"step_{STEPS:06d}_2"
    again = read_end(run)
    assert again.keys() == end.keys()
    assert ("ema.safetensors" in end) == ("--ema_decay" in flags)
    for name, content in end.items():
        assert again[name] == content, name
