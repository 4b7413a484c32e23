"""What a model card states of a run, read from the run's own files."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import read_saved_config
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.config.serialization import format_flags
from gptmill.data.corpus_preparation import find_data_dir
from gptmill.data.shards.shard_manifest import read_manifest
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import iterate_lines, parse_event
from gptmill.runs.events import EvalDone, Event, RunStarted, ScoresDone, StepLogged

UNTOLD = frozenset("run_name logdir".split())  # of the command: they name the run, not what it does


@dataclass(frozen=True)
class Score:
    """The result of an evaluation."""

    value: float
    step: int


@dataclass(frozen=True)
class RunFacts:
    """A run up to the step of the exported weights."""

    step: int
    options: dict[str, Any]
    """Every option of the run's config."""
    command: str
    """A command that trains the same run again."""
    corpus: str = ""
    corpus_source: str = ""
    """Where the corpus was prepared from; empty if its folder is gone."""
    data_sha256: str = ""
    tokens: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    scores: dict[str, Score] = field(default_factory=dict)
    """The newest result of every evaluation."""
    device: str = ""
    version: str = ""
    date: str = ""
    """When the weights were trained."""


def read_run_facts(run: RunDirectory, step: int) -> RunFacts:
    """Raises UserError if the run's config cannot be read; anything else that is missing stays unset."""
    config = read_saved_config(run.config)
    events = [event for event in _read_events(run.events, step) if event.step <= step]
    starts = [event for event in events if isinstance(event, RunStarted)]
    evaluations = [event for event in events if isinstance(event, EvalDone)]
    steps = [event for event in events if isinstance(event, StepLogged)]
    scored = [event for event in events if isinstance(event, ScoresDone)]
    scores = {name: Score(value, event.step) for event in scored for name, value in event.scores.items()}
    best = min(evaluations, key=lambda event: event.val_loss, default=None)
    start = starts[-1] if starts else None
    return RunFacts(
        step,
        options=list_values(config),
        command=make_command(config),
        corpus=start.corpus if start else "",
        corpus_source=_find_corpus_source(config),
        data_sha256=start.data if start else "",
        tokens=count_tokens(start, step) if start else None,
        train_loss=steps[-1].loss if steps else None,
        val_loss=next((event.val_loss for event in reversed(evaluations) if event.step == step), None),
        best_loss=best.val_loss if best else None,
        best_step=best.step if best else None,
        scores=scores,
        device=f"{start.ranks} x {start.device}" if start else "",
        version=start.version if start else "",
        date=time.strftime("%Y-%m-%d", time.gmtime(events[-1].time)) if events else "",
    )


def make_command(config: RunConfig) -> str:
    """The run as one command: every option that is not the default."""
    defaults = list_values(RunConfig())
    values = list_values(config)
    changed = {
        name: value
        for name, value in values.items()
        if name not in UNTOLD and (name not in defaults or defaults[name] != value)
    }
    return " ".join(["gptmill train", *(shlex.quote(word) for word in format_flags(changed))])


def count_tokens(start: RunStarted, step: int) -> int:
    """Tokens trained on; an estimate during a batch-size warm-up."""
    return start.total_tokens if start.total_tokens and step == start.max_steps else step * start.tokens_per_step


def _read_events(path: Path, step: int) -> list[Event]:
    """The events that the card needs; of the steps, which may be millions, only the one exported."""
    this_step = f'"step": {step},'.encode()
    events = []
    with suppress(OSError):
        for line in iterate_lines(path):
            start = line[:60]
            if b'"SampleDrawn"' in start or (b'"StepLogged"' in start and this_step not in start):
                continue
            if (event := parse_event(line.decode(errors="replace"))) is not None:
                events.append(event)
    return events


def _find_corpus_source(config: RunConfig) -> str:
    if config.data.mixture is not None:
        return ""
    with suppress(UserError, OSError):
        return str(read_manifest(Path(find_data_dir(config.data))).source.get("name", ""))
    return ""
