"""train and resume as function calls: the same bits as the command line, and nothing left behind in the process."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EXACT_FLAGS, EXACT_STEPS, Start, wait_for_text
from zygote import Process

import gptmill
from gptmill.api.training import return_run
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.requests import StartOptions
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.determinism import ENVIRONMENT
from gptmill.training.loop import Outcome

EXACT = parse_recipe_call("train", "", StartOptions, EXACT_FLAGS).flags
SHORT = {**EXACT, "max_steps": 3, "eval_freq": 50, "checkpoint_freq": 50}


@pytest.fixture
def reference(straight: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run that the command line made of EXACT_FLAGS, whose folder is the working directory."""
    monkeypatch.chdir(straight.parent.parent)
    return straight


def read_result(run: Path) -> list[bytes]:
    """The weights, the optimizer's state and all logged losses."""
    folder = run / "checkpoints" / f"step_{EXACT_STEPS:06d}"
    return [(folder / f"{group}.safetensors").read_bytes() for group in ("model", "optimizer")] + [
        (run / "log.txt").read_bytes()
    ]


def read_settings() -> list[Any]:
    """What training changes for the whole process."""
    cuda = torch.backends.cuda
    return [
        [signal.getsignal(number) for number in signal.valid_signals()],
        (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        [os.environ.get(name) for name in ENVIRONMENT],
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ]


def test_a_call_trains_the_same_bits_as_the_command_line_whatever_was_trained_before(reference: Path) -> None:
    settings = read_settings()
    other = {"deterministic": True, "precision": "bf16", "attention_backend": "math", "seed": 7, "dropout": 0.3}
    first = gptmill.train(run_name="first", progress=False, **{**SHORT, **other})
    assert read_settings() == settings
    run = gptmill.train(gptmill.make_config(**EXACT), run_name="second", progress=False)
    assert read_settings() == settings
    assert (first.state, run.state, run.step) == ("finished", "finished", EXACT_STEPS)
    assert read_result(run.path) == read_result(reference)


def test_a_run_that_reached_its_time_limit_is_returned_and_resumes_to_the_same_bits(reference: Path) -> None:
    run = gptmill.train(run_name="timed", time_limit=1, progress=False, **EXACT)  # less than the margin: one step
    assert run.state == "stopped"
    assert run.step < 3
    resumed = gptmill.resume(run, progress=False)
    assert resumed.state == "finished"
    assert read_result(resumed.path) == read_result(reference)


@pytest.mark.usefixtures("reference")
def test_training_works_in_a_thread_and_shows_no_progress_if_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gptmill.runs.slow_notice.FIRST_SECONDS", 0.0)
    runs: list[gptmill.Run] = []
    thread = Thread(target=lambda: runs.append(gptmill.train(run_name="thread", progress=False, **SHORT)))
    thread.start()
    thread.join()
    assert [run.state for run in runs] == ["finished"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("reference")
def test_mistakes_are_exceptions_and_name_what_to_do() -> None:
    with pytest.raises(gptmill.UserError, match="already has checkpoints"):
        gptmill.train(run_name="straight", **SHORT)
    with pytest.raises(gptmill.UserError, match="did you mean straight"):
        gptmill.resume("strait")
    with pytest.raises(gptmill.ConfigError, match="max_lrr: unknown option"):
        gptmill.resume("straight", max_lrr=1)
    with pytest.raises(gptmill.UserError, match="keeps its name"):
        gptmill.resume("straight", run_name="other")
    with pytest.raises(gptmill.UserError, match="allow_changes"):
        gptmill.resume("straight", max_lr=1.0)
    with pytest.raises(gptmill.UserError, match="leave them out with a RunConfig"):
        gptmill.train(gptmill.RunConfig(), size="gpt2-medium")
    with pytest.raises(gptmill.UserError, match="time_limit soon"):
        gptmill.train("demo", time_limit="soon")


# Trains for ever, until a signal; the first argument is the program's own way with it.
PROGRAM = """
import sys, gptmill
if sys.argv[1] == "prompt":
    sys.ps1 = ">>> "
try:
    run = gptmill.train(run_name="long", **{fields})
    print("returned", run.state)
except KeyboardInterrupt:
    print("interrupted", gptmill.open_run("long").state)
run = gptmill.resume("long", progress=False)
print("resumed", run.state)
""".replace("{fields}", repr({**EXACT, "log_freq": 1}))


def interrupt(process: Process, run: Path) -> str:
    wait_for_text(process, run / "log.txt", "\n5 train")
    process.send_signal(signal.SIGINT)
    return process.communicate()[0]


@pytest.mark.parametrize(("kind", "expected"), [("script", "interrupted stopped"), ("prompt", "returned stopped")])
def test_an_interrupt_saves_and_the_program_goes_on(kind: str, expected: str, reference: Path, start: Start) -> None:
    run = reference.parent / "long"
    output = interrupt(start(kind, program=("-c", PROGRAM)), run)
    if "returned finished" in output:
        pytest.skip("the run was over before the signal came")
    assert expected in output
    assert ("resume with: gptmill.resume('runs/long')" in output) == (kind == "prompt")
    assert "resumed finished" in output
    assert read_result(run) == read_result(reference)


class Handle:
    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(content["text/plain"])


@pytest.mark.usefixtures("reference")
def test_a_notebook_shows_one_text_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for IPython; a kernel's cell then has one output."""
    shown: list[str] = []
    displays = 0

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        nonlocal displays
        assert raw
        assert display_id
        displays += 1
        handle = Handle(shown)
        handle.update(content, raw=True)
        return handle

    class ZMQInteractiveShell:
        pass

    ipython, ipython_display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython).update(get_ipython=ZMQInteractiveShell, display=ipython_display)
    vars(ipython_display).update(display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython_display)
    gptmill.train(run_name="cell", **{**EXACT, "eval_freq": 2})
    assert displays == 1
    assert len(shown) < 100
    assert max(text.count("\n") for text in shown) < 32
    assert "finished at step 40" in shown[-1]
    gptmill.open_corpus("words")
    assert capfd.readouterr() == ("", "")


def make_outcome(run: Path, reason: str, code: int) -> Outcome:
    return Outcome(RunDirectory(run), gptmill.RunConfig(), 40, reason, code)


@pytest.mark.parametrize("code", [exit_codes.DIVERGED, exit_codes.NOT_SAVED])
def test_a_run_that_failed_is_an_error(straight: Path, code: int) -> None:
    with pytest.raises(gptmill.UserError, match="straight: gave up: the loss is not finite"):
        return_run(make_outcome(straight, "gave up: the loss is not finite", code))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_signal_reaches_the_handler_of_the_program_after_the_save(straight: Path) -> None:
    received: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    try:
        run = return_run(make_outcome(straight, "stopped by SIGUSR1", 128 + signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == [signal.SIGUSR1]
    assert run.path == straight
