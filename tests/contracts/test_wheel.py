"""The wheel, installed in an empty environment, does what the source tree does: `make wheel-test` runs this.

Every command is a new interpreter of that environment, in a folder without the source tree.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import PROJECT, TINY_FLAGS, write_words

import gptmill

VARIABLE = "GPTMILL_WHEEL_PYTHON"
LIMIT = 600
SOURCE = PROJECT / "src" / "gptmill"

pytestmark = pytest.mark.wheel


def run(folder: Path, *words: str) -> str:
    """What the Python of the environment prints; nothing of this process' environment leads it elsewhere."""
    python = os.environ.get(VARIABLE)
    if python is None:
        pytest.skip(f"{VARIABLE} does not name a Python with the wheel installed")
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(PROJECT / python), *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def call(folder: Path, line: str) -> str:
    return run(folder, "-m", "gptmill", *line.split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run of the demo's recipe."""
    folder = tmp_path_factory.mktemp("installed")
    write_words(folder)
    flags = " ".join(TINY_FLAGS)
    call(folder, f"train demo --corpus words.txt --run_name tiny --max_steps 4 --checkpoint_freq 2 {flags}")
    return folder


def test_it_is_this_version_and_has_every_file(tmp_path: Path) -> None:
    assert call(tmp_path, "--version") == f"gptmill {gptmill.__version__}\n"
    where = run(tmp_path, "-c", "import gptmill; print(gptmill.__file__)").strip()
    installed = Path(where).parent
    assert installed != SOURCE
    files = {path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path for path in files if not (installed / path).is_file()} == set()
    script = Path(os.environ[VARIABLE]).parent / "gptmill"
    assert (PROJECT / script).is_file()


def test_help_recipes_and_completion_are_there(tmp_path: Path) -> None:
    assert "gptmill train demo" in call(tmp_path, "--help")
    assert "Examples:" in call(tmp_path, "train demo --help")
    assert "shakespeare-char" in call(tmp_path, "config list")
    assert "hellaswag" in call(tmp_path, "eval --tasks list")
    assert "complete -o default" in call(tmp_path, "completion bash")


def test_the_doctor_says_that_training_will_work(tmp_path: Path) -> None:
    assert json.loads(call(tmp_path, "doctor --quick --json"))["can_train"]


def test_a_run_trains_resumes_samples_and_exports(trained: Path) -> None:
    call(trained, "train --run_name tiny --resume latest --max_steps 6")
    assert " 6 " in call(trained, "checkpoints list tiny")
    (sample,) = call(trained, "sample tiny --prompt the --max_new_tokens 4 --json").splitlines()
    assert json.loads(sample)["prompt"] == "the"
    assert "verified" in call(trained, "export tiny --to hf --out exported")
    assert (trained / "exported" / "model.safetensors").is_file()
    assert "val" in call(trained, "eval tiny")
    call(trained, "report tiny")
    assert (trained / "runs" / "tiny" / "report.html").is_file()
