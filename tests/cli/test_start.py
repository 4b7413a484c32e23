"""How a process starts: torch's compiler, which takes seconds to import, is there in time, and only where needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import GptMill, make_environment

from gptmill.cli.main import run_guarded

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

INTERRUPT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("gptmill", run_name="__main__", alter_sys=True)
"""

LOSE = """
import os, runpy, signal, sys, time, weakref
class Lose:
    def find_spec(self, name, *_):
        if name == "gptmill.cli.config":
            held = {1}
            watch = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGINT))
            del held
            time.sleep(5)
sys.meta_path.insert(0, Lose())
runpy.run_module("gptmill", run_name="__main__", alter_sys=True)
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


def test_next_steps_name_no_recipe_but_the_one_that_was_given(gptmill: GptMill, run_name: str, tmp_path: Path) -> None:
    flags = f"--run_name {run_name} --logdir {tmp_path} --resume latest".split()
    resumed = gptmill("train", *flags, "--max_steps", "2").stdout
    assert "Next steps" in resumed
    assert "YOUR_TEXT" not in resumed
    assert "train demo --corpus YOUR_TEXT.txt" in gptmill("train", "demo", *flags, "--max_steps", "3").stdout


def test_samples_do_without_the_compiler(run_name: str, tmp_path: Path) -> None:
    words = f"sample {run_name} --logdir {tmp_path} --max_new_tokens 3 --device cpu".split()
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["gptmill.cli.main", "gptmill.config.exit_codes", "gptmill.cli.config"])
def test_an_interrupt_while_python_still_imports_leaves_no_traceback(module: str, tmp_path: Path) -> None:
    code = INTERRUPT.replace("{module}", module)
    done = subprocess.run(
        [sys.executable, "-c", code, "config", "list"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gptmill: interrupted\n")


def test_an_interrupt_that_python_cannot_raise_is_not_lost(tmp_path: Path) -> None:
    """It arrives in a callback, whose exceptions Python prints and drops."""
    done = subprocess.run(
        [sys.executable, "-c", LOSE, "config", "list"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gptmill: interrupted\n")


def import_extension(_arguments: list[str]) -> int:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("initialization failed")  # noqa: B904


def make_class(_arguments: list[str]) -> int:
    class Attribute:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    try:
        type("Owner", (), {"attribute": Attribute()})
    except KeyboardInterrupt as error:  # Python 3.12 and later leave it as it is
        raise RuntimeError("Error calling __set_name__") from error
    return 0


@pytest.mark.parametrize("run", [import_extension, make_class])
def test_an_interrupt_that_an_import_rewrites_is_still_one(
    run: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gptmill.cli.config.run", run)
    assert run_guarded(["config", "list"]) == 130
    assert capsys.readouterr().err == "gptmill: interrupted\n"


def test_an_error_while_an_interrupt_is_handled_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def clean_up_badly(_arguments: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("a defect")

    monkeypatch.setattr("gptmill.cli.config.run", clean_up_badly)
    with pytest.raises(RuntimeError, match="a defect"):
        run_guarded(["config", "list"])
