"""Run: a run on disk, finished or not: its config, metrics, checkpoints and samples. Also the models in it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptmill.api.configuration import Recipe
from gptmill.config.errors import UserError
from gptmill.config.keywords import build_request
from gptmill.config.recipes import read_saved_config
from gptmill.config.requests import LoadingOptions
from gptmill.config.run import DeviceName, RunConfig
from gptmill.inference.loading import Weights, load_run_model
from gptmill.inference.model import Model, build_model
from gptmill.inference.opening import open_model
from gptmill.runs.checkpoints.storage import list_step_folders, read_info
from gptmill.runs.checkpoints.tiers import read_tiers
from gptmill.runs.directory import RunDirectory, find_run
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, Event, SampleDrawn, StepLogged, make_perplexity
from gptmill.runs.run_summary import RunState, summarize_run
from gptmill.runtime.device import choose_device

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = ("int", "float", "float | None")


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a run."""

    step: int
    path: Path
    train_loss: float | None
    val_loss: float | None
    tiers: tuple[str, ...]
    """The names that link to it, such as latest and best_model."""

    @property
    def perplexity(self) -> float | None:
        """Of the validation loss; None if the step was not evaluated."""
        return None if self.val_loss is None else make_perplexity(self.val_loss)


@dataclass(frozen=True)
class Sample:
    """What the model wrote at an evaluation."""

    step: int
    prompt: str
    text: str
    """The first sample of rank 0."""
    more_texts: tuple[str, ...] = ()
    """Its other samples, then those of the other ranks."""


@dataclass(frozen=True, repr=False)
class Run:
    """A run on disk. Everything is read when it is asked for, so that a run in progress shows its latest state."""

    directory: RunDirectory

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> RunConfig:
        """As config.toml has it. No plug-in is loaded; the options of one that is not loaded stay as text."""
        return read_saved_config(self.directory.config)

    @property
    def events(self) -> list[Event]:
        """Everything that happened in the run: `RunStarted`, `StepLogged`, `EvalDone`, …"""
        return read_events(self.directory.events, missing_ok=True)

    @property
    def state(self) -> RunState:
        """Whether the run is being trained, or how its last process ended."""
        return summarize_run(self.directory).state

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return summarize_run(self.directory).step

    @property
    def metrics(self) -> dict[str, NDArray[Any]]:
        """The metrics of all logged steps as arrays of equal length: step, loss, lr, grad_norm, tokens_per_second, …"""
        return _make_arrays(StepLogged, self.events)

    @property
    def evaluations(self) -> dict[str, NDArray[Any]]:
        """The same for evaluations: step, val_loss, ema_loss, …"""
        return _make_arrays(EvalDone, self.events)

    @property
    def samples(self) -> list[Sample]:
        """What the model wrote at the evaluations."""
        drawn = [event for event in self.events if isinstance(event, SampleDrawn)]
        return [Sample(event.step, event.prompt, event.text, tuple(event.more_texts)) for event in drawn]

    @property
    def checkpoints(self) -> list[CheckpointEntry]:
        """The checkpoints by step; without those that cannot be read."""
        folder, entries = self.directory.checkpoints, []
        tiers = read_tiers(folder)
        for path in list_step_folders(folder):
            with suppress(UserError):
                info = read_info(path)
                names = tuple(name for name, target in tiers.items() if target == path)
                entries.append(CheckpointEntry(info.step, path, info.train_loss, info.val_loss, names))
        return entries

    def to_dataframe(self) -> pd.DataFrame:
        """The metrics of all steps, with the validation losses beside them, as a pandas table indexed by step."""
        try:
            import pandas as pd
        except ImportError:
            raise UserError("to_dataframe needs pandas; install it with: pip install 'gptmill[pandas]'") from None
        steps, evaluations = self.metrics, self.evaluations
        frame = pd.DataFrame(steps).set_index("step")
        measured = pd.DataFrame({name: evaluations[name] for name in ("step", "val_loss", "ema_loss")})
        return frame.join(measured.set_index("step"), how="outer")

    def load(self, checkpoint: str | int = "latest", device: DeviceName = "auto", weights: Weights = "raw") -> Model:
        """The model of a checkpoint: latest, best, or a step; `weights` "ema" for their moving average."""
        options = _make_loading(checkpoint, device, weights)
        loaded = load_run_model(self.directory, options.checkpoint, choose_device(options.device), options.weights)
        return build_model(loaded)

    def __repr__(self) -> str:
        summary = summarize_run(self.directory)
        loss = f", val loss {summary.val_loss:.4f}" if summary.val_loss is not None else ""
        return f"Run({str(self.path)!r}, {summary.state} at step {summary.step:,}{loss})"


def open_run(path_or_name: Recipe, logdir: Recipe = "runs") -> Run:
    """The run with this name in `logdir`, or in this folder."""
    return Run(find_directory(path_or_name, logdir))


def load(
    path_or_name: Recipe,
    checkpoint: str | int = "latest",
    device: DeviceName = "auto",
    weights: Weights = "raw",
    logdir: Recipe = "runs",
) -> Model:
    """The model of a run by name or folder, of a checkpoint, or of a Hugging Face folder."""
    options = _make_loading(checkpoint, device, weights, logdir)
    return open_model(os.fspath(path_or_name), options)


def find_directory(path_or_name: Recipe, logdir: Recipe) -> RunDirectory:
    return find_run(os.fspath(path_or_name), os.fspath(logdir))


def _make_loading(
    checkpoint: str | int, device: DeviceName, weights: Weights, logdir: Recipe = "runs"
) -> LoadingOptions:
    given = {"checkpoint": str(checkpoint), "device": device, "weights": weights, "logdir": logdir}
    return build_request(LoadingOptions, given)


def _make_arrays(kind: type[Event], events: list[Event]) -> dict[str, NDArray[Any]]:
    """An array for each field of an event that is a number; NaN where it has none."""
    chosen = [event for event in events if isinstance(event, kind)]
    dtypes = {
        item.name: np.int64 if item.type == "int" else np.float64 for item in fields(kind) if item.type in NUMBERS
    }
    return {
        name: np.array([np.nan if getattr(event, name) is None else getattr(event, name) for event in chosen], dtype)
        for name, dtype in dtypes.items()
    }
