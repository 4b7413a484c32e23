"""Weights & Biases: charts, samples as a table, histograms and alerts, online or in a folder for `wandb sync`.

W&B cannot take a step back: a step once recorded stays. So after a crash, the steps that a resumed run repeats are not
sent again, since they repeat exactly; those that the crash kept from W&B are sent from events.jsonl. And a run that
takes another path than the one recorded, after a rollback or with other options, becomes a new run of the same group.
An evaluation that a stop interrupted is repeated when its step is recorded already: it is shown one step later.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gptmill.config.run import TrackingConfig
from gptmill.data.files import write_durably
from gptmill.runs.directory import RunDirectory
from gptmill.runs.display import make_plain
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EVALUATIONS, Event, HistogramsTaken, RunFinished, RunStarted, SampleDrawn
from gptmill.runs.histogram_buckets import trim
from gptmill.runs.trackers.metric_names import describe_incident, list_histograms, list_scalars
from gptmill.runs.trackers.wandb_file import read_last_step

MODES = ("online", "offline", "disabled")
MAX_SAMPLES = 250  # of the newest evaluations
MAX_NAME = 100  # of the 128 characters of an id


def find_wandb_mode(config: TrackingConfig) -> str:
    return config.wandb_mode or os.environ.get("WANDB_MODE", "online")


def abandon_wandb() -> None:
    """Kills W&B's own process, for which Python would wait at exit without a limit.

    W&B has no public call for that: `wandb.teardown()` waits just as long.
    """
    import wandb

    with suppress(Exception):
        connection: Any = wandb.setup()._connection
        connection._cleanup()
        connection._proc._process.kill()


class WeightsAndBiases:
    """Sends every step once. W&B's own process uploads or stores what it is sent."""

    def __init__(self, run: RunDirectory, config: TrackingConfig, *, is_evaluated: bool = True) -> None:
        """`is_evaluated` says whether the step that the run resumes from has its evaluation."""
        self._directory = run
        self._config = config
        self._is_evaluated = is_evaluated
        self._start: RunStarted | None = None
        self._run: Any = None
        self._stored_step = -1
        """The last step that W&B has of earlier processes."""
        self._newest_step = -1
        self._samples: list[list[Any]] = []
        self._late: dict[str, Any] = {}
        """Values of the last stored step that W&B takes with the next one only."""

    def track(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event)
        else:
            self._send(event)
            if incident := describe_incident(event):
                self._run.alert(title="gptmill", text=make_plain(incident))
            if isinstance(event, RunFinished):
                self._run.summary["end"] = event.reason

    def rewind(self, step: int) -> None:
        if step < self._newest_step:
            self._take_new_path(step)

    def close(self) -> None:
        if self._run is not None:
            if self._late:
                self._log({}, self._stored_step + 1)
            self._run.finish()
            self._run = None

    def _begin(self, event: RunStarted) -> None:
        self._start = event
        self._open(self._read_id() or self._make_id())
        if event.changes and event.step < self._stored_step:
            self._take_new_path(event.step)
        else:
            self._send_recorded(event.step)

    def _take_new_path(self, step: int) -> None:
        self.close()
        self._open(self._make_id())
        self._send_recorded(step)

    def _open(self, run_id: str) -> None:
        import wandb

        assert self._start is not None
        folder, name = self._directory.wandb, self._directory.path.name
        is_offline = find_wandb_mode(self._config) == "offline"
        stored = read_last_step(folder, run_id) if is_offline else -1  # before this process adds a folder
        self._run = wandb.init(
            project=self._config.wandb_project,
            entity=self._config.wandb_entity,
            dir=str(self._directory.path),
            id=run_id,
            name=name,
            group=name,
            config=dict(self._start.config),
            resume="allow",
            mode="offline" if is_offline else "online",
            settings=wandb.Settings(silent=True, console="off", reinit="create_new"),
        )
        self._stored_step = self._newest_step = stored if is_offline else self._run.starting_step - 1
        self._samples, self._late = [], {}
        with suppress(OSError):
            sys.stderr.write(f"W&B: {f'{folder}, for wandb sync' if is_offline else self._run.url}\n")

    def _send_recorded(self, last: int) -> None:
        """Sends the steps up to `last` that W&B lacks."""
        for event in read_events(self._directory.events, missing_ok=True):
            if event.step <= last:
                self._send(event)

    def _send(self, event: Event) -> None:
        values = self._make_values(event)
        if values and event.step > self._stored_step:
            self._log(values, event.step)
        elif event.step == self._stored_step and isinstance(event, EVALUATIONS) and not self._is_evaluated:
            self._late |= values

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({**self._late, **values}, step=step)
        self._newest_step = max(self._newest_step, step)
        self._late = {}

    def _make_values(self, event: Event) -> dict[str, Any]:
        import wandb

        values: dict[str, Any] = dict(list_scalars(event))
        if isinstance(event, SampleDrawn):
            prompt = make_plain(event.prompt)
            self._samples += [[event.step, prompt, make_plain(text), name] for name, text in event.texts.items()]
            rows = self._samples[-MAX_SAMPLES:]  # a table is stored anew each time
            values["samples"] = wandb.Table(columns=["step", "prompt", "text", "sample"], data=rows)
        elif isinstance(event, HistogramsTaken):
            for name, counts in list_histograms(event).items():
                if any(counts):
                    filled, edges = trim(counts)
                    values[name] = wandb.Histogram(np_histogram=(np.array(filled), np.array(edges)))
        return values

    def _read_id(self) -> str | None:
        with suppress(OSError):
            return self._id_file.read_text(encoding="utf-8").strip() or None
        return None

    def _make_id(self) -> str:
        """A new id, recorded for the processes that resume the run."""
        name = re.sub(r"[^A-Za-z0-9_-]", "-", self._directory.path.name)[:MAX_NAME]
        run_id = f"{name}-{secrets.token_hex(4)}"
        self._id_file.parent.mkdir(exist_ok=True)
        write_durably(self._id_file, run_id + "\n")
        return run_id

    @property
    def _id_file(self) -> Path:
        return self._directory.wandb / "run_id.txt"
