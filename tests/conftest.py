"""What the tests share: tiny corpora, tiny runs, the command line as a real process, and real data where it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from zygote import Zygote

from gptmill.models.kernels.gemm import autotuned

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
    kept = dict(autotuned)
    autotuned.clear()
    yield
    autotuned.clear()
    autotuned.update(kept)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """About 30 kB of words, the same every time."""
    generator = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    path = tmp_path / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(6000)) + "\n", encoding="utf-8")
    return path


GptMill = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Where commands that need no environment of their own are forked from."""
    zygote = Zygote(make_environment())
    yield zygote
    zygote.close()


@pytest.fixture
def gptmill(tmp_path: Path, zygote: Zygote) -> GptMill:
    """Runs `gptmill` as a user would, in an empty folder, and returns the finished process."""

    def run(*arguments: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        words = tuple(map(str, arguments))
        process = run_afresh(words, tmp_path, environment) if environment else run_forked(words, tmp_path, zygote)
        assert not check or process.returncode == 0, f"exit {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process

    return run


def run_afresh(words: tuple[str, ...], folder: Path, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command as the shell would start it."""
    return subprocess.run(
        [sys.executable, "-m", "gptmill", *words],
        cwd=folder,
        env=make_environment(**extra),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_forked(words: tuple[str, ...], folder: Path, zygote: Zygote) -> subprocess.CompletedProcess[str]:
    """A command that has imported everything already."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
        tempfile.TemporaryFile("w+", encoding="utf-8") as error,
    ):
        code = zygote.start(words, folder, make_environment(), output, error).wait()
        output.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(words, code, output.read(), error.read())


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
