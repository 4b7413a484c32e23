"""Turns the command line into a RunRequest: a new run from recipe and flags, or a run or checkpoint to resume."""

from __future__ import annotations

import os
import time
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptmill.config.composition import FP8
from gptmill.config.durations import parse_duration
from gptmill.config.errors import UserError
from gptmill.config.model import Moe
from gptmill.config.parallel_relations import count_data_ranks, shares_more_than_data
from gptmill.config.recipes import layer_config, load_saved_settings, make_config
from gptmill.config.renamed import add_unrecorded
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.config.schema import build_config, list_fields, list_values
from gptmill.config.settings import read_settings
from gptmill.config.smoke import make_smoke_config
from gptmill.config.trust import admit_plugins, check_address, list_addresses
from gptmill.config.validation import check_config
from gptmill.data.files import find_cache_dir
from gptmill.data.remote_fs import is_remote
from gptmill.data.tokenizers import identify_tokenizer
from gptmill.runs.checkpoints.manifest import MANIFEST, read_manifest
from gptmill.runs.checkpoints.mirror import fetch_checkpoint
from gptmill.runs.checkpoints.storage import STEP_FOLDER, load_checkpoint
from gptmill.runs.checkpoints.tiers import TIER
from gptmill.runs.directory import RunDirectory, check_unused, choose_run, find_free_name, make_run_name
from gptmill.runtime.device import is_cpu
from gptmill.runtime.ranks import read_world_size
from gptmill.training.initial_source import is_same_source, split_pin
from gptmill.training.presets import check_size_is_chosen, resolve_presets

NO_PRESETS = PresetOptions()
# Fields of the model that do not affect the shape of its weights.
LOOSE_FIELDS = {"dropout", "router_aux_loss", "router_z_loss", "router_balance", "padded_softmax"}
# Fields that affect the losses of later steps, beside those of the optimizer: changing one makes a resumed run differ
# from the uninterrupted one. Corpora are compared by checksum instead, and a run may always be made longer or shorter.
EXACT_FIELDS = (
    {"seed", "order", "score", "documents", "shift_windows", "precision", "keep_zeros", "exact_ranks"}
    | LOOSE_FIELDS
    | {
        "total_batch_size",
        "context_warmup",
        "batch_size_warmup",
        "label_smoothing",
        "z_loss",
        "fp8_layers",
        "exact_ranks",
    }
)


@dataclass(frozen=True)
class RunRequest:
    """A validated config, and the run or checkpoint to resume from, if any."""

    config: RunConfig
    resumed: RunDirectory | None = None
    """The run to resume; from its first step if it has no checkpoint when it is locked."""
    wanted: str = "latest"
    """Which of its checkpoints: latest, best, or a step."""
    parent: Path | None = None
    """The checkpoint from which a new run starts."""
    changes: tuple[str, ...] = ()
    allows_changes: bool = False
    deadline: float | None = None
    """When the process must have exited, on time.monotonic()."""
    is_paced: bool = False
    """Whether the number of steps follows the deadline, so that training is complete by then."""
    most_paced_steps: int | None = None
    """How many it may grow to, where more would overfit (default: any number)."""
    is_quiet: bool = False
    """Whether the console shows no progress."""


def make_run_request(
    recipe: str | None,
    flags: dict[str, Any],
    options: StartOptions,
    presets: PresetOptions = NO_PRESETS,
    started: float | None = None,
) -> RunRequest:
    """Raises UserError for an invalid combination of recipe, flags and options.

    The time limit counts from `started`, on time.monotonic(), or else from now.
    """
    deadline = _make_deadline(options.time_limit, time.monotonic() if started is None else started)
    if options.resume is not None and options.force_cpu:
        raise UserError("--force-cpu does one step of a new run and cannot resume one; leave out --resume")
    make = _make_new if options.resume is None else _make_resume
    request = make(recipe, flags, options, presets)
    for address in list_addresses(list_values(request.config)):
        check_address(address)  # before anything is written
    return replace(request, deadline=deadline)


def _make_new(recipe: str | None, flags: dict[str, Any], options: StartOptions, presets: PresetOptions) -> RunRequest:
    if not options.force_cpu:
        check_size_is_chosen(recipe, flags, presets)
    config = _set_fp8_layers(make_config(recipe, resolve_presets(recipe, flags, presets)))
    if options.force_cpu:
        config = make_smoke_config(config, count_data_ranks(config.machine, read_world_size()))
    config = _set_exact_ranks(config)
    config = _name_run(config, make_run_name(recipe, "-smoke" if options.force_cpu else ""))
    check_config(config, count_data_ranks(config.machine, read_world_size()))
    if config.training.keep_zeros and config.training.init_from is None:
        raise UserError("--keep_zeros keeps the zeros of a pruned model; name that with --init_from, or leave it out")
    check_unused(_find_directory(config))
    return RunRequest(config)


def _make_resume(
    recipe: str | None, flags: dict[str, Any], options: StartOptions, presets: PresetOptions
) -> RunRequest:
    wanted = options.resume
    assert wanted is not None
    if wanted == "auto":
        try:
            run = choose_run(recipe, flags)
        except UserError:
            return _make_new(recipe, flags, options, presets)
        return _resume_run(run, "latest", flags, options)
    if presets != NO_PRESETS:
        raise UserError("--size and --hardware configure a new run; leave them out with --resume")
    is_name = TIER.fullmatch(wanted) or STEP_FOLDER.fullmatch(wanted)
    if wanted == "best" or wanted.isdecimal() or (is_name and not Path(wanted).exists()):
        return _resume_run(choose_run(recipe, flags), wanted, flags, options)
    path = _find_checkpoint(wanted)
    owner = RunDirectory(path.parent.parent)
    is_inside = path.parent == owner.checkpoints and owner.config.is_file() and STEP_FOLDER.fullmatch(path.name)
    tracking = build_config(TrackingConfig, flags)
    if is_inside and (tracking.run_name is None or _is_same_run(owner, tracking)):
        return _resume_run(owner, path.name, flags, options)
    return _branch_from(path, recipe, flags, options)


def _resume_run(run: RunDirectory, wanted: str, flags: dict[str, Any], options: StartOptions) -> RunRequest:
    """The run's saved config with the given flags on top. Its recipe may have changed since and is not read."""
    _check_resumable(run)
    needs_plugins, allows_changes = flags.get("plugin") is None, options.allow_changes
    saved = load_saved_settings(run.config, needs_plugins=needs_plugins, allows_changes=allows_changes)
    location = {"run_name": run.path.name, "logdir": str(run.path.parent)}
    before = build_config(RunConfig, saved)
    flags = _check_source(flags, before, run)
    config = _keep_recorded(layer_config(saved, flags, location), before)
    changes = _find_changes(before, config, options)
    return RunRequest(config, run, wanted, None, changes, options.allow_changes)


def _check_resumable(run: RunDirectory) -> None:
    """Raises UserError for a run that was imported or compressed: it has weights, but no optimizer to go on with."""
    try:
        manifest = read_manifest(run.checkpoints / "latest")
    except UserError:  # absent or damaged: whether another one is valid is found out later
        return
    if manifest.list_files("optimizer"):
        return
    raise UserError(
        f"run {run.path} is a model only, with no training to resume; train it further in a new run: "
        f"gptmill train {run.config} --init_from {run.path.name} --corpus TEXT"
    )


def _check_source(flags: dict[str, Any], before: RunConfig, run: RunDirectory) -> dict[str, Any]:
    """The flags without init_from, which the run has recorded; raises UserError if it names other weights."""
    recorded = before.training.init_from
    logdir = str(flags.get("logdir", run.path.parent))
    if "init_from" in flags and not is_same_source(flags["init_from"], recorded, logdir):
        started = "from scratch" if recorded is None else f"from {split_pin(recorded)[0]}"
        raise UserError(
            f"run {run.path} started {started}, and a resumed run cannot change init_from to {flags['init_from']}; "
            f"leave it out, or start a new run"
        )
    return {name: value for name, value in flags.items() if name != "init_from"}


def _branch_from(path: Path, recipe: str | None, flags: dict[str, Any], options: StartOptions) -> RunRequest:
    """A new run that starts from a checkpoint's state and config; `recipe` only names the run."""
    if flags.get("init_from") is not None:
        raise UserError(f"--init_from and --resume {path} both name weights to start from; leave one of them out")
    saved = load_checkpoint(path, groups=()).values.get("config")
    if flags.get("plugin") is None and isinstance(saved, dict) and isinstance(names := saved.get("plugin"), str):
        admit_plugins(names, f"checkpoint {path}", allows_changes=options.allow_changes)
    settings = add_unrecorded(read_settings(RunConfig, saved, f"checkpoint {path}"))
    settings = {name: value for name, value in settings.items() if name not in ("run_name", "logdir", "init_from")}
    before = build_config(RunConfig, settings)
    config = _name_run(_keep_recorded(layer_config(settings, flags), before), make_run_name(recipe))
    check_unused(_find_directory(config))
    changes = _find_changes(before, config, options)
    return RunRequest(config, None, "latest", path, changes, options.allow_changes)


def _find_changes(before: RunConfig, after: RunConfig, options: StartOptions) -> tuple[str, ...]:
    """Describes each changed field; raises UserError for one that cannot change, or not without --allow_changes."""
    check_config(after, count_data_ranks(after.machine, read_world_size()))
    old, new = list_values(before), list_values(after)
    if new["tokenizer"] not in (None, old["tokenizer"]):
        identify_tokenizer(new["tokenizer"])  # there must be one of that name
    names = [*new, *(name for name in old if name not in new)]  # a variant's fields come and go with it
    changed = {name for name in names if name not in ("run_name", "logdir") and old.get(name) != new.get(name)}
    # The micro-batch size decides which whole documents are grouped, and which tokens `batch` balances.
    feed_forward = before.model.feed_forward
    is_balanced_by_batch = isinstance(feed_forward, Moe) and feed_forward.router_balance == "batch"
    depends_on_size = before.data.documents == "whole" or is_balanced_by_batch
    exact = EXACT_FIELDS | _list_section("optimizer") | ({"mini_batch_size"} if depends_on_size else set())

    def describe(names: Set[str]) -> str:
        return ", ".join(f"{name} from {old.get(name)} to {new.get(name)}" for name in sorted(names))

    if broken := (_list_section("model") - LOOSE_FIELDS) & changed:  # its weights would not fit
        raise UserError(f"a resumed run cannot change {describe(broken)}; leave that out, or start a new run")
    if (broken := exact & changed) and not options.allow_changes:
        raise UserError(
            f"a resumed run that changes {describe(broken)} no longer reproduces the uninterrupted run; "
            f"leave that out, or add --allow_changes"
        )
    return tuple(f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if name in changed)


def _list_section(section: str) -> set[str]:
    """The fields of a section, those of registered parts included."""
    return {field.name for field in list_fields(RunConfig) if field.section == section}


def _find_checkpoint(wanted: str) -> Path:
    """The directory of a checkpoint given by path or URL."""
    if is_remote(wanted):
        if read_world_size() > 1:
            raise UserError(f"--resume {wanted}: with several processes, download the checkpoint and give its path")
        return fetch_checkpoint(wanted, find_cache_dir() / "checkpoints")
    path = Path(wanted)
    if not wanted or not path.exists():
        raise UserError(
            f"--resume {wanted}: there is no such checkpoint; give latest, best, auto, a step, or a checkpoint's path"
        )
    if path.is_dir() and not os.path.lexists(path / MANIFEST):
        raise UserError(
            f"--resume {wanted}: that directory is no checkpoint; to resume a run use --run_name NAME --resume latest"
        )
    return Path(os.path.relpath(path.resolve())) if not path.is_absolute() else path.resolve()


def _set_fp8_layers(config: RunConfig, before: RunConfig | None = None) -> RunConfig:
    """Sets fp8_layers to its current default where fp8 is newly enabled; a run already in fp8 keeps its setting."""
    machine = config.machine
    was_fp8 = before is not None and before.machine.precision in FP8
    if machine.precision not in FP8 or machine.fp8_layers is not None or was_fp8:
        return config
    return replace(config, machine=replace(machine, fp8_layers="fused"))


def _keep_recorded(config: RunConfig, before: RunConfig) -> RunConfig:
    """What a run has decided by itself stays, also where a whole config leaves it open again."""
    config = _set_fp8_layers(config, before)
    if config.machine.exact_ranks is not None:
        return config
    return replace(config, machine=replace(config.machine, exact_ranks=before.machine.exact_ranks))


def _set_exact_ranks(config: RunConfig) -> RunConfig:
    """Records a new run's rule, which is then the same wherever it resumes. Runs from before the option have none."""
    machine = config.machine
    if machine.exact_ranks is not None:
        return config
    is_plain = machine.parallel == "auto" and not shares_more_than_data(machine)
    is_exact = is_plain and (machine.deterministic or is_cpu(machine.device))
    return replace(config, machine=replace(machine, exact_ranks=is_exact))


def _name_run(config: RunConfig, name: str) -> RunConfig:
    """Names the run if it has no name yet."""
    if config.tracking.run_name is not None:
        return config
    free = find_free_name(config.tracking.logdir, name)
    return replace(config, tracking=replace(config.tracking, run_name=free))


def _find_directory(config: RunConfig) -> RunDirectory:
    assert config.tracking.run_name is not None
    return RunDirectory(Path(config.tracking.logdir) / config.tracking.run_name)


def _is_same_run(run: RunDirectory, tracking: TrackingConfig) -> bool:
    return run.path.resolve() == (Path(tracking.logdir) / (tracking.run_name or "")).resolve()


def _make_deadline(time_limit: str | None, started: float) -> float | None:
    if time_limit is None:
        return None
    try:
        return started + parse_duration(time_limit)
    except ValueError as error:
        raise UserError(f"--time_limit {time_limit}: {error}") from None
