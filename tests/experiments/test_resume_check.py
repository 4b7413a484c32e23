"""gptmill verify-resume: what it checks, what it finds, and what it leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_FLAGS, GptMill, replace_sleep

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import PrepareRequest, VerifyResumeRequest
from gptmill.config.serialization import format_flags
from gptmill.data.prepare import prepare_corpus
from gptmill.experiments import child_run
from gptmill.experiments.resume_check import ResumeCheck, check_resume
from gptmill.runs.checkpoints.storage import Checkpoint, save_checkpoint

# A training in name alone: it logs, and ends with one of two checkpoints that were made before, by who it is.
TRAINING = """
import json, os, shutil, sys, time
from pathlib import Path

from gptmill.runs.event_json import to_json
from gptmill.runs.events import RunStarted, StepLogged

here = Path(sys.argv[1])
way = (here / "way").read_text()
options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:])
name, is_resumed = options["run_name"], "resume" in options
run = Path(options["logdir"]) / name
steps = 8
run.mkdir(exist_ok=True)
(here / "pid").write_text(str(os.getpid()))
(here / f"{name}{'-resumed' if is_resumed else ''}.arguments").write_text(json.dumps(sys.argv[2:]))
if way == "fails":
    sys.stderr.write("noise\\ngptmill: the corpus is gone; find it\\n")
    sys.exit(2)
is_odd = way == "odd when resumed" and is_resumed or way == "never twice the same" and name != "straight"
events = (run / "events.jsonl").open("a", buffering=1)
events.write(to_json(RunStarted(4 * is_resumed, "r", steps, 1, 1, "CPU", "fp32", 1, "c", "t", "0", "2", None)) + "\\n")
speed = 80.0 if "deterministic" in options and "no_deterministic" not in options else 100.0
for step in range(5 if is_resumed else 1, steps + 1):
    with (run / "log.txt").open("a") as log:
        log.write(f"{step} train {3 - step / 10 + (is_odd and step == 7) * 1e-6:.6f}\\n")
    events.write(to_json(StepLogged(step, 0.0, 2.0, 0.1, 1.0, speed if step > 3 else 1.0, 0.0)) + "\\n")
    if step == 4:
        shutil.copytree(here / "even" / "step_000008", run / "checkpoints" / "step_000004")
        if name == "killed" and not is_resumed and way != "too fast":
            time.sleep(300)
shutil.copytree(here / ("odd" if is_odd else "even") / "step_000008", run / "checkpoints" / "step_000008")
"""


class Bench:
    """A resume check with fake training runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.said: list[str] = []
        for kind, number in (("even", 0.0), ("odd", 1e-3)):
            weights = torch.zeros(3)
            weights[1] = number
            tensors = {"model": {"a": weights, "b": torch.ones(2)}, "optimizer": {"a": torch.ones(3)}}
            save_checkpoint(folder / kind, Checkpoint(8, tensors, {"windows_read": 64}))
        (folder / "training.py").write_text(TRAINING, encoding="utf-8")
        monkeypatch.setattr(child_run, "PROGRAM", (sys.executable, str(folder / "training.py"), str(folder)))
        monkeypatch.chdir(folder)

    def check(self, way: str, *, steps: int = 8, keep_runs: str | None = None, **flags: Any) -> ResumeCheck:
        (self.folder / "way").write_text(way, encoding="utf-8")
        request = VerifyResumeRequest(steps=steps, keep_runs=keep_runs)
        return check_resume(None, {"corpus": "x.txt", **flags}, request, self.said.append)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_real_run_that_is_killed_goes_on_bit_identically(tmp_path: Path, text_file: Path, gptmill: GptMill) -> None:
    prepare_corpus([str(text_file)], PrepareRequest(out=str(tmp_path / "words"), tokenizer="byte"), lambda _: None)
    flags = [*TINY_FLAGS, "--dropout", "0.1", "--data_dir", "words", "--steps", "60"]
    process = gptmill("verify-resume", *flags)
    verdict, detail = process.stdout.splitlines()[-2:]
    assert verdict.startswith("bit-identical: ")
    assert verdict.endswith(" tensors of model and optimizer, 63 log lines")
    assert "resumed from step" in detail
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "runs").exists(), "the runs of the check are still there"


def test_runs_that_are_the_same_are_told_so(bench: Bench) -> None:
    outcome = bench.check("exact", keep_runs="kept")
    assert outcome.is_exact
    assert outcome.sentences == [
        "bit-identical: 3 tensors of model and optimizer, 8 log lines",
        "killed after step 4, resumed from step 4",
    ]
    assert {path.name for path in (bench.folder / "kept").iterdir()} >= {"straight", "killed"}
    resumed = (bench.folder / "killed-resumed.arguments").read_text(encoding="utf-8")
    assert "--resume=latest" in resumed


def test_a_run_that_goes_on_differently_is_found_out(bench: Bench) -> None:
    outcome = bench.check("odd when resumed")
    assert not outcome.is_exact
    verdict, diagnosis = outcome.sentences
    assert verdict == (
        "not identical: the losses differ from step 7 on (2.300000 and 2.300001); "
        "1 of 3 tensors of model and optimizer differ, a the most, by up to 0.001"
    )
    assert "two uninterrupted runs are identical" in diagnosis


def test_a_machine_that_never_repeats_itself_is_told_from_a_broken_resume(bench: Bench) -> None:
    outcome = bench.check("never twice the same")
    assert not outcome.is_exact
    assert "two uninterrupted runs differ as well: the losses differ from step 7 on" in outcome.sentences[1]
    assert "--deterministic" in outcome.sentences[1]


def test_with_deterministic_its_cost_is_measured(bench: Bench) -> None:
    outcome = bench.check("exact", deterministic=True)
    assert outcome.is_exact
    assert outcome.sentences[-1] == "--deterministic costs 20.0% of the speed: 80 tokens/s against 100 without it"
    assert '"--no_deterministic"' in (bench.folder / "fast.arguments").read_text(encoding="utf-8")


def test_a_run_that_fails_is_one_sentence(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"run straight failed, exit code 2: .*the corpus is gone; find it"):
        bench.check("fails")
    assert not (bench.folder / "runs").exists()


def test_a_run_that_is_too_fast_to_be_killed_asks_for_more_steps(bench: Bench) -> None:
    with pytest.raises(UserError, match="ended before it could be killed; use more --steps"):
        bench.check("too fast", steps=100)  # it does eight


def test_ctrl_c_leaves_no_process_and_no_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        if (bench.folder / "killed.arguments").exists():
            raise KeyboardInterrupt
        time.sleep(seconds)

    replace_sleep(monkeypatch, child_run, interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.check("exact", steps=16)
    with pytest.raises(ProcessLookupError):
        os.kill(int((bench.folder / "pid").read_text(encoding="utf-8")), 0)
    assert not (bench.folder / "runs").exists()


def test_other_runs_in_the_folder_stay(bench: Bench) -> None:
    (bench.folder / "runs/mine").mkdir(parents=True)
    bench.check("exact")
    assert [path.name for path in (bench.folder / "runs").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"steps": 3}, "at least 4"),
        ({"max_steps": 9}, "use --steps instead"),
        ({"num_heads": 5}, "num_heads"),
        ({"keep_runs": "."}, "is not empty"),
    ],
)
def test_what_cannot_be_checked_is_refused(bench: Bench, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        bench.check("exact", **options)


def test_runs_of_the_check_are_not_mirrored_and_do_not_stop_early(bench: Bench) -> None:
    options = {"mirror_to": "s3://bucket/runs", "init_from": "base", "early_stop_patience": 1}
    bench.check("exact", **options, eval_tokens=10**9)
    arguments = (bench.folder / "straight.arguments").read_text(encoding="utf-8")
    for part in ("mirror_to=none", "init_from=none", "early_stop_patience=none", "eval_tokens=16384", "max_steps=8"):
        assert f'"--{part}"' in arguments


def test_arguments_give_the_values_that_they_were_made_from() -> None:
    flags = {"grad_clip": None, "max_lr": 1e-5, "sample_prompt": "-- a 'b'\n", "compile": True, "deterministic": False}
    words = format_flags(flags)
    assert words == [
        "--grad_clip=none",
        "--max_lr=1e-05",
        "--sample_prompt=-- a 'b'\n",
        "--compile",
        "--no_deterministic",
    ]
    config = make_config(None, flags)
    assert (config.optimizer.grad_clip, config.optimizer.max_lr) == (None, 1e-5)
