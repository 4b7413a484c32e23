"""What the console says: hyper-parameters at the start, samples, every number of a step, and the same in train.log."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reporting_events import make_start, make_step
from rich.console import Console

from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.runs.events import EvalDone, Event, RunFinished, RunStarted, SampleDrawn, TrainEvalDone
from gptmill.runs.trackers.cell_display import CellDisplay
from gptmill.runs.trackers.console import LiveDisplay, PlainLines
from gptmill.runs.trackers.detailed_log import DetailedLog
from gptmill.runs.trackers.event_lines import MAX_SAMPLE_CHARS, describe_samples, describe_step, format_step_time
from gptmill.runs.trackers.start_lines import describe_start

OPTIONS = {name: str(value) for name, value in list_values(RunConfig()).items()}


def make_console(*, is_terminal: bool, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True, newline="\n")
    return Console(file=file, force_terminal=is_terminal, width=120, highlight=False, legacy_windows=False)


def show(console: Console, *events: Event, print_freq: int | None = None) -> str:
    tracker = LiveDisplay(console, print_freq) if console.is_terminal else PlainLines(console, print_freq)
    for event in events:
        tracker.track(event)
    tracker.close()
    assert isinstance(console.file, io.TextIOWrapper)
    written = console.file.buffer
    assert isinstance(written, io.BytesIO)
    return written.getvalue().decode(console.encoding)


def make_full_start(**changes: str) -> RunStarted:
    """The defaults, on two ranks."""
    start = make_start(tokens_per_step=524_288, config={**OPTIONS, **changes})
    return replace(start, grad_accum_steps=8, device_memory_gb=141.0)


def test_the_start_tells_the_hyper_parameters_and_the_gradient_accumulation() -> None:
    rows = dict(line.split("  ", 1) for line in describe_start(make_full_start(beta2="0.99")).splitlines())
    rows = {name: text.strip() for name, text in rows.items()}
    assert rows["model"].startswith("12 layers, 768 wide, 12 heads, context 1,024: 1,000,000 parameters")
    assert rows["learning rate"] == "715 warm-up steps to 0.001, then cosine to 0.0001"
    assert rows["batch"] == (
        "512 sequences of 1,024 tokens: micro-batches of 32 x 8 gradient accumulation steps x 2 ranks"
    )
    assert rows["evaluation"] == "every 250 steps, on 655,360 validation tokens, 5 samples of 32 tokens"
    assert rows["checkpoints"] == "every 250 steps, the newest 10 kept beside the best"
    assert rows["options"] == "beta2 0.99, all in runs/known/config.toml"


def test_the_start_of_an_older_or_resumed_run_tells_what_it_knows() -> None:
    old = describe_start(replace(make_start(), config={}))
    assert "batch" not in old
    assert "options" not in old
    resumed = describe_start(
        replace(make_full_start(sample_prompt="a\n"), resumed_from="runs/known/checkpoints/step_9")
    )
    assert "from step_9" in resumed
    assert r"sample_prompt 'a\n'" in resumed


def test_a_step_tells_time_tokens_samples_perplexity_and_the_share_of_memory() -> None:
    step = make_step(12, seconds=0.5, steps=2, samples_per_second=31.25, memory_gb=35.25)
    parts = describe_step(step, None, device_memory_gb=141.0).split(" | ")
    assert {"ppl 8,103", "250 ms", "500 tok/s", "31.2 samples/s", "35.2 of 141 GB (25%)"} <= set(parts)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0815, "81.5 ms"), (0.0000123, "0.0123 ms"), (0.9999, "1.00 s"), (12.345, "12.35 s")]
)
def test_a_step_time_has_a_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_step_time(seconds) == text


SAMPLES = SampleDrawn(20, "Say\n", "one\x1b[2J", ["two “x”", "other rank"], per_rank=2)


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "⏎"), ("ascii", " / ")], ids=["utf-8", "ascii"])
def test_the_samples_of_rank_0_are_shown_on_a_line_each(encoding: str, mark: str) -> None:
    lines = show(make_console(is_terminal=False, encoding=encoding), make_full_start(), SAMPLES).splitlines()
    control = "·" if encoding == "utf-8" else "."
    assert lines[-3:] == [
        f"> rank 0 sample 0: Say{mark}one{control}[2J",
        f'> rank 0 sample 1: Say{mark}two "x"',
        "> 1 more of other ranks in samples/step_000020.txt",
    ]


def test_a_long_sample_is_cut_and_a_terminal_shows_the_prompt_faintly() -> None:
    (line,) = describe_samples(SampleDrawn(1, "Say ", "x" * 1000))
    assert line.text == "> rank 0 sample 0: Say " + "x" * MAX_SAMPLE_CHARS + "..."
    shown = show(make_console(is_terminal=True), make_full_start(), SampleDrawn(1, "Say ", "yes"))
    assert "\x1b[2m> rank 0 sample 0: Say \x1b[0myes" in shown


def test_evaluations_tell_their_time_and_the_loss_on_training_windows() -> None:
    events = (EvalDone(15, 3.25, 64, 1.44), TrainEvalDone(15, 2.0, 64, 0.5, {"data/a": 1.5}))
    lines = show(make_console(is_terminal=False), *events).splitlines()
    assert lines == [
        "step 15: val loss 3.2500, perplexity 25.79 | 1.4 s",
        "step 15: loss on training windows 2.0000, perplexity 7.39 | data/a 1.5000 | 0.5 s",
    ]


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
def test_every_so_many_steps_get_a_line_where_asked(is_terminal: bool) -> None:
    steps = [make_step(step) for step in range(1, 101)]
    shown = show(make_console(is_terminal=is_terminal), make_full_start(), *steps, print_freq=30)
    assert re.findall(r"(step \d+)/100 \| epoch", shown) == ["step 1", "step 30", "step 60", "step 90", "step 100"]


class Cell:
    """A cell of a notebook."""

    text = ""

    def show(self, text: str, *, at_once: bool = True) -> None:
        self.text = text if at_once or text else self.text


def test_a_notebook_shows_the_newest_samples_beside_the_evaluations() -> None:
    cell = Cell()
    display = CellDisplay(cell)  # type: ignore[arg-type]
    for step in (10, 20):
        for event in (EvalDone(step, 2.0, 64, 0.1), SampleDrawn(step, "", f"text {step}"), make_step(step)):
            display.track(event)
    lines = cell.text.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["step 10", "step 20"]
    assert lines[2] == "> rank 0 sample 0: text 20"
    assert len(lines) == 4


def test_train_log_has_every_line_of_the_console_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("from before\ncut sho", encoding="utf-8")
    log = DetailedLog(path)
    for event in (make_full_start(), make_step(1), make_step(2), SAMPLES, RunFinished(2, "finished", 9.0)):
        log.track(event)
    log.close()
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    assert first == "from before"
    assert {line[4:5] + line[10:11] + line[13:14] for line in lines} == {"- :"}
    texts = [line[20:] for line in lines]
    assert [text.split(" | ")[0] for text in texts if " | lr" in text] == ["step 1/100", "step 2/100"]
    assert texts[-1] == "finished at step 2 after 0:00:09"
    assert texts[0].startswith("run ")
