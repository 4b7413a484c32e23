"""gptmill checkpoints: lists, verifies, prunes, removes and compares a run's checkpoints, and shows its history."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.cli.output import format_table
from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.recipes import read_saved_config
from gptmill.config.requests import CheckpointsRequest
from gptmill.config.schema import build_config
from gptmill.runs.events import make_perplexity
from gptmill.runs.reporting.formatting import format_duration, format_perplexity

if TYPE_CHECKING:
    from gptmill.runs.directory import RunDirectory
    from gptmill.runs.training_time import TrainingClock

FORMS = "list RUN | verify RUN | prune RUN | remove RUN NAME [NAME ...] | diff RUN A [B] | history RUN"
SUMMARY = """\
list: steps, tiers, losses, perplexities, training time until then, sizes, ages and states, by the files' sizes
alone. The validation loss is shown for steps that were evaluated. verify: checks every byte against its checksum.
prune: deletes checkpoints that no tier refers to, abandoned ones, and rolling ones beyond --keep.
remove: deletes checkpoints by step, tier or folder name; the latest, the best and the only one with --force alone.
diff: compares A and B, each a step, a tier such as best_model, or a path; B defaults to latest.
history: every start, stop, crash, rollback and config change of the run, and its goodput.
RUN is the name of a run or the path of its folder."""
FORMER_ACTIONS = {"ledger": "history"}
COLUMNS = ("step", "tiers", "train loss", "val loss", "perplexity", "elapsed", "MB", "age", "state", "path")
NUM_NAMES = {"diff": (1, 2), "remove": (1, sys.maxsize)}
OWNERS = {"keep": "prune", "keep_epochs": "prune", "force": "remove"}
LEFT_ALIGNED = ("tiers", "state", "path")
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


def run(arguments: list[str]) -> int:
    command = Command("checkpoints", FORMS, SUMMARY, (CheckpointsRequest,))
    parsed = command.parse(arguments)
    request = build_config(CheckpointsRequest, parsed.values)
    actions: dict[str, Callable[[RunDirectory, list[str], CheckpointsRequest], int]] = {
        "list": lambda run, _names, _request: print_checkpoints(run.checkpoints),
        "verify": lambda run, _names, _request: verify(run.checkpoints),
        "prune": lambda run, _names, request: prune_run(run, request.keep, request.keep_epochs),
        "remove": lambda run, names, request: remove_named(run, names, force=request.force),
        "diff": lambda run, names, _request: print_difference(run.checkpoints, names),
        "history": lambda run, _names, _request: print_history(run),
    }
    action, names = (parsed.words or [""])[0], parsed.words[2:]
    action = FORMER_ACTIONS.get(action, action)
    fewest, most = NUM_NAMES.get(action, (0, 0))
    if action not in actions or len(parsed.words) < 2 or not fewest <= len(names) <= most:
        raise UserError(f"gptmill checkpoints {' '.join(parsed.words)}: the usage is gptmill checkpoints {FORMS}")
    for option, owner in OWNERS.items():
        if option in parsed.values and action != owner:
            raise UserError(f"--{option} applies only to gptmill checkpoints {owner}; remove it")
    from gptmill.runs.directory import find_run

    return actions[action](find_run(parsed.words[1], request.logdir), names, request)


def print_checkpoints(folder: Path) -> int:
    """Prints a table of a run's checkpoints and their total size."""
    from gptmill.runs.checkpoints.storage import list_step_folders
    from gptmill.runs.checkpoints.tiers import read_tiers
    from gptmill.runs.directory import RunDirectory
    from gptmill.runs.training_time import read_training_clock

    folders = list_step_folders(folder)
    if not folders:
        sys.stdout.write(describe_empty(folder))
        return 0
    tiers, clock = read_tiers(folder), read_training_clock(RunDirectory(folder.parent).events)
    rows = [make_row(path, [name for name, target in tiers.items() if target == path], clock) for path in folders]
    for line in format_table(COLUMNS, rows, LEFT_ALIGNED):
        sys.stdout.write(line + "\n")
    total = sum(measure_folder(path) for path in folders)
    sys.stdout.write(f"{format_count(len(folders))}, {total / 1e6:,.1f} MB in total\n")
    sys.stdout.write(
        f"complete: every file has its size; gptmill checkpoints verify {folder.parent} reads every byte\n"
    )
    return 0


def make_row(path: Path, tiers: list[str], clock: TrainingClock) -> list[str]:
    """The cells of COLUMNS; "-" for losses and times if the checkpoint's metadata cannot be read."""
    from gptmill.runs.checkpoints.storage import find_damage, read_info, read_step

    size = f"{measure_folder(path) / 1e6:,.1f}"
    damage = describe_damage(path, find_damage(path, thorough=False))
    try:
        info = read_info(path)
    except UserError:
        details = ["-", "-", "-", "-", size, "-"]
    else:
        losses = [format_loss(info.train_loss), format_loss(info.val_loss), format_val_perplexity(info.val_loss)]
        elapsed = clock.measure(info.saved_at)
        times = ["-" if elapsed is None else format_duration(elapsed), size, format_age(time.time() - info.saved_at)]
        details = [*losses, *times]
    return [f"{read_step(path):,}", ", ".join(tiers) or "-", *details, damage or "complete", str(path)]


def verify(folder: Path) -> int:
    """Verifies the checksums of all checkpoints; returns exit code 1 if any is damaged."""
    from gptmill.api.progress import show_amount
    from gptmill.runs.checkpoints.selection import list_candidates
    from gptmill.runs.checkpoints.storage import find_damage, list_step_folders

    folders = list_step_folders(folder)
    if not folders:
        sys.stdout.write(describe_empty(folder))
        return 0
    damages: dict[Path, str] = {}
    sizes = {path: measure_folder(path) for path in folders}
    done = 0
    with show_amount("verifying") as report:
        for path in folders:
            damage = find_damage(path, thorough=True)
            done += sizes[path]
            report(done, sum(sizes.values()))
            if damage and not path.exists():
                continue  # deleted meanwhile by a run in progress
            damages[path] = damage
            sys.stdout.write(f"{path.name}: {describe_damage(path, damage) or 'valid'}\n")
    chosen = next((path for path in list_candidates(folder, "latest") if damages.get(path) == ""), None)
    if chosen is None:
        sys.stdout.write("--resume latest would find no valid checkpoint; start a new run\n")
    else:
        sys.stdout.write(f"--resume latest would resume from {chosen.name}\n")
    return exit_codes.FAILED if any(damages.values()) else 0


def prune_run(run: RunDirectory, keep: int | None, keep_epochs: int | None) -> int:
    """Deletes checkpoints, with the run locked so that none is being written meanwhile."""
    from gptmill.runs.checkpoints.storage import list_step_folders
    from gptmill.runs.checkpoints.tiers import prune
    from gptmill.runs.run_lock import lock_run

    if keep is None:
        keep = read_saved_config(run.config).checkpoints.keep_checkpoints
    for option, value in (("keep", keep), ("keep_epochs", keep_epochs)):
        if value is not None and value < 0:
            raise UserError(f"--{option} {value}: must be at least 0")
    with lock_run(run):
        sizes = {path: measure_folder(path) for path in list_step_folders(run.checkpoints)}
        if not sizes:
            sys.stdout.write(describe_empty(run.checkpoints))
            return 0
        deleted = prune(run.checkpoints, keep, keep_epochs)
    for path in deleted:
        sys.stdout.write(f"deleted {path.name}\n")
    freed, left = sum(sizes[path] for path in deleted), len(sizes) - len(deleted)
    sys.stdout.write(f"{freed / 1e6:,.1f} MB freed, {format_count(left)} kept\n")
    return 0


def remove_named(run: RunDirectory, names: list[str], *, force: bool) -> int:
    """Deletes the checkpoints of these names, with the run locked."""
    from gptmill.runs.checkpoints.removal import check_removable, remove_checkpoints
    from gptmill.runs.checkpoints.storage import list_step_folders
    from gptmill.runs.run_lock import lock_run

    folder = run.checkpoints
    with lock_run(run):
        found = dict.fromkeys(find_checkpoint(folder, name).resolve() for name in names)
        own = {path.resolve(): path for path in list_step_folders(folder)}
        if strangers := [str(path) for path in found if path not in own]:
            raise UserError(f"{strangers[0]} is not a checkpoint of {run.path}; name one of that run")
        targets = [own[path] for path in found]
        if not force:
            check_removable(folder, targets)
        sizes = {path: measure_folder(path) for path in targets}
        moved = remove_checkpoints(folder, targets)
        left = len(own) - len(targets)
    for path, size in sizes.items():
        sys.stdout.write(f"removed {path.name}: {size / 1e6:,.1f} MB freed\n")
    for line in [*moved, f"{format_count(left)} left"]:
        sys.stdout.write(f"{line}\n")
    return 0


def print_difference(folder: Path, names: list[str]) -> int:
    from gptmill.runs.checkpoints.storage import find_damage
    from gptmill.runs.comparison import compare_checkpoints, describe_comparison

    first, second = (find_checkpoint(folder, name) for name in (*names, "latest")[:2])
    for damage in filter(None, (find_damage(path, thorough=True) for path in dict.fromkeys((first, second)))):
        sys.stderr.write(f"warning: {damage}\n")
    sys.stdout.write(describe_comparison(compare_checkpoints(first, second)) + "\n")
    return 0


def print_history(run: RunDirectory) -> int:
    from gptmill.runs.history_text import describe_history

    sys.stdout.write(describe_history(run) + "\n")
    return 0


def find_checkpoint(folder: Path, name: str) -> Path:
    """The checkpoint with this step, tier, folder name or path; raises UserError if there is none."""
    from gptmill.runs.checkpoints.selection import list_candidates
    from gptmill.runs.checkpoints.storage import list_step_folders
    from gptmill.runs.checkpoints.tiers import read_tiers

    tiers, folders = read_tiers(folder), list_step_folders(folder)
    known = {**{path.name: path for path in folders}, **tiers}
    if name in known:
        return known[name]
    if name in ("latest", "best") or name.isdigit():
        candidates = list_candidates(folder, name)
        if candidates:
            return candidates[0]
    elif Path(name).is_dir():
        return Path(name)
    available = ", ".join(known) or "none yet"
    raise UserError(f"there is no checkpoint {name!r} in {folder}; use one of these: {available}; or give a path")


def measure_folder(path: Path) -> int:
    """Total size of the files in bytes; 0 if the folder vanishes meanwhile."""
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0


def describe_empty(folder: Path) -> str:
    return f"{folder.parent} has no checkpoints yet\n"


def describe_damage(path: Path, damage: str) -> str:
    """The damage without the path, which the output shows already."""
    return damage.removeprefix(f"checkpoint {path} ").removeprefix("is ")


def format_loss(loss: float | None) -> str:
    return f"{loss:.4f}" if isinstance(loss, int | float) else "-"


def format_val_perplexity(val_loss: float | None) -> str:
    return format_perplexity(make_perplexity(val_loss)) if isinstance(val_loss, int | float) else "-"


def format_age(seconds: float) -> str:
    """An age in the largest unit of which it has at least one."""
    for size, unit in AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_count(checkpoints: int) -> str:
    return f"{checkpoints:,} checkpoint" + ("" if checkpoints == 1 else "s")
