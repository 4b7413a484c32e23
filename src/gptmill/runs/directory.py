"""runs/NAME/: the directory of a run, and the paths in it."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.recipes import load_recipe
from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.config.schema import build_config
from gptmill.config.serialization import dump_toml
from gptmill.data.files import write_durably

TIMESTAMP = "%Y%m%d_%H%M%S"


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run, and the paths in it."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def history(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def text_log(self) -> Path:
        return self.path / "log.txt"

    @property
    def detailed_log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def mirrored(self) -> Path:
        return self.path / "mirrored.txt"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def has_files(self) -> bool:
        """Whether the folder holds what only a run writes."""
        return any(os.path.lexists(path) for path in (self.config, self.events, self.history, self.checkpoints))

    @property
    def has_checkpoints(self) -> bool:
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise UserError(f"{self.checkpoints} is a file, but should be the folder of checkpoints; move it away")
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("step_*"))


def make_run_name(recipe: str | None, suffix: str = "") -> str:
    """Returns the default name of a new run: its recipe and the time."""
    return f"{_make_stem(recipe)}{suffix}_{time.strftime(TIMESTAMP)}"


def find_free_name(logdir: str, name: str) -> str:
    """Returns the name, with a number appended if it is taken, as by a run started in the same second."""
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    return next(candidate for candidate in names if not (Path(logdir) / candidate).exists())


def check_unused(run: RunDirectory) -> None:
    """Raises UserError for a run that has checkpoints."""
    if run.has_checkpoints:
        raise UserError(
            f"run {run.path} already has checkpoints; add --resume latest to continue it, or choose another --run_name"
        )


def create_run(logdir: str, name: str, config: RunConfig) -> RunDirectory:
    """Creates the directory of a new run, with its config."""
    run = RunDirectory(Path(logdir) / name)
    check_unused(run)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        for leftover in (run.events, run.text_log, run.detailed_log):
            leftover.unlink(missing_ok=True)
        for leftover in (run.tensorboard, run.wandb, run.samples):
            shutil.rmtree(leftover, ignore_errors=True)
        save_config(run, config)
    except OSError as error:
        raise UserError(f"cannot write {run.path}: {error.strerror or error}; choose another --logdir") from None
    return run


def save_config(run: RunDirectory, config: RunConfig) -> None:
    write_durably(run.config, dump_toml(config))


def find_run(name_or_path: str, logdir: str) -> RunDirectory:
    """Returns the existing run with this name or path."""
    for path in (Path(logdir) / name_or_path, Path(name_or_path)):
        if (path / "config.toml").is_file():
            return RunDirectory(path if path.name else path.resolve())
    names = [run.path.name for run in list_runs(logdir)]
    near = suggest(name_or_path, names)
    raise UserError(f"there is no run {name_or_path!r} in {logdir}/{near}; give a run's name or the path of its folder")


def choose_run(recipe: str | None, flags: dict[str, Any]) -> RunDirectory:
    """Returns the run named by `run_name`, or the newest run of the recipe."""
    tracking = build_config(TrackingConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    name, logdir = tracking.run_name, tracking.logdir
    return find_run(name, logdir) if name else find_newest_run(logdir, recipe)


def find_newest_run(logdir: str, recipe: str | None) -> RunDirectory:
    """Returns the run started last; with a recipe, among the runs named after it by `make_run_name`."""
    pattern = re.compile(rf"{re.escape(_make_stem(recipe))}_\d{{8}}_\d{{6}}(_\d+)?" if recipe else ".*")
    runs = [run for run in list_runs(logdir) if pattern.fullmatch(run.path.name)]
    if not runs:
        kind = f" of recipe {recipe}" if recipe else ""
        raise UserError(f"no run{kind} in {logdir}/ to resume; name one with --run_name, or leave out --resume")
    return max(runs, key=lambda run: run.config.stat().st_mtime)


def _make_stem(recipe: str | None) -> str:
    return Path(recipe).name.removesuffix(".toml") if recipe else "gpt"


def list_runs(logdir: str) -> list[RunDirectory]:
    """Returns every run in a log directory that has a config, without those that are being removed."""
    return [run for run in list_folders(logdir) if run.config.is_file()]


def list_folders(logdir: str) -> list[RunDirectory]:
    """Returns every folder in a log directory with the files of a run, damaged ones too."""
    folders = [path for path in sorted(Path(logdir).glob("*")) if not path.name.startswith(".")]
    return [run for run in map(RunDirectory, folders) if run.has_files]
