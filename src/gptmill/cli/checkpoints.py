"""gptmill checkpoints: what a run has saved, whether it is sound, what of it may go, and the life of the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.config.requests import CheckpointsRequest
from gptmill.config.run import CheckpointConfig
from gptmill.config.schema import build_config

if TYPE_CHECKING:
    from gptmill.runs.directory import RunDirectory

FORMS = "list RUN | verify RUN | prune RUN | diff RUN A [B] | ledger RUN"
SUMMARY = """\
list: a table of steps, tiers, losses, sizes, ages and soundness. verify: reads every byte against its checksum.
prune: deletes what no tier holds, what was abandoned, and rolling ones beyond --keep. diff: what differs between A
and B, each a step, a tier such as best_model, or a path; B is latest unless given. ledger: the life of the run,
every start, stop, crash, rollback and change, and its goodput. RUN is a run's name, or the path of its folder."""
COLUMNS = ("step", "tiers", "train loss", "val loss", "MB", "age", "state", "path")
OF_WORDS = ("tiers", "state", "path")  # columns that stand to the left; numbers stand to the right
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


def run(arguments: list[str]) -> int:
    command = Command("checkpoints", FORMS, SUMMARY, (CheckpointsRequest,))
    parsed = command.parse(arguments)
    request = build_config(CheckpointsRequest, parsed.values)
    actions: dict[str, Callable[[RunDirectory, list[str], CheckpointsRequest], int]] = {
        "list": lambda found, _names, _request: print_checkpoints(found.checkpoints),
        "verify": lambda found, _names, _request: verify(found.checkpoints),
        "prune": lambda found, _names, request: prune_run(found, request.keep),
        "diff": lambda found, names, _request: print_difference(found.checkpoints, names),
        "ledger": lambda found, _names, _request: print_ledger(found),
    }
    action, names = (parsed.words or [""])[0], parsed.words[2:]
    if action not in actions or len(parsed.words) < 2 or not (len(names) in (1, 2) if action == "diff" else not names):
        raise UserError(f"gptmill checkpoints {' '.join(parsed.words)}: its forms are {FORMS}")
    if request.keep is not None and action != "prune":
        raise UserError("--keep is for gptmill checkpoints prune RUN; leave it out")
    from gptmill.runs.directory import find_run

    return actions[action](find_run(parsed.words[1], request.logdir), names, request)


def print_checkpoints(folder: Path) -> int:
    """A table of all that a run has saved, and the room that it takes."""
    from gptmill.runs.checkpoints.storage import list_step_folders
    from gptmill.runs.checkpoints.tiers import read_tiers

    folders = list_step_folders(folder)
    if not folders:
        sys.stdout.write(describe_absence(folder))
        return 0
    tiers = read_tiers(folder)
    rows = [make_row(path, [name for name, target in tiers.items() if target == path]) for path in folders]
    table = [list(COLUMNS), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    for row in table:
        cells = [
            cell.ljust(width) if name in OF_WORDS else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    total = sum(measure_folder(path) for path in folders)
    sys.stdout.write(f"{count(len(folders))}, {total / 1e6:,.1f} MB in all\n")
    return 0


def make_row(path: Path, tiers: list[str]) -> list[str]:
    """The cells of COLUMNS; of a checkpoint whose description cannot be read, those that need none."""
    from gptmill.runs.checkpoints.storage import find_damage, read_info, read_step

    size = f"{measure_folder(path) / 1e6:,.1f}"
    damage = describe_damage(path, find_damage(path, thorough=False))
    try:
        info = read_info(path)
    except UserError:
        told = ["-", "-", size, "-"]
    else:
        losses = [show_loss(info.train_loss), show_loss(info.val_loss)]
        told = [*losses, size, show_age(time.time() - info.saved_at)]
    return [f"{read_step(path):,}", ", ".join(tiers) or "-", *told, damage or "whole", str(path)]


def verify(folder: Path) -> int:
    """Reads every checkpoint; the exit code tells whether all are as they were saved."""
    from gptmill.cli.progress import show_amount
    from gptmill.runs.checkpoints.selection import list_candidates
    from gptmill.runs.checkpoints.storage import find_damage, list_step_folders

    folders = list_step_folders(folder)
    if not folders:
        sys.stdout.write(describe_absence(folder))
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
                continue  # a run under way has let go of it
            damages[path] = damage
            sys.stdout.write(f"{path.name}: {describe_damage(path, damage) or 'sound'}\n")
    chosen = next((path for path in list_candidates(folder, "latest") if damages.get(path) == ""), None)
    if chosen is None:
        sys.stdout.write("--resume latest would find no sound checkpoint; start a new run\n")
    else:
        sys.stdout.write(f"--resume latest would take {chosen.name}\n")
    return exit_codes.FAILED if any(damages.values()) else 0


def prune_run(found: RunDirectory, keep: int | None) -> int:
    """Deletes what is not to be kept, with the run held so that none is being written meanwhile."""
    from gptmill.runs.checkpoints.storage import list_step_folders
    from gptmill.runs.checkpoints.tiers import prune
    from gptmill.runs.directory import lock_run

    if keep is None:
        keep = build_config(CheckpointConfig, load_recipe(str(found.config))).keep_checkpoints
    if keep < 0:
        raise UserError(f"--keep {keep}: must be at least 0")
    with lock_run(found):
        sizes = {path: measure_folder(path) for path in list_step_folders(found.checkpoints)}
        if not sizes:
            sys.stdout.write(describe_absence(found.checkpoints))
            return 0
        deleted = prune(found.checkpoints, keep)
    for path in deleted:
        sys.stdout.write(f"deleted {path.name}\n")
    freed, left = sum(sizes[path] for path in deleted), len(sizes) - len(deleted)
    sys.stdout.write(f"{freed / 1e6:,.1f} MB freed, {count(left)} kept\n")
    return 0


def print_difference(folder: Path, names: list[str]) -> int:
    from gptmill.runs.checkpoints.storage import find_damage
    from gptmill.runs.comparison import compare_checkpoints, describe_comparison

    first, second = (find_checkpoint(folder, name) for name in (*names, "latest")[:2])
    for damage in filter(None, (find_damage(path, thorough=True) for path in dict.fromkeys((first, second)))):
        sys.stderr.write(f"warning: {show(damage)}\n")
    sys.stdout.write(show(describe_comparison(compare_checkpoints(first, second))) + "\n")
    return 0


def print_ledger(found: RunDirectory) -> int:
    from gptmill.runs.history_text import describe_history

    sys.stdout.write(show(describe_history(found)) + "\n")
    return 0


def find_checkpoint(folder: Path, name: str) -> Path:
    """The checkpoint that a step, a tier, a folder's name or a path means."""
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
    there = ", ".join(known) or "none yet"
    raise UserError(f"there is no checkpoint {name!r} in {folder}; there are: {there}; or give a checkpoint's path")


def measure_folder(path: Path) -> int:
    """Bytes of its files; those that vanish meanwhile count as none."""
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0


def describe_absence(folder: Path) -> str:
    return f"{folder.parent} has no checkpoints yet\n"


def describe_damage(path: Path, damage: str) -> str:
    """The complaint without the path, which stands beside it."""
    return show(damage.removeprefix(f"checkpoint {path} ").removeprefix("is "))


def show_loss(loss: float | None) -> str:
    return f"{loss:.4f}" if isinstance(loss, int | float) else "-"


def show_age(seconds: float) -> str:
    """In the largest unit that it fills once."""
    for size, unit in AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def count(checkpoints: int) -> str:
    return f"{checkpoints:,} checkpoint" + ("" if checkpoints == 1 else "s")


def show(text: str) -> str:
    from gptmill.runs.display import make_plain

    return make_plain(text, sys.stdout.encoding or "utf-8")
