"""Events of a made-up run with known answers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_json import to_json
from gptmill.runs.events import CheckpointSaved, EvalDone, Event, RunFinished, RunStarted, SampleDrawn, StepLogged

START = 1_000_000.0
STEP_SECONDS = 2.0
TOKENS_PER_SECOND = 500.0
LOSSES = {0: 10.0, 20: 4.0, 40: 2.0, 60: 1.4, 80: 1.0, 100: 1.2}


def make_start(step: int = 0, **changes: Any) -> RunStarted:
    values: dict[str, Any] = {
        "run": "runs/known",
        "max_steps": 100,
        "tokens_per_step": 1000,
        "parameters": 1_000_000,
        "device": "NVIDIA H200",
        "precision": "bf16",
        "ranks": 2,
        "corpus": "data/words",
        "tokenizer": "byte:0",
        "version": "0.1.0",
        "torch_version": "2.9",
        "val_loss": None,
        "total_tokens": 100_000,
        "time": START,
        "config": {"seed": "7", "max_lr": "0.001", "mini_batch_size": "4", "context_length": "64", "compile": "False"},
        "parts": {"token_embedding": 250_000.0, "blocks": 750_000.0},
    }
    return RunStarted(step, **{**values, **changes})


def make_step(step: int, **changes: Any) -> StepLogged:
    lr = 0.001 * step / 10 if step <= 10 else 0.001 if step <= 80 else 0.001 * (101 - step) / 21
    values: dict[str, Any] = {
        "epoch": 0.0,
        "loss": 10.0 - step / 12,
        "lr": lr,
        "grad_norm": 1.0,
        "tokens_per_second": TOKENS_PER_SECOND,
        "seconds_left": 0.0,
        "seconds": STEP_SECONDS,
        "mfu": 0.2,
        "time": START + STEP_SECONDS * step,
    }
    return StepLogged(step, **{**values, **changes})


def make_events(**changes: Any) -> list[Event]:
    """100 steps of two seconds, with evaluations at LOSSES: 90 % of the gain of 9 at step 60, the best at step 80."""
    events: list[Event] = [make_start(**changes)]
    for step in range(101):
        moment = START + STEP_SECONDS * step
        if step:
            events.append(make_step(step))
        if step in LOSSES:
            events.append(EvalDone(step, LOSSES[step], 64, 0.0, time=moment))
            events.append(SampleDrawn(step, "Once ", f"upon step {step}", time=moment))
            events.append(CheckpointSaved(step, f"runs/known/checkpoints/step_{step:06d}", 10, 0.1, time=moment))
    return [*events, RunFinished(100, "finished", 200.0, time=START + 200.0)]


def write_run(folder: Path, events: Iterable[Event], name: str = "known") -> RunDirectory:
    """A run of which nothing but events.jsonl is left."""
    run = RunDirectory(folder / name)
    run.path.mkdir(parents=True)
    run.events.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    return run
