"""From what the user typed to what will run: recipe and flags, or a run to go on with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe, make_config
from gptmill.config.requests import LaunchOptions
from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.config.schema import build_config, list_fields, list_values
from gptmill.config.smoke import make_smoke_config
from gptmill.config.validation import check_config
from gptmill.runs.directory import RunDirectory, check_unused, find_free_name, find_newest_run, find_run, make_run_name
from gptmill.runtime.world import read_world_size

# What a run cannot change half-way and still be the same run. Its corpora are told by their checksums instead.
FIXED_FIELDS = frozenset({field.name for field in list_fields(RunConfig) if field.section == "model"}) | {
    "seed",
    "order",
    "score",
    "documents",
}


@dataclass(frozen=True)
class Launch:
    """A config that is sound, and the run that it goes on with, if any."""

    config: RunConfig
    resumed: RunDirectory | None
    changes: tuple[str, ...] = ()


def make_launch(recipe: str | None, flags: dict[str, Any], options: LaunchOptions) -> Launch:
    """Raises UserError for anything that is wrong with what was asked."""
    if options.resume is not None and options.force_cpu:
        raise UserError("--force-cpu does one step of a new run and cannot go on with one; leave out --resume")
    if options.resume is not None:
        return _make_resume(choose_run(recipe, flags), flags)
    config = make_config(recipe, flags)
    if options.force_cpu:
        config = make_smoke_config(config, read_world_size())
    name = config.tracking.run_name
    if name is None:
        name = find_free_name(config.tracking.logdir, make_run_name(recipe, "-smoke" if options.force_cpu else ""))
    config = replace(config, tracking=replace(config.tracking, run_name=name))
    check_config(config, read_world_size())
    check_unused(RunDirectory(Path(config.tracking.logdir) / name))
    return Launch(config, None)


def choose_run(recipe: str | None, flags: dict[str, Any]) -> RunDirectory:
    """The existing run that was named, or the newest of the recipe."""
    tracking = build_config(TrackingConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    name, logdir = tracking.run_name, tracking.logdir
    return find_run(name, logdir) if name else find_newest_run(logdir, recipe)


def _make_resume(run: RunDirectory, flags: dict[str, Any]) -> Launch:
    """The run's own config with the flags of this start on top; its recipe may have changed since, and is not read."""
    saved = load_recipe(str(run.config))
    place = {"run_name": run.path.name, "logdir": str(run.path.parent)}
    config = build_config(RunConfig, {**saved, **flags, **place})
    before = list_values(build_config(RunConfig, saved))
    changes = {name: value for name, value in flags.items() if name not in place and before[name] != value}
    # Groups of whole documents are as large as a micro-batch.
    fixed = FIXED_FIELDS | ({"mini_batch_size"} if before["documents"] == "whole" else set())
    if broken := sorted(fixed & changes.keys()):
        listed = ", ".join(f"{name} from {before[name]} to {changes[name]}" for name in broken)
        raise UserError(f"a resumed run cannot change {listed}; leave that out, or start a new run")
    check_config(config, read_world_size())
    described = tuple(f"{name}: {before[name]} -> {value}" for name, value in changes.items())
    # A run that was killed before its first checkpoint begins again: its steps will be the same ones.
    return Launch(config, run if run.has_checkpoints else None, described)
