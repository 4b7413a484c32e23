"""How a process starts: torch's compiler, which takes seconds to import, is there in time, and only where needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GptMill, make_environment

TINY = "--num_layers 1 --embd_size 16 --num_heads 1 --context_length 16 --total_batch_size 64 --mini_batch_size 4"
USED = "--eval_tokens 64 --sample_tokens 0 --max_steps 1 --device cpu"
LOOK = """
import sys
import torch
torch.library.triton_op = None  # which imports the compiler, where Triton is installed
from gptmill.cli.main import main
code = main()
sys.exit(code or (99 if "torch._dynamo" in sys.modules else 0))
"""


@pytest.fixture
def run_name(gptmill: GptMill, text_file: Path, tmp_path: Path) -> str:
    gptmill(*f"train demo --corpus {text_file} --run_name plain --logdir {tmp_path} {TINY} {USED}".split())
    return "plain"


def test_a_compiled_run_may_be_deterministic(text_file: Path, tmp_path: Path) -> None:
    """Which torch tells its compiler, while that is being imported beside. What it would compile is left out here."""
    flags = f"{TINY} {USED} --compile --deterministic --logdir {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "gptmill", *f"train demo --corpus {text_file} --run_name compiled {flags}".split()],
        cwd=tmp_path, env=make_environment(TORCHDYNAMO_DISABLE="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout


def test_samples_do_without_the_compiler(run_name: str, tmp_path: Path) -> None:
    words = f"sample {run_name} --logdir {tmp_path} --max_new_tokens 3 --device cpu".split()
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
