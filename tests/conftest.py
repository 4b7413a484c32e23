"""What the tests share: tiny corpora, tiny runs, the command line as a real process, and real data where it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gptmill.models.kernels.matmuls import choices

PROJECT = Path(__file__).parent.parent

# A run of seconds: two layers, sixteen wide, on one thread so that tests beside each other do not fight.
TINY_FLAGS = (
    "--num_layers 2 --embd_size 16 --num_heads 2 --context_length 16 --total_batch_size 128 --mini_batch_size 4 "
    "--warmup_steps 2 --eval_tokens 64 --sample_tokens 4 --device cpu"
).split()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_choices() -> Iterator[None]:
    """No matmul's fastest way is known; what was known before is known again afterwards."""
    kept = dict(choices)
    choices.clear()
    yield
    choices.clear()
    choices.update(kept)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """About 30 kB of words, the same every time."""
    generator = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    path = tmp_path / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(6000)) + "\n", encoding="utf-8")
    return path


GptMill = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gptmill(tmp_path: Path) -> GptMill:
    """Runs `gptmill` as a user would, in an empty folder, and returns the finished process."""

    def run(*arguments: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        process = subprocess.run(
            [sys.executable, "-m", "gptmill", *map(str, arguments)],
            cwd=tmp_path,
            env=make_environment(**environment),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or process.returncode == 0, f"exit {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process

    return run


def make_environment(**extra: str) -> dict[str, str]:
    """The environment of a process under test: one thread, no colours, a terminal of known width."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100", **extra}


@pytest.fixture
def realdata() -> Path:
    """The folder of real corpora; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("GPTMILL_REALDATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set GPTMILL_REALDATA")
    return folder
