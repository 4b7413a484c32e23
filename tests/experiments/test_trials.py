"""Trainings that others start and watch do not outlive them."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import Start

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.run import TrackingConfig
from gptmill.config.validation import check_config
from gptmill.experiments import child_run, trials
from gptmill.experiments.trials import UNTRACKED, Trials

STARTER = """
import sys
from pathlib import Path
from gptmill.experiments import child_run, trials
child_run.PROGRAM = (sys.executable, "-c", "import time; time.sleep(600)")
with trials.Trials(Path(sys.argv[1]), [], 1, print)._open_process("one", []) as process:
    print(process.pid, flush=True)
    process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_training_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path: Path, start: Start) -> None:
    starter = start(tmp_path, program=("-c", STARTER))
    assert starter.stdout is not None
    child = int(starter.stdout.readline())
    starter.kill()
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.1)
    pytest.fail("the training runs on")


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not only waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_training_that_could_not_even_complain_is_told_from_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_run, "PROGRAM", (sys.executable, "-c", "raise SystemExit(2)"))
    with pytest.raises(UserError, match="exit code 2: nothing on stderr"):
        Trials(tmp_path, [], 1, lambda _: None).train("one")
    monkeypatch.setattr(trials.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    with pytest.raises(UserError, match="no disk space is left"):
        Trials(tmp_path, [], 1, lambda _: None).train("two")


IMPATIENT = """
import os, signal, sys, time
from pathlib import Path
from gptmill.experiments import child_run, trials
child_run.PROGRAM = (sys.executable, "-c", "import time; time.sleep(600)")
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    with trials.Trials(Path(sys.argv[1]), [], 1, print)._open_process("one", []):
        time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_in_the_moment_when_a_training_is_started_is_not_lost(tmp_path: Path, start: Start) -> None:
    assert start(tmp_path, program=("-c", IMPATIENT)).communicate(timeout=60) == ("interrupted\n", "")


def test_a_recipe_with_every_tracker_makes_an_untracked_trial() -> None:
    tracked = {item.name: True for item in fields(TrackingConfig) if item.name.startswith("use_")}
    config = make_config(None, {"data_dir": "a", **tracked, "histogram_freq": 5, **UNTRACKED})
    check_config(config)
    assert not any(getattr(config.tracking, name) for name in tracked)
