"""TensorBoard scalars and samples."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.runs.display import make_plain
from gptmill.runs.events import CheckpointSaved, EvalDone, Event, SampleDrawn, ScoresDone, StepLogged

MAX_UNFLUSHED = 1000
EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.")

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes one event file per process, and another one after each rollback or failed write.

    Each file's purge step makes TensorBoard discard the later steps of the files before it.
    """

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder = folder
        self._unflushed: list[Event] = []
        self._writer = _open_writer(folder, resumed_at + 1 if resumed_at else None)

    def track(self, event: Event) -> None:
        if isinstance(event, StepLogged | EvalDone | ScoresDone | SampleDrawn):
            self._unflushed.append(event)
        try:
            self._add(event)
            # After a kill, no step up to the checkpoint may be missing from the curves.
            if isinstance(event, CheckpointSaved) or len(self._unflushed) >= MAX_UNFLUSHED:
                self._flush()
        except OSError:
            self._start_over()

    def rewind(self, step: int) -> None:
        self.close()
        self._writer = _open_writer(self._folder, step + 1)

    def close(self) -> None:
        try:
            self._flush()
        except OSError:
            self._start_over()
        self._writer.close()

    def _add(self, event: Event) -> None:
        for name, value in _list_scalars(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=event.time)
        if isinstance(event, SampleDrawn):
            self._writer.add_text("sample", _make_block(event.prompt + event.text), event.step, walltime=event.time)

    def _flush(self) -> None:
        self._writer.flush()
        self._unflushed.clear()

    def _start_over(self, attempts: int = 3) -> None:
        """Writes the unflushed events to a new file: the thread that wrote the old one has died of the error."""
        with suppress(OSError):
            self._writer.close()
        try:
            self._writer = _open_writer(self._folder, min((event.step for event in self._unflushed), default=None))
            for event in self._unflushed:
                self._add(event)
            self._flush()
        except OSError:
            if attempts == 1:
                raise
            self._start_over(attempts - 1)


def _open_writer(folder: Path, purge_step: int | None) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and few runs need it

    _wait_for_new_timestamp(folder)
    return SummaryWriter(str(folder), purge_step=purge_step)


def _wait_for_new_timestamp(folder: Path) -> None:
    """Waits for the next second if needed: TensorBoard sorts files by name, and within a second 10 sorts before 9."""
    seconds = [int(found[1]) for path in folder.glob("*") if (found := EVENT_FILE.match(path.name))]
    if int(time.time()) == max(seconds, default=0):
        time.sleep(1 - time.time() % 1)


def _make_block(text: str) -> str:
    """Returns the text as a Markdown code block: TensorBoard renders Markdown, which would join its lines."""
    return "\n".join("    " + line for line in make_plain(text).split("\n"))


def _list_scalars(event: Event) -> dict[str, float]:
    if isinstance(event, StepLogged):
        scalars = {
            "loss/train": event.loss,
            "optimizer/lr": event.lr,
            "optimizer/grad_norm": event.grad_norm,
            "speed/tokens_per_second": event.tokens_per_second,
            "progress/epoch": event.epoch,
            **_name_by_corpus("loss/train", event.by_corpus),
            **{f"experts/{name}": load for name, load in event.experts.items()},
        }
        if event.objective is not None:
            scalars["loss/objective"] = event.objective
        if event.tflops:
            scalars["speed/tflops"] = event.tflops
        if event.mfu is not None:
            scalars["speed/mfu"] = event.mfu
        if event.memory_gb:
            scalars["memory/peak_gb"] = event.memory_gb
        if event.skipped:
            scalars["guard/skipped"] = event.skipped
        return scalars
    if isinstance(event, EvalDone):
        scalars = {"loss/val": event.val_loss, "perplexity/val": event.perplexity}
        if event.ema_loss is not None:
            scalars["loss/val_ema"] = event.ema_loss
        return {**scalars, **_name_by_corpus("loss/val", event.by_corpus)}
    if isinstance(event, ScoresDone):
        return {f"evals/{name}": score for name, score in event.scores.items()}
    return {}


def _name_by_corpus(name: str, losses: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{corpus.strip('/')}": loss for corpus, loss in losses.items()}
