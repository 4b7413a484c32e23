"""A probe: what it measures, that it leaves nothing behind, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_FLAGS, Start

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.experiments import child_run
from gptmill.experiments.probe import probe, read_result
from gptmill.experiments.trial_plan import plan_trial
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_json import to_json
from gptmill.runs.events import CheckpointSaved, EvalDone, Event, RunFinished, RunStarted, SampleDrawn, StepLogged

PROGRAM = """
import json, sys
from dataclasses import asdict
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config.recipes import make_config
from gptmill.config.requests import StartOptions
from gptmill.experiments.probe import probe
call = parse_recipe_call("train", "", StartOptions, sys.argv[2:])
print(json.dumps(asdict(probe(make_config(call.recipe, call.flags), **json.loads(sys.argv[1])))))
"""


def test_a_probe_measures_a_real_training_and_leaves_nothing_behind(
    tmp_path: Path, start: Start, words: list[str]
) -> None:
    process = start('{"steps": 4}', *TINY_FLAGS, *words, program=("-c", PROGRAM))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    found = json.loads(output)
    assert found["tokens_per_step"] == 128
    assert 0 < found["step_seconds"] < found["startup_seconds"]
    assert found["evaluation_seconds"] > 0
    assert found["finish_seconds"] > 0
    assert found["checkpoint_bytes"] > 4 * 3 * found["parameters"]
    assert found["peak_memory_bytes"] > 5e7
    assert not found["is_cut_short"]
    assert not (tmp_path / "runs").exists()


def record(folder: Path, *events: Event) -> RunDirectory:
    (folder / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    return RunDirectory(folder)


def log(step: int, when: float, seconds: float) -> StepLogged:
    return StepLogged(step, 0.1, 2.0, 1e-3, 1.0, 128 / seconds, 0.0, seconds=seconds, memory_gb=0.1 * step, time=when)


def begin(when: float) -> RunStarted:
    return RunStarted(0, "probe", 7, 128, 1000, "CPU", "fp32", 1, "words", "byte", "0", "0", None, time=when)


CONFIG = {"context_length": 16, "mini_batch_size": 4, "total_batch_size": 128, "data_dir": "words"}


def test_the_parts_of_a_training_add_up_to_its_time(tmp_path: Path) -> None:
    """Started at 100; step 1 begins at 111, after an evaluation of one second."""
    plan = plan_trial(make_config(None, CONFIG), 4, 1, 2)
    steps = [log(number, 111.0 + 0.5 * number, 0.5) for number in range(1, 8)]
    run = record(
        tmp_path,
        begin(110.0),
        EvalDone(0, 3.0, 64, 0.9, time=111.0),
        *steps,
        EvalDone(7, 3.0, 64, 0.9, time=115.4),
        SampleDrawn(7, "a", "b", time=115.5),
        CheckpointSaved(7, "step", 5000, 2.0, 0.25, time=117.0),
        RunFinished(7, "finished", 7.0, time=117.0),
    )
    found = read_result(run, plan, 1, 100.0, 118.0)
    assert found is not None
    assert found.step_seconds == 0.5
    assert found.evaluation_seconds == pytest.approx(1.0)
    assert found.startup_seconds == pytest.approx(10.0)
    assert found.finish_seconds == pytest.approx(2.5)
    assert found.peak_memory_bytes == pytest.approx(0.7e9)
    assert found.estimate_seconds(7, evaluations=2, saves=1) == pytest.approx(18.0)
    assert found.estimate_seconds(14, evaluations=3, saves=3) == pytest.approx(18.0 + 3.5 + 1.0 + 0.5)


def test_a_machine_that_gets_busy_leaves_the_startup_as_it_was(tmp_path: Path) -> None:
    """Three seconds of startup, one of evaluation, and then everything takes ten times as long."""
    plan = plan_trial(make_config(None, CONFIG), 4, 1, 2)
    steps = [log(1, 104.5, 0.5), *(log(number, 99.5 + 5.0 * number, 5.0) for number in range(2, 8))]
    run = record(
        tmp_path,
        begin(103.0),
        EvalDone(0, 3.0, 64, 0.9, time=104.0),
        *steps,
        EvalDone(7, 3.0, 64, 0.9, time=144.5),
        RunFinished(7, "finished", 7.0, time=145.0),
    )
    found = read_result(run, plan, 1, 100.0, 145.0)
    assert found is not None
    assert found.evaluation_seconds == pytest.approx(10.0)
    assert found.startup_seconds == pytest.approx(3.0)


def test_a_probe_cut_short_uses_the_steps_that_it_has(tmp_path: Path) -> None:
    plan = plan_trial(make_config(None, {**CONFIG, "total_batch_size": 640}), 4, 2, 10)
    assert plan.has_short_steps
    run = record(tmp_path, begin(1.0), log(1, 5.0, 4.0), log(2, 5.5, 0.5), log(3, 6.0, 0.5))
    found = read_result(run, plan, 2, 0.0, 6.0)
    assert found is not None
    assert found.is_cut_short
    assert found.step_seconds == pytest.approx(5 * 0.5)
    assert found.tokens_per_step == 640
    assert found.finish_seconds == 0.0
    assert read_result(record(tmp_path, begin(1.0), log(1, 5.0, 4.0)), plan, 2, 0.0, 6.0) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    (tmp_path / "words/manifest.json").write_text("{}", encoding="utf-8")
    return tmp_path


FAKE_TRAINING = """
import json, sys, time
from pathlib import Path
run = Path(next(word for word in sys.argv if word.startswith("--run_name=")).partition("=")[2])
folder = next(Path("runs").glob(".trials-*")) / run
folder.mkdir()
begins = time.time() + (50.0 if run.name == "probe" else 10.0)
events = [json.loads(line) for line in Path("template.jsonl").read_text(encoding="utf-8").splitlines()]
lines = [json.dumps({**event, "time": begins + event["time"]}) + "\\n" for event in events]
(folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
"""


def test_compiling_counts_once_and_not_for_the_run_that_finds_it_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(None, {**CONFIG, "compile": True})
    last = plan_trial(config, 4, 1, 2).last_step
    steps = [log(number, 0.5 * number, 0.5) for number in range(1, last + 1)]
    events = [begin(-1.0), EvalDone(0, 3.0, 64, 0.9, time=0.0), *steps, RunFinished(last, "finished", 7.0, time=9.0)]
    (folder / "template.jsonl").write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    monkeypatch.setattr(child_run, "PROGRAM", (sys.executable, "-c", FAKE_TRAINING))
    found = probe(config, steps=2)
    assert found.startup_seconds == pytest.approx(10.0, abs=3.0)
    assert found.compile_seconds == pytest.approx(40.0, abs=3.0)


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        ("import sys; sys.exit('gptmill: no disk')", {}, "no disk"),
        ("import time; time.sleep(60)", {"time_limit_seconds": 0.2}, "did not finish two steps"),
        ("", {"steps": 1}, "at least 2"),
        ("", {"ranks": 3}, "total_batch_size"),
    ],
    ids=["fails", "slow", "short", "ranks"],
)
def test_a_probe_that_cannot_measure_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(child_run, "PROGRAM", (sys.executable, "-c", code))
    with pytest.raises(UserError, match=message):
        probe(make_config(None, CONFIG), **options)
    assert not (folder / "runs").exists()


def test_a_corpus_that_is_not_prepared_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("text", encoding="utf-8")
    with pytest.raises(UserError, match=r"gptmill prepare my\.txt --tokenizer byte"):
        probe(make_config(None, {**CONFIG, "data_dir": None, "corpus": "my.txt", "tokenizer": "byte"}))


INTERRUPTED = f"import sys; from gptmill.experiments import child_run\nchild_run.PROGRAM = (sys.executable, '-c', \
'import os, time; open(\"pid\", \"w\").write(str(os.getpid())); time.sleep(60)')\n{PROGRAM}"


def test_ctrl_c_ends_the_child(tmp_path: Path, start: Start, words: list[str]) -> None:
    process = start("{}", *TINY_FLAGS, *words, program=("-c", INTERRUPTED))
    for _ in range(600):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(encoding="utf-8"):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), 0)
    assert not (tmp_path / "runs").exists()
