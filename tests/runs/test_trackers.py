"""Trackers: what each writes, every step once after a resume, and none of them able to end a run."""

from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_environment
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.record_writer import RecordWriter
from zygote import Zygote

from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runs.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    LastStepMoved,
    RolledBack,
    RunFinished,
    RunStarted,
    SampleDrawn,
    StepLogged,
    UpdateSkipped,
    Warned,
    from_json,
)
from gptmill.runs.trackers import TrackerGroup, open_trackers
from gptmill.runs.trackers.console import LiveDisplay, PlainLines
from gptmill.runs.trackers.event_lines import describe_step
from gptmill.runs.trackers.run_files import JsonLines, SampleFiles, TextLog
from gptmill.runs.trackers.tensorboard import TensorBoard

START = RunStarted(0, "runs/a", 20, 128, 12345, "CPU, 1 threads", "fp32", 1, "data/x", "byte:1", "0.1", "2.9", None)


def make_step(step: int, loss: float = 2.5) -> StepLogged:
    return StepLogged(step, step / 8, loss, 6e-4, 1.25, 4321.0, 3725.0)


def make_events(first: int, last: int) -> list[Event]:
    """A step each, with an evaluation and a sample at every fifth."""
    events: list[Event] = []
    for step in range(first, last + 1):
        events.append(make_step(step, loss=5 - step / 10))
        if step % 5 == 0:
            events += [EvalDone(step, 4 - step / 10, 64, 0.1), SampleDrawn(step, "Say ", f"line\u2028{step}\n\x85end")]
    return events


def write(tracker: JsonLines | TextLog | SampleFiles | TensorBoard, events: list[Event]) -> None:
    for event in events:
        tracker.track(event)
    tracker.close()


def read_jsonl(path: Path) -> list[Event | None]:
    return [from_json(line) for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]


def test_the_text_log_has_one_plain_line_per_loss(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    events = [START, make_step(250, 3.456789), EvalDone(250, 3.4, 64, 0.1), SampleDrawn(250, "a", "b")]
    write(TextLog(path, 0), [*events, make_step(251, 3.0), RunFinished(251, "finished", 1.0)])
    assert path.read_text(encoding="utf-8") == "250 train 3.456789\n250 val 3.4000\n251 train 3.000000\n"


def test_the_text_log_writes_nan_as_a_word(tmp_path: Path) -> None:
    write(TextLog(tmp_path / "log.txt", 0), [make_step(1, math.nan)])
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "1 train nan\n"


def test_the_json_lines_hold_every_event(tmp_path: Path) -> None:
    events = [START, *make_events(1, 10), CheckpointSaved(10, "p", 9, 0.1), RunFinished(10, "stopped", 2.0)]
    write(JsonLines(tmp_path / "events.jsonl", 0), events)
    assert read_jsonl(tmp_path / "events.jsonl") == events


def test_a_line_is_on_the_disk_as_soon_as_it_is_tracked(tmp_path: Path) -> None:
    lines, log = JsonLines(tmp_path / "events.jsonl", 0), TextLog(tmp_path / "log.txt", 0)
    lines.track(make_step(1))
    log.track(make_step(1))
    assert read_jsonl(tmp_path / "events.jsonl")[0].step == 1
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "1 train 2.500000\n"
    lines.close()
    log.close()


@pytest.mark.parametrize(
    "torn", ["", '{"event": "StepLogged", "step": 9, "ti', '{"event": "SampleDrawn", "text": "\u2028']
)
def test_resumed_json_lines_hold_every_step_once(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    write(JsonLines(path, 0), make_events(1, 20))
    with path.open("a", encoding="utf-8") as file:
        file.write(torn)
    write(JsonLines(path, 10), make_events(11, 20))
    found = [replace(event, time=0.0) for event in read_jsonl(path) if event is not None]
    assert found == [replace(event, time=0.0) for event in make_events(1, 20)]


def test_json_lines_cut_inside_a_character_are_mended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(JsonLines(path, 0), make_events(1, 5))
    whole = path.read_bytes()
    path.write_bytes(whole + '{"event": "SampleDrawn", "step": 5, "text": "é'.encode()[:-1])
    write(JsonLines(path, 5), [])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("torn", ["", "2", "10 tr", "21 train 2.", "\x00\x00\x00"])
def test_a_resumed_text_log_holds_every_step_once(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "log.txt"
    write(TextLog(path, 0), make_events(1, 20))
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + torn, encoding="utf-8")
    write(TextLog(path, 10), make_events(11, 20))
    assert path.read_text(encoding="utf-8") == whole


def test_setting_back_twice_changes_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    write(TextLog(path, 0), make_events(1, 20))
    write(TextLog(path, 10), [])
    once = path.read_text(encoding="utf-8")
    write(TextLog(path, 10), [])
    assert path.read_text(encoding="utf-8") == once
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_samples_are_files_named_by_their_step(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    write(SampleFiles(folder, 0), [SampleDrawn(0, "Say ", "x"), SampleDrawn(250, "Say ", "é\u2028"), make_step(250)])
    assert sorted(path.name for path in folder.iterdir()) == ["step_000000.txt", "step_000250.txt"]
    assert (folder / "step_000250.txt").read_text(encoding="utf-8") == "Say é\u2028\n"


def test_several_samples_are_in_one_file_with_their_names(tmp_path: Path) -> None:
    write(SampleFiles(tmp_path, 0), [SampleDrawn(9, "Say ", "one", ["two\n2", "three", "four"], per_rank=2)])
    assert (tmp_path / "step_000009.txt").read_text(encoding="utf-8") == (
        "> rank 0 sample 0: Say one\n> rank 0 sample 1: Say two\n2\n"
        "> rank 1 sample 0: Say three\n> rank 1 sample 1: Say four\n"
    )


def test_samples_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    write(SampleFiles(tmp_path, 0), make_events(1, 20))
    SampleFiles(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005.txt", "step_000010.txt"]


class Failing:
    """A tracker whose disk is full at one step, or when it is closed."""

    def __init__(self, at_step: int | None) -> None:
        self.at_step = at_step
        self.seen: list[int] = []
        self.closed = 0

    def track(self, event: Event) -> None:
        self.seen.append(event.step)
        if event.step == self.at_step:
            raise OSError(28, "No space left on device")

    def rewind(self, step: int) -> None:
        self.track(make_step(step))

    def close(self) -> None:
        self.closed += 1
        if self.at_step is None:
            raise OSError(28, "No space left on device")


def test_a_tracker_that_raises_is_left_out_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing(at_step=3)
    events = make_events(1, 9)
    with TrackerGroup([failing, JsonLines(tmp_path / "events.jsonl", 0)]) as trackers:
        for event in events:
            trackers.track(event)
    assert failing.seen == [1, 2, 3]
    assert read_jsonl(tmp_path / "events.jsonl") == events
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    for part in ("warning", "Failing", "step 3", "No space left on device"):
        assert part in warning


def test_a_tracker_that_is_left_out_is_closed() -> None:
    failing = Failing(at_step=1)
    with TrackerGroup([failing]) as trackers:
        trackers.track(make_step(1))
        trackers.track(make_step(2))
    assert failing.closed == 1


def test_a_tracker_that_cannot_be_closed_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Failing(at_step=None), Failing(at_step=99)
    with TrackerGroup([first, second]) as trackers:
        trackers.track(make_step(1))
    assert second.closed == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_tracker_that_cannot_go_back_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing(at_step=3)
    with TrackerGroup([failing, TextLog(tmp_path / "log.txt", 0)]) as trackers:
        for step in (1, 2):
            trackers.track(make_step(step))
        trackers.track(make_step(9))
        trackers.rewind(3)
        trackers.track(make_step(4))
    assert failing.seen == [1, 2, 9, 3]
    assert "Failing failed while rewinding to step 3" in capsys.readouterr().err
    assert [line[0] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["1", "2", "4"]


def test_a_sample_that_does_not_fit_is_lost_and_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_half(path: Path, text: str, **_options: object) -> int:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(28, "No space left on device")

    tracker = SampleFiles(tmp_path / "samples", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_half)
        tracker.track(SampleDrawn(5, "Say ", "something"))
    tracker.track(SampleDrawn(10, "Say ", "something"))
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_000010.txt"]
    assert "sample of step 5 is lost" in capsys.readouterr().err


def test_an_error_of_the_run_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TrackerGroup([JsonLines(tmp_path / "events.jsonl", 0)]):
        raise KeyboardInterrupt


def wait_for_next_second() -> None:
    """TensorBoard reads event files in the order of their names, which tell the second of their making."""
    time.sleep(1.01 - time.time() % 1)


def read_tensorboard(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def read_steps(folder: Path, tag: str) -> list[int]:
    return [scalar.step for scalar in read_tensorboard(folder).Scalars(tag)]


STEP_TAGS = {
    "loss/train": "loss",
    "optimizer/lr": "lr",
    "optimizer/grad_norm": "grad_norm",
    "speed/tokens_per_second": "tokens_per_second",
}


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path, 0), [EvalDone(0, 6.0, 64, 0.1), *make_events(1, 20)])
    wait_for_next_second()
    write(TensorBoard(tmp_path, 10), make_events(11, 20))
    accumulator = read_tensorboard(tmp_path)
    for tag, name in STEP_TAGS.items():
        scalars = accumulator.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(1, 21)), tag
        expected = [getattr(event, name) for event in make_events(1, 20) if isinstance(event, StepLogged)]
        assert [scalar.value for scalar in scalars] == pytest.approx(expected), tag
    assert [(scalar.step, scalar.value) for scalar in accumulator.Scalars("loss/val")] == [
        (0, pytest.approx(6.0)),
        *((step, pytest.approx(4 - step / 10)) for step in (5, 10, 15, 20)),
    ]


@pytest.mark.slow
def test_tensorboard_of_a_run_begun_again_before_its_first_checkpoint_has_every_step_once(tmp_path: Path) -> None:
    for last in (7, 20):
        wait_for_next_second()
        run = create_run(str(tmp_path), "again", RunConfig())
        write(TensorBoard(run.tensorboard, 0), make_events(1, last))
    assert read_steps(run.tensorboard, "loss/train") == list(range(1, 21))


@pytest.mark.slow
def test_tensorboard_of_a_run_that_went_back_has_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the number of a file comes to have one digit more, and sorts before the file of the same second."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    tracker = TensorBoard(tmp_path, 0)
    for first, last, back_to in ((1, 20, 10), (11, 14, 12), (13, 15, 0), (1, 20, 20)):
        for event in make_events(first, last):
            tracker.track(replace(event, loss=5 + back_to) if isinstance(event, StepLogged) else event)
        tracker.rewind(back_to)
    tracker.close()
    scalars = read_tensorboard(tmp_path).Scalars("loss/train")
    assert [scalar.step for scalar in scalars] == list(range(1, 21))
    assert {scalar.value for scalar in scalars} == {25.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writing thread
def test_tensorboard_has_every_step_once_though_a_write_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, failures = TensorBoard(tmp_path, 0), [8, 9]

    def flush_badly(writer: RecordWriter) -> None:
        if failures and tracked >= failures[0]:
            raise OSError(5, f"Input/output error {failures.pop(0)}")
        flush_really(writer)

    flush_really = RecordWriter.flush
    monkeypatch.setattr(RecordWriter, "flush", flush_badly)
    for tracked in range(1, 21):
        tracker.track(make_step(tracked))
        if tracked % 4 == 0:
            tracker.track(CheckpointSaved(tracked, "p", 9, 0.1))
    tracker.close()
    assert not failures
    assert read_steps(tmp_path, "loss/train") == list(range(1, 21))


def test_tensorboard_shows_skipped_updates_once_there_are_some(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path, 0), [make_step(1), replace(make_step(2), skipped=1), replace(make_step(3), skipped=2)])
    scalars = read_tensorboard(tmp_path).Scalars("guard/skipped")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(2, 1), (3, 2)]


RICH_STEP = replace(
    make_step(20),
    by_corpus={"data/a": 2.25, "/b c": 2.75},
    experts={"busiest": 1.5, "idlest": 0.25},
    memory_gb=12.34,
    objective=3.5,
    tflops=407.4,
    mfu=0.4117,
)
RICH_EVAL = EvalDone(20, 3.25, 64, 0.1, {"data/a": 3.0, "/b c": 3.5}, 3.125)


def test_tensorboard_shows_corpora_experts_memory_and_averaged_weights(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path, 0), [RICH_STEP, RICH_EVAL])
    accumulator = read_tensorboard(tmp_path)
    expected = {
        "loss/train/data/a": 2.25,
        "loss/train/b c": 2.75,
        "loss/val/data/a": 3.0,
        "loss/val/b c": 3.5,
        "loss/val_ema": 3.125,
        "loss/objective": 3.5,
        "experts/busiest": 1.5,
        "experts/idlest": 0.25,
        "memory/peak_gb": 12.34,
        "speed/tflops": 407.4,
        "speed/mfu": 0.4117,
    }
    found = {tag: accumulator.Scalars(tag)[0].value for tag in expected}
    assert found == pytest.approx(expected)


def test_tensorboard_of_a_plain_run_has_none_of_them(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path, 0), make_events(1, 5))
    tags = read_tensorboard(tmp_path).Tags()["scalars"]
    assert {tag.split("/")[0] for tag in tags} == {"loss", "optimizer", "speed", "progress", "perplexity"}
    assert [tag for tag in tags if tag.startswith("speed/")] == ["speed/tokens_per_second", "speed/eval_seconds"]


# A process that is killed right after a checkpoint, as the operating system or a scheduler does it.
KILLED = """
import os, signal, sys
from pathlib import Path
from gptmill.runs.events import CheckpointSaved, StepLogged
from gptmill.runs.trackers.tensorboard import TensorBoard

tracker = TensorBoard(Path(sys.argv[1]), 0)
for step in range(1, 11):
    tracker.track(StepLogged(step, 0.1, 2.5, 1e-3, 1.0, 100.0, 1.0))
tracker.track(CheckpointSaved(10, "p", 9, 0.1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_tensorboard_of_a_run_killed_after_its_checkpoint_keeps_the_steps_before_it(
    tmp_path: Path, zygote: Zygote
) -> None:
    process = zygote.run(["-c", KILLED, str(tmp_path)], tmp_path, make_environment())
    assert process.returncode == -9
    wait_for_next_second()
    write(TensorBoard(tmp_path, 10), make_events(11, 20))
    assert read_steps(tmp_path, "loss/train") == list(range(1, 21))


def make_console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, highlight=False, legacy_windows=False)


def read_console(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_tell_all_numbers_of_a_step() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    for event in (START, EvalDone(15, 3.25, 64, 0.1), make_step(20), RunFinished(20, "finished", 65.0)):
        tracker.track(event)
    lines = read_console(console).split("\n")
    (line,) = [line for line in lines if line.startswith("step 20/")]
    learning = ["step 20/20", "epoch 2.50", "loss 2.5000", "ppl 12.18", "val 3.2500", "lr 6.00e-04", "norm 1.250"]
    assert line.split(" | ") == [*learning, "4,321 tok/s", "eta 1:02:05"]
    assert "step 15: val loss 3.2500, perplexity 25.79 | 0.1 s" in lines
    assert "finished at step 20 after 0:01:05" in lines
    assert "12,345 parameters, fp32" in read_console(console)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
def test_the_console_shows_the_last_step_that_a_budget_has_moved_it_to(is_terminal: bool) -> None:
    console = make_console(is_terminal=is_terminal)
    tracker = LiveDisplay(console) if is_terminal else PlainLines(console)
    for event in (START, make_step(3), LastStepMoved(3, 7), make_step(7)):
        tracker.track(event)
    tracker.close()
    shown = read_console(console)
    assert "7/7" in shown
    assert "7/20" not in shown


def test_plain_lines_tell_of_corpora_experts_memory_and_averaged_weights() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    sparse = replace(START, active_parameters=2345, layout="qwen3_moe", optimizer="adamw: 12 decayed, 8 not")
    for event in (sparse, RICH_STEP, RICH_EVAL):
        tracker.track(event)
    *start, step, done = read_console(console).splitlines()
    assert "model      12,345 parameters (2,345 active), fp32" in start
    assert "layout     qwen3_moe" in start
    assert "optimizer  adamw: 12 decayed, 8 not" in start
    assert {"12.3 GB", "busiest expert 1.50x"} <= set(step.split(" | "))
    assert "4,321 tok/s | 407 TFLOP/s | MFU 41.2% | " in step
    assert done.split(" | ")[1:] == ["data/a 3.0000", "/b c 3.5000", "EMA weights 3.1250", "0.1 s"]


@pytest.mark.parametrize(
    ("tflops", "text"), [(1234.5, "1,234 TFLOP/s"), (41.27, "41.3 TFLOP/s"), (0.5, "500 GFLOP/s"), (2e-6, "0.002 GFL")]
)
def test_a_rate_is_told_in_a_unit_that_suits_it(tflops: float, text: str) -> None:
    console = make_console(is_terminal=False)
    PlainLines(console).track(replace(make_step(20), tflops=tflops))
    assert f" | {text}" in read_console(console)
    assert "MFU" not in read_console(console)


@pytest.mark.parametrize(
    ("device", "peak", "line"),
    [
        ("NVIDIA H200 (cuda:0)", 989.4, "compute  854.7 MFLOP per token, peak 989 TFLOP/s per device"),
        ("Foo 9000 (cuda:0)", None, "compute  854.7 MFLOP per token; MFU is unknown, since the peak rate of this"),
        ("CPU, 2 threads", None, "compute  854.7 MFLOP per token\n"),
    ],
)
def test_the_first_lines_tell_what_a_token_takes_and_whether_a_gpu_is_known(
    device: str, peak: float | None, line: str
) -> None:
    console = make_console(is_terminal=False)
    start = replace(START, device=device, flops_per_token=854_654_976.0, peak_tflops=peak)
    PlainLines(console).track(start)
    assert line in read_console(console)


def test_plain_lines_have_no_val_before_the_first_evaluation() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    tracker.track(START)
    tracker.track(make_step(20))
    assert "val" not in read_console(console)


def test_plain_lines_are_not_wrapped_coloured_or_read_as_markup() -> None:
    console = make_console(is_terminal=False)
    long = "x" * 300 + "[bold]y[/bold]"
    PlainLines(console).track(replace(START, run=long))
    assert f"run     {long}\n" in read_console(console)
    assert "\x1b" not in read_console(console)


def test_plain_lines_do_not_print_every_fast_step() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    tracker.track(replace(START, max_steps=1000))
    for step in range(1, 1001):
        tracker.track(make_step(step))
    shown = [line.split(" ")[1] for line in read_console(console).split("\n") if " | " in line]
    assert shown[0] == "1/1000"
    assert shown[-1] == "1000/1000"
    assert len(shown) < 100


@pytest.mark.parametrize(
    ("telemetry", "shown"),
    [
        (
            {"gpu_utilization": 0.968, "gpu_power_watts": 611.7, "gpu_temperature_celsius": 61.0},
            ["GPU 97% 612 W 61 °C"],
        ),
        ({"gpu_temperature_celsius": 61.0, "host_memory_gb": 2.0}, ["GPU 61 °C"]),
        ({"host_memory_gb": 2.0}, []),
    ],
)
def test_the_step_line_shows_the_gpu_where_there_is_one(telemetry: dict[str, float], shown: list[str]) -> None:
    line = describe_step(replace(make_step(5), telemetry=telemetry), None)
    assert [part for part in line.split(" | ") if part.startswith("GPU")] == shown


def test_a_loss_that_explodes_still_fits_on_a_line() -> None:
    console = make_console(is_terminal=False)
    PlainLines(console).track(EvalDone(15, 900.0, 64, 0.1))
    assert max(map(len, read_console(console).split("\n"))) <= 120


INCIDENTS: list[Event] = [
    replace(make_step(7), skipped=2),
    UpdateSkipped(8, math.nan, 3.2, [64, 72]),
    RolledBack(5, 8, "loss 9.2 is [far] above its band", 9.2, 3.2, [1056, 1072]),
    Warned(5, "disk", "the disk is [nearly] full"),
]
INCIDENT_LINES = (
    "step 8: loss nan, gradient norm 3.2: update skipped (3 so far)",
    "step 8: loss 9.2 is [far] above its band: rolled back to step 5; windows 1,056 to 1,071 are skipped",
    "warning: the disk is [nearly] full",
)


def test_plain_lines_tell_what_went_wrong() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    for event in [START, *INCIDENTS]:
        tracker.track(event)
    lines = read_console(console).splitlines()
    assert "skipped 2" in next(line for line in lines if line.startswith("step 7/20 | ")).split(" | ")
    assert lines[-3:] == list(INCIDENT_LINES)


def test_the_live_display_tells_what_went_wrong_in_yellow() -> None:
    console = make_console(is_terminal=True)
    display = LiveDisplay(console)
    for event in [START, *INCIDENTS]:
        display.track(event)
    display.close()
    for line in INCIDENT_LINES:
        assert f"\x1b[33m{line}\x1b[0m" in read_console(console)


def test_skips_are_counted_once_whichever_event_comes_first() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    for step, skipped in ((1, 1), (2, 2)):
        tracker.track(UpdateSkipped(step, math.nan, 1.0, [0, 8]))
        tracker.track(replace(make_step(step), skipped=skipped))
    for step, skipped in ((3, 3), (4, 4)):
        tracker.track(replace(make_step(step), skipped=skipped))
        tracker.track(UpdateSkipped(step, math.nan, 1.0, [0, 8]))
    counts = [line.split("(")[1] for line in read_console(console).splitlines() if "update skipped" in line]
    assert counts == [f"{number} so far)" for number in (1, 2, 3, 4)]


def test_a_run_that_only_skips_does_not_flood_the_output() -> None:
    console = make_console(is_terminal=False)
    tracker = PlainLines(console)
    for step in range(1, 1001):
        tracker.track(UpdateSkipped(step, math.nan, 1.0, [0, 8]))
    lines = read_console(console).splitlines()
    assert [line.split(":")[0] for line in lines[:10]] == [f"step {step}" for step in range(1, 11)]
    assert len(lines) < 100


def test_the_live_display_goes_back_with_the_run() -> None:
    console = make_console(is_terminal=True)
    display = LiveDisplay(console)
    for event in (START, EvalDone(15, 5.5, 64, 0.1), make_step(17)):
        display.track(event)
    display.rewind(10)
    shown = make_console(is_terminal=False)
    shown.print(display._render())
    display.close()
    assert "10/20" in read_console(shown)


@pytest.mark.parametrize("loss", [2.5, math.nan, math.inf])
def test_the_live_display_shows_progress_on_a_terminal(loss: float) -> None:
    console = make_console(is_terminal=True)
    display = LiveDisplay(console)
    events = [START, EvalDone(0, 5.5, 64, 0.1), make_step(7, loss), CheckpointSaved(7, "ckpt[7]", 9, 0.1)]
    for event in [*events, EvalDone(20, loss, 64, 0.1), make_step(20, loss), RunFinished(20, "finished", 65.0)]:
        display.track(event)
    display.close()
    text = read_console(console)
    assert "\x1b[" in text
    for part in ("20/20", f"loss {loss:.4f}", "4,321 tok/s", "val loss 5.5000", "finished at step 20"):
        assert part in text, part


def test_the_live_display_gives_the_cursor_back_when_the_run_breaks_off() -> None:
    console = make_console(is_terminal=True)
    trackers = TrackerGroup([LiveDisplay(console)])
    trackers.track(START)
    assert "\x1b[?25l" in read_console(console)
    with pytest.raises(KeyboardInterrupt), trackers:
        raise KeyboardInterrupt
    assert read_console(console).rindex("\x1b[?25h") > read_console(console).rindex("\x1b[?25l")


def test_a_live_display_that_never_began_can_be_closed() -> None:
    LiveDisplay(make_console(is_terminal=True)).close()


def test_a_run_writes_all_its_files_and_tensorboard_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, use_tensorboard in (("with", True), ("without", False)):
        run = create_run(str(tmp_path), name, RunConfig())
        with open_trackers(run, TrackingConfig(use_tensorboard=use_tensorboard), 0) as trackers:
            for event in (START, *make_events(1, 5)):
                trackers.track(event)
        assert len(read_jsonl(run.events)) == 8
        assert run.text_log.read_text(encoding="utf-8").count("\n") == 6
        assert [path.name for path in run.samples.iterdir()] == ["step_000005.txt"]
        assert run.tensorboard.is_dir() == use_tensorboard
    assert "12,345 parameters" in capsys.readouterr().out


def test_a_run_that_goes_back_sets_all_its_trackers_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    rollback = RolledBack(10, 20, "spike", 9.0, 1.0, [152, 160])
    with open_trackers(run, TrackingConfig(use_tensorboard=True), 0) as trackers:
        for event in [*make_events(1, 20), CheckpointSaved(10, "p", 9, 0.1)]:
            trackers.track(event)
        trackers.rewind(10)
        for event in [rollback, *make_events(11, 13)]:
            trackers.track(event)
    expected = [*make_events(1, 10), CheckpointSaved(10, "p", 9, 0.1), rollback, *make_events(11, 13)]
    found = [replace(event, time=0.0) for event in read_jsonl(run.events) if event is not None]
    assert found == [replace(event, time=0.0) for event in expected]
    logged = [line.split()[0] for line in run.text_log.read_text("utf-8").splitlines() if "train" in line]
    assert logged == [str(step) for step in range(1, 14)]
    assert sorted(path.name for path in run.samples.iterdir()) == ["step_000005.txt", "step_000010.txt"]
    assert read_steps(run.tensorboard, "loss/train") == list(range(1, 14))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_resumed_run_sets_all_its_trackers_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    for resumed_at in (0, 10):
        wait_for_next_second()
        with open_trackers(run, TrackingConfig(use_tensorboard=True), resumed_at) as trackers:
            for event in make_events(resumed_at + 1, 20):
                trackers.track(event)
    steps = [json.loads(line)["step"] for line in run.events.read_text("utf-8").split("\n") if "StepLogged" in line]
    assert steps == list(range(1, 21))
    logged = [line.split()[0] for line in run.text_log.read_text("utf-8").splitlines() if "train" in line]
    assert logged == [str(step) for step in range(1, 21)]
    assert read_steps(run.tensorboard, "loss/train") == list(range(1, 21))
    assert capsys.readouterr().err == ""
