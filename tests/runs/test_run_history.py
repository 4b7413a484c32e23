"""The run history is complete, detects a process that ended without recording it, and its goodput adds up."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_FLAGS, GptMill, Start, make_environment, wait_for_text

from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.runs.crash_files import find_crash_sentence, has_crash, write_crash
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runs.event_json import to_json
from gptmill.runs.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    RolledBack,
    RunCrashed,
    RunFinished,
    RunStarted,
    StepLogged,
    UpdateSkipped,
    Warned,
)
from gptmill.runs.goodput import Goodput, describe_goodput, make_goodput
from gptmill.runs.history import append_event, find_crash, read_history, record_crash
from gptmill.runs.history_text import describe_history
from gptmill.runs.trackers import open_trackers
from gptmill.runs.trackers.history_file import HistoryFile

ZERO = 1_700_000_000.0


def start(step: int, seconds: float, **fields: Any) -> RunStarted:
    given: dict[str, Any] = {"tokens_per_step": 100, "ranks": 1, "device": "CPU", "precision": "fp32", **fields}
    told = {"run": "r", "max_steps": 1000, "parameters": 10, "corpus": "c", "tokenizer": "t", "version": "0.1.0"}
    return RunStarted(step, **told, torch_version="2.13", val_loss=None, **given, time=ZERO + seconds)


def log(step: int, seconds: float, taken: float = 1.0) -> StepLogged:
    """Steps up to this one that took some seconds."""
    return StepLogged(step, 0.1, 2.0, 1e-3, 1.0, 100.0, 5.0, seconds=taken, time=ZERO + seconds)


def finish(step: int, seconds: float, reason: str = "finished") -> RunFinished:
    return RunFinished(step, reason, 1.0, time=ZERO + seconds)


def crash(step: int, seconds: float, reason: str = "killed by SIGKILL") -> RunCrashed:
    return RunCrashed(step, reason, time=ZERO + seconds)


def skip(step: int, seconds: float) -> UpdateSkipped:
    return UpdateSkipped(step, math.nan, 3.25, [8, 16], time=ZERO + seconds)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def write(path: Path, events: list[Event]) -> None:
    path.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")


def track(run: RunDirectory, resumed_at: int, events: list[Event]) -> None:
    """Writes what a killed process leaves: its trackers are never closed."""
    trackers = open_trackers(run, TrackingConfig(), resumed_at)
    for event in events:
        trackers.track(event)


def test_the_history_keeps_what_shapes_a_run_and_nothing_else(run: RunDirectory) -> None:
    kept: list[Event] = [
        start(0, 0, changes=["max_lr: 0.1 -> 0.2"]),
        UpdateSkipped(3, 1.0, 2.0, [0, 8]),
        RolledBack(5, 9, "spike", 9.0, 8.0, [24, 40]),
        Warned(6, "disk", "full\u2028é"),
        finish(10, 9),
        crash(10, 9),
    ]
    passed: list[Event] = [log(1, 1), EvalDone(1, 2.0, 64, 0.1), CheckpointSaved(1, "p", 1, 0.1)]
    history = HistoryFile(run)
    for event in [*passed, *kept]:
        history.track(event)
    history.close()
    assert read_history(run) == kept


def test_a_resumed_run_and_a_rollback_truncate_the_events_but_not_the_history(run: RunDirectory) -> None:
    track(run, 0, [start(0, 0), *(log(step, step) for step in range(1, 31)), skip(25, 25)])
    trackers = open_trackers(run, TrackingConfig(), 20)
    trackers.track(start(20, 100))
    trackers.track(skip(24, 104))
    trackers.rewind(21)
    trackers.track(finish(21, 110))
    kinds = [(type(entry).__name__, entry.step) for entry in read_history(run)]
    assert kinds == [
        ("RunStarted", 0),
        ("UpdateSkipped", 25),
        ("RunCrashed", 30),
        ("RunStarted", 20),
        ("UpdateSkipped", 24),
        ("RunFinished", 21),
    ]
    steps = [json.loads(line)["step"] for line in run.events.read_text(encoding="utf-8").splitlines()]
    assert max(steps) == 21


def test_a_process_without_a_last_word_is_found_once(run: RunDirectory) -> None:
    # The save of step 8 became durable after step 9 was logged.
    saved = CheckpointSaved(8, "p", 1, 0.1, time=ZERO + 11)
    track(run, 0, [start(0, 0), *(log(step, step) for step in range(1, 10)), saved])
    assert find_crash(run) == RunCrashed(9, "the process ended without reporting a reason", time=ZERO + 11)
    record_crash(run)
    assert read_history(run)[-1] == RunCrashed(9, "the process ended without reporting a reason", time=ZERO + 11)
    run.events.unlink()  # as a run that begins again does
    HistoryFile(run).close()
    assert sum(isinstance(entry, RunCrashed) for entry in read_history(run)) == 1


def test_a_run_that_begins_again_keeps_its_history(tmp_path: Path) -> None:
    run = create_run(str(tmp_path), "again", RunConfig())
    track(run, 0, [start(0, 0), log(1, 1)])
    record_crash(run)
    create_run(str(tmp_path), "again", RunConfig())
    track(run, 0, [start(0, 9)])
    assert [type(entry).__name__ for entry in read_history(run)] == ["RunStarted", "RunCrashed", "RunStarted"]
    assert read_history(run)[1].step == 1


@pytest.mark.parametrize("end", [finish(9, 9), crash(9, 9)])
def test_a_process_with_a_last_word_did_not_crash(run: RunDirectory, end: Event) -> None:
    track(run, 0, [start(0, 0), log(9, 9), end])
    assert find_crash(run) is None
    HistoryFile(run).close()
    assert read_history(run)[-1] == end


def test_the_last_sign_of_life_may_be_a_heartbeat_or_a_warning(run: RunDirectory) -> None:
    assert find_crash(run) is None
    track(run, 0, [start(0, 0), log(1, 1)])
    run.heartbeat.mkdir()
    (run.heartbeat / "rank_00000.json").write_text(json.dumps({"time": ZERO + 50, "step": 1}), encoding="utf-8")
    (run.heartbeat / "rank_00001.json").write_text("{", encoding="utf-8")
    (run.heartbeat / "rank_00002.json").write_text("[" * 100_000, encoding="utf-8")
    assert find_crash(run) == RunCrashed(1, "the process ended without reporting a reason", time=ZERO + 50)
    append_event(run, Warned(1, "disk", "full", time=ZERO + 60))
    assert find_crash(run) == RunCrashed(1, "the process ended without reporting a reason", time=ZERO + 60)


def test_the_last_step_is_found_at_the_end_of_long_and_of_strange_events(run: RunDirectory) -> None:
    append_event(run, start(0, 0))
    write(run.events, [log(step, step) for step in range(1, 2001)])
    assert run.events.stat().st_size > 200_000
    found = find_crash(run)
    assert found is not None
    assert (found.step, found.time) == (2000, ZERO + 2000)
    with run.events.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "StepLogged", "step": 2001, "text": "x" * 100_000})[:-1])
    found = find_crash(run)
    assert found is not None
    assert found.step == 2000


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_mended(run: RunDirectory, cut: int) -> None:
    write(run.history, [start(0, 0), finish(5, 5)])
    run.history.write_bytes(run.history.read_bytes()[:-cut])
    assert read_history(run)[:1] == [start(0, 0)]
    append_event(run, crash(5, 6))
    assert read_history(run)[-1] == crash(5, 6)
    run.history.write_bytes(run.history.read_bytes()[:-cut])
    history = HistoryFile(run)
    history.track(start(5, 7))
    history.close()
    lines = run.history.read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["event"] == "RunStarted"
    assert read_history(run)[-1] == start(5, 7)


def test_lines_that_are_no_entries_are_left_out(run: RunDirectory) -> None:
    strange = ["", "[]", "7", '{"event": "RunFinished"}', '{"event": "New", "step": 1}', "[" * 100_000]
    strange.append('{"event": "RunCrashed", "step": "x", "reason": "", "time": 1}')
    run.history.write_text("\n".join([*strange, to_json(finish(5, 5)), "\x00"]), encoding="utf-8")
    assert read_history(run) == [finish(5, 5)]


def test_a_full_disk_does_not_end_training_and_leaves_no_hole(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = HistoryFile(run)
    history.track(start(0, 0))
    with monkeypatch.context() as patched:

        def refuse(*_given: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(os, "write", refuse)
        history.track(skip(3, 3))
        assert len(read_history(run)) == 1
    history.track(finish(5, 5))
    history.close()
    assert [entry.step for entry in read_history(run)] == [0, 3, 5]
    assert "No space left" in capsys.readouterr().err


def test_an_entry_survives_errors_that_pass(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_really, attempts = os.write, count()

    def write_seldom(descriptor: int, data: bytes) -> int:
        if next(attempts) % 3:
            raise OSError(errno.EIO, "Input/output error")
        return write_really(descriptor, data)

    monkeypatch.setattr(os, "write", write_seldom)
    append_event(run, start(0, 0))
    append_event(run, crash(1, 1))
    assert read_history(run) == [start(0, 0), crash(1, 1)]


def test_an_entry_that_cannot_be_written_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_event(RunDirectory(tmp_path / "missing"), crash(1, 1))
    assert "lacks its last line: No such file" in capsys.readouterr().err


def test_goodput_counts_the_time_of_kept_steps(run: RunDirectory) -> None:
    track(run, 0, [start(0, 0), *(log(step, 5 + step) for step in range(1, 31))])
    evaluated = EvalDone(20, 2.0, 64, 4.0, time=ZERO + 104)
    track(run, 20, [start(20, 100), evaluated, *(log(step, 90 + step) for step in range(21, 101)), finish(100, 190)])
    goodput = make_goodput(run)
    assert goodput == Goodput(
        wall_seconds=190.0,
        running_seconds=35.0 + 90.0,
        kept_seconds=pytest.approx(100.0),
        evaluation_seconds=4.0,
        lost_steps=10,
        restarts=1,
        rollbacks=0,
        skipped=0,
    )
    text = describe_goodput(goodput)
    assert text.startswith(
        "goodput 80.0%: 0:01:40 of 0:02:05 running time went into steps that were kept; 4.0 s into eval"
    )
    assert "10 steps lost, 1 restart, 0 rollbacks, 0 updates skipped; 52.6% of the 0:03:10 since the first" in text


def test_goodput_counts_steps_between_logged_ones_once(run: RunDirectory) -> None:
    """Every tenth step is logged; the second process has twice the batch."""
    first: list[Event] = [start(0, 0), log(10, 20, 20.0), log(20, 40, 20.0)]
    second: list[Event] = [start(15, 100, tokens_per_step=200), log(20, 120, 40.0), log(30, 160, 40.0), finish(33, 200)]
    track(run, 0, first)
    track(run, 15, second)
    goodput = make_goodput(run)
    # 10 steps of 2 s; then of 4 s: from the last one that is still logged.
    assert goodput.kept_seconds == pytest.approx(10 * 2 + 20 * 4)
    assert (goodput.running_seconds, goodput.wall_seconds, goodput.lost_steps) == (40 + 100, 200, 5)


def test_rollbacks_and_skips_are_counted_and_their_steps_lost(run: RunDirectory) -> None:
    trackers = open_trackers(run, TrackingConfig(), 0)
    for event in (start(0, 0), *(log(step, step) for step in range(1, 12)), skip(11, 11)):
        trackers.track(event)
    trackers.rewind(8)
    trackers.track(RolledBack(8, 11, "spike", 9.0, 8.0, [80, 88], time=ZERO + 12))
    for event in (*(log(step, 4 + step) for step in range(9, 13)), finish(12, 16)):
        trackers.track(event)
    goodput = make_goodput(run)
    assert (goodput.lost_steps, goodput.rollbacks, goodput.skipped, goodput.restarts) == (3, 1, 1, 0)
    assert goodput.kept_seconds == pytest.approx(12.0)
    assert goodput.running_seconds == 16.0


def test_goodput_of_a_run_that_is_under_way_counts_to_its_last_activity(run: RunDirectory) -> None:
    track(run, 0, [start(0, 0), log(1, 4), log(2, 8)])
    goodput = make_goodput(run)
    assert (goodput.wall_seconds, goodput.running_seconds, goodput.kept_seconds) == (8.0, 8.0, 2.0)
    assert "no end recorded yet" in describe_history(run)
    assert len(read_history(run)) == 1, "reading must not write"


def test_goodput_never_exceeds_one_and_bears_empty_and_broken_numbers(run: RunDirectory) -> None:
    assert make_goodput(run).share_of_wall == make_goodput(run).share_of_running == 0.0
    track(run, 0, [start(0, 0), log(1, 1, 0.0), log(2, 2, 90.0), log(3, 3, 1.0), finish(3, 3)])
    assert make_goodput(run).share_of_running == 1.0


def test_the_life_of_a_run_is_told_in_plain_words(run: RunDirectory) -> None:
    told = {"code": "3f2a" * 16, "data": "9c1d" * 16}
    resumed = start(
        750,
        2000,
        code="aaaa" * 16,
        data="9c1d" * 16,
        ranks=2,
        resumed_from="runs/x/checkpoints/step_000750",
        changes=["max_lr: 0.001 -> 0.0005"],
    )
    write(
        run.history,
        [
            start(0, 0, **told),
            skip(55, 50),
            Warned(60, "disk", "a checkpoint takes 5.5 MB, 1.0 MB are free", time=ZERO + 60),
            Warned(70, "disk", "a checkpoint takes 5.5 MB, 0.7 MB are free", time=ZERO + 70),
            Warned(70, "copy", "the address does not answer", time=ZERO + 71),
            skip(71, 72),
            skip(80, 73),
            skip(1200, 74),
            crash(812, 800),
            resumed,
            RolledBack(900, 911, "loss 9.21 is far above 3.1", 9.21, 4.0, [7280, 7296], time=ZERO + 2100),
            RolledBack(900, 901, "", math.inf, 4.0, [], time=ZERO + 2101),
            finish(1000, 2200, "stopped by SIGINT"),
            start(1000, 3000, code="aaaa" * 16, data="9c1d" * 16, ranks=2, resumed_from="x/step_001000"),
            finish(1001, 3001, "gave up: loss 9"),
            start(0, 4000, **told),
            finish(2000, 4001),
        ],
    )
    lines = describe_history(run).splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines[:-1])
    assert [line[21:] for line in lines[:-1]] == [
        "started at step 0: gptmill 0.1.0, torch 2.13, 1 rank on CPU, fp32, code 3f2a3f2a, data 9c1d9c1d",
        "update of step 55 skipped: loss not finite, gradient norm 3.25",
        "warning: a checkpoint takes 5.5 MB, 1.0 MB are free (2 times, steps 60 to 70)",
        "warning: the address does not answer",
        "3 updates skipped, steps 71 to 1,200",
        "crashed at step 812: killed by SIGKILL; steps 751 to 812 were lost",
        "resumed from step 750 (step_000750)",
        "now 2 ranks on CPU, before 1 rank on CPU",
        "config changed: max_lr: 0.001 -> 0.0005",
        "code changed since the last start",
        "rolled back from step 911 to 900: loss 9.21 is far above 3.1; windows 7,280 to 7,295 are skipped",
        "rolled back from step 901 to 900: loss not finite, gradient norm 4",
        "stopped by SIGINT at step 1,000",
        "resumed from step 1,000 (step_001000)",
        "gave up at step 1,001: loss 9; steps 1 to 1,001 were lost",
        "started again at step 0: gptmill 0.1.0, torch 2.13, 1 rank on CPU, fp32, code 3f2a3f2a, data 9c1d9c1d",
        "code changed since the last start",
        "finished at step 2,000",
    ]
    assert lines[-1].startswith("goodput ")


def test_a_run_without_a_history_is_described_in_a_sentence(run: RunDirectory) -> None:
    assert "has no history" in describe_history(run)


def test_whoever_watches_over_a_run_needs_no_torch() -> None:
    code = "import sys, gptmill.runs.history, gptmill.runs.history_text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=make_environment(), check=False).returncode == 0


def test_the_history_of_a_run_killed_and_resumed(
    tmp_path: Path, words: list[str], gptmill: GptMill, start: Start
) -> None:
    flags = [*words, *TINY_FLAGS, "--checkpoint_freq", "20", "--eval_freq", "1000", "--run_name", "r"]
    flags += ["--schedule", "constant"]  # which other max_steps do not reshape: there is nothing to warn of
    process = start("train", *flags, "--max_steps", "100000")
    run = RunDirectory(tmp_path / "runs/r")
    wait_for_text(process, run.text_log, "\n45 train")
    process.kill()
    process.wait()
    died = time.time()
    events = [json.loads(line) for line in run.events.read_text(encoding="utf-8").splitlines()]
    last_step = max(event["step"] for event in events)  # a save is told of later than steps that came after it
    newest = max(int(path.name[5:]) for path in run.checkpoints.glob("step_*") if path.is_dir())
    gptmill("train", "--run_name", "r", "--resume", "latest", "--max_steps", str(newest + 20))
    entries = read_history(run)
    assert [type(entry).__name__ for entry in entries] == ["RunStarted", "RunCrashed", "RunStarted", "RunFinished"]
    assert [entry.step for entry in entries] == [0, last_step, newest, newest + 20]
    assert events[-1]["time"] <= entries[1].time <= died
    goodput = make_goodput(run)
    assert (goodput.lost_steps, goodput.restarts) == (last_step - newest, 1)
    lived = (entries[1].time - entries[0].time) + (entries[3].time - entries[2].time)
    assert goodput.running_seconds == pytest.approx(lived)
    assert goodput.wall_seconds == pytest.approx(entries[3].time - entries[0].time)
    # All but the first seconds of a process, its evaluations, samples and saves is steps.
    assert 0 < goodput.kept_seconds < goodput.running_seconds < goodput.wall_seconds


def test_a_crash_file_gives_the_reason_of_an_end_that_was_not_recorded(run: RunDirectory) -> None:
    """The rank that crashed could write to the run's folder, but rank 0 was killed before it could record that."""
    append_event(run, start(0, 0))
    path = write_crash(run, 3, 7, "rank 3 failed after step 7:\n ValueError: boom", "Traceback")
    assert path is not None
    os.utime(path, (ZERO - 1, ZERO - 1))
    found = find_crash(run)
    assert found is not None
    assert found.reason == "the process ended without reporting a reason"  # the file is of an earlier process
    os.utime(path, (ZERO + 5, ZERO + 5))
    found = find_crash(run)
    assert found is not None
    assert found.reason == f"rank 3 failed after step 7: ValueError: boom ({path.name})"
    assert has_crash(run, 3, ZERO)
    assert not has_crash(run, 2, ZERO)
    before = path.read_text()
    second = write_crash(run, 3, 7, "rank 3 failed again", "Another traceback")
    assert second is not None
    assert second.name == "crash_step_000007_rank_00003_2.txt"
    assert path.read_text() == before
    path.unlink()
    assert has_crash(run, 3, ZERO)
    assert find_crash_sentence(run, ZERO) == f"rank 3 failed again ({second.name})"
