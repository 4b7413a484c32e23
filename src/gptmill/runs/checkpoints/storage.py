"""Checkpoints on disk: safetensors and JSON in a folder that appears by one atomic rename and never changes.

`step_000250/` holds model.safetensors, optimizer.safetensors and checkpoint.json; the JSON is written last and
holds the checksums of the others. Step 250 saved again after a rollback is `step_000250_2/`. Where several ranks save
together, rank 3 adds its shards as model.00003.safetensors: see `joint_save`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk, remove_tree
from gptmill.runs.checkpoints.content import Checkpoint as Checkpoint
from gptmill.runs.checkpoints.content import CheckpointInfo, Held, Shard
from gptmill.runs.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    find_group,
    is_of_rank,
    make_manifest,
    name_file,
    read_manifest,
    write_manifest,
)
from gptmill.runs.checkpoints.saved_tensors import SavedTensor, open_tensors
from gptmill.runs.checkpoints.tensor_files import FileDigest, check_file, measure_tensors, read_tensors, write_tensors

STEP_FOLDER = re.compile(r"step_([0-9]+)(?:_([0-9]+))?")
LEFTOVERS = (".step_*.partial", ".step_*.deleted")
OPTIONAL_GROUPS = ("ema",)  # only in runs with EMA weights
BLOCK_BYTES = 4096  # file systems round file sizes up to this
PLACEHOLDER = FileDigest("0" * 64, 2**63 - 1)


def save_checkpoint(folder: Path, checkpoint: Checkpoint[Held]) -> CheckpointInfo:
    """Writes to a temporary folder, flushes and renames, so that readers see the complete checkpoint or none.

    Raises OSError if that fails, after deleting what it has written.
    """
    remove_leftovers(folder)
    make_folder(folder)
    final = _find_free_path(folder, checkpoint.step)
    partial = folder / f".{final.name}.partial"
    partial.mkdir()
    try:
        return publish(partial, checkpoint, write_files(partial, checkpoint))
    except BaseException:
        remove_tree(partial)
        raise


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        flush_to_disk(folder.parent)


def write_files(partial: Path, checkpoint: Checkpoint[Held], rank: int = 0) -> dict[str, FileDigest]:
    """Writes what a rank saves: its shards and, on rank 0, what all ranks have. Replaces files of an earlier try."""
    files = {}
    for group, tensors in checkpoint.tensors.items():
        for name, chosen in divide_by_file(group, tensors, rank).items():
            (partial / name).unlink(missing_ok=True)
            files[name] = write_tensors(partial / name, chosen)
    return files


def divide_by_file(group: str, tensors: Mapping[str, Held], rank: int = 0) -> dict[str, dict[str, Held]]:
    """Returns the files that a rank writes for a group, by name, and the tensors in each."""
    whole: dict[str, Held] = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Shard)}
    shards: dict[str, Held] = {
        name: shard
        for name, shard in tensors.items()
        # Somebody has to save a tensor that has no elements anywhere.
        if isinstance(shard, Shard) and shard.is_written and (shard.tensor.numel() or not prod(shard.shape))
    }
    files = {name_file(group): whole} if rank == 0 and (whole or len(tensors) == len(whole)) else {}
    return files | ({name_file(group, rank): shards} if shards else {})


def publish(partial: Path, checkpoint: Checkpoint[Any], files: dict[str, FileDigest]) -> CheckpointInfo:
    """Completes a temporary folder by its manifest and renames it; the files must be durable."""
    (partial / MANIFEST).unlink(missing_ok=True)
    write_manifest(partial, make_manifest(checkpoint, files))
    flush_to_disk(partial)
    final = _find_free_path(partial.parent, checkpoint.step)
    partial.rename(final)
    flush_to_disk(partial.parent)
    return read_info(final)


def load_checkpoint(path: Path, groups: tuple[str, ...]) -> Checkpoint[Tensor]:
    """Reads a checkpoint with these tensor groups, whole; raises UserError unless all checksums match."""
    manifest = read_manifest(path)
    _check_name(path, manifest.step)
    tensors = {group: _load_group(path, manifest, names) for group, names in _find_files(path, manifest, groups)}
    return Checkpoint(manifest.step, tensors, manifest.values)


def open_checkpoint(path: Path, groups: tuple[str, ...]) -> Checkpoint[SavedTensor]:
    """Describes a checkpoint, whose tensors are then read in slices; verifies no checksums (`find_damage` does)."""
    manifest = read_manifest(path)
    _check_name(path, manifest.step)
    tensors = {
        group: open_tensors(path / name for name in names) for group, names in _find_files(path, manifest, groups)
    }
    return Checkpoint(manifest.step, tensors, manifest.values)


def read_info(path: Path) -> CheckpointInfo:
    """Returns what the manifest says; raises UserError if it is invalid."""
    manifest = read_manifest(path)
    size_bytes = sum(file.size_bytes for file in manifest.files.values())
    values, step = manifest.values, manifest.step
    is_evaluated = values.get("evaluated_at", step) == step  # else the loss is that of an earlier step
    val_loss = values.get("val_loss") if is_evaluated else None
    return CheckpointInfo(path, step, size_bytes, manifest.saved_at, values.get("train_loss"), val_loss)


def find_damage(path: Path, *, thorough: bool, rank: int = 0, ranks: int = 1) -> str:
    """Describes what is wrong with a checkpoint, "" if nothing; verifies tensor checksums only if thorough.

    Several ranks can divide the checksums among themselves: rank r of n verifies files r, r + n, r + 2n, ...
    """
    try:
        manifest = read_manifest(path)
        _check_name(path, manifest.step)
        for number, (name, expected) in enumerate(manifest.files.items()):
            if not os.path.lexists(path / name):
                raise UserError(f"checkpoint {path} is incomplete: it has no {name}")
            check_file(path / name, expected, thorough=thorough and number % ranks == rank)
        if rank == 0 and any(map(is_of_rank, manifest.files)):
            for group in {find_group(name) for name in manifest.files}:
                open_tensors(path / name for name in manifest.list_files(group))
    except UserError as error:
        return str(error)
    return ""


def list_step_folders(folder: Path) -> list[Path]:
    """Returns the folders named like checkpoints, by step, without reading them."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # a run must not mistake it for an empty folder and start over
        raise UserError(f"cannot read {folder}: {error.strerror or error}; try again when it can be read") from None
    return sorted((folder / name for name in names if STEP_FOLDER.fullmatch(name)), key=_parse_name)


def read_step(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return _parse_name(path)[0]


def delete_checkpoint(path: Path) -> None:
    """Renames, then deletes: a kill in between must not leave a partial checkpoint that looks complete."""
    hidden = path.with_name(f".{path.name}.deleted")
    remove_tree(hidden)
    path.rename(hidden)
    remove_tree(hidden)  # files that a reader still holds open are deleted with the next save


def remove_leftovers(folder: Path, but: str = "") -> None:
    """Deletes what interrupted saves and deletions have left behind, except for what has `but` in its name."""
    for pattern in LEFTOVERS:
        for leftover in folder.glob(pattern):
            if not (but and but in leftover.name):
                remove_tree(leftover)


def measure_checkpoint(checkpoint: Checkpoint[Held], rank: int = 0) -> int:
    """Returns the disk space that a rank's share in saving it takes, rounded up to file-system blocks."""
    files = {
        name: measure_tensors(chosen)
        for group, tensors in checkpoint.tensors.items()
        for name, chosen in divide_by_file(group, tensors, rank).items()
    }
    manifest = len(make_manifest(checkpoint, dict.fromkeys(files, PLACEHOLDER))) if rank == 0 else 0
    return sum(files.values()) + manifest + BLOCK_BYTES * (len(files) + 2)


def make_checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def _find_free_path(folder: Path, step: int) -> Path:
    name = make_checkpoint_name(step)
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    return next(folder / candidate for candidate in names if not os.path.lexists(folder / candidate))


def _find_files(path: Path, manifest: Manifest, groups: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yields the names of each group's files; raises UserError for a group without files, and for a missing file."""
    for group in groups:
        names = manifest.list_files(group)
        if group in OPTIONAL_GROUPS and not names:
            continue
        for name in names or [name_file(group)]:
            if name not in manifest.files or not os.path.lexists(path / name):
                raise UserError(f"checkpoint {path} is incomplete: it has no {name}")
        yield group, names


def _load_group(path: Path, manifest: Manifest, names: list[str]) -> dict[str, Tensor]:
    if not any(map(is_of_rank, names)):
        return read_tensors(path / names[0], manifest.files[names[0]])
    for name in names:
        check_file(path / name, manifest.files[name])
    return {name: saved.read() for name, saved in open_tensors(path / name for name in names).items()}


def _parse_name(path: Path) -> tuple[int, int, str]:
    """Returns a sort key: from the millionth step on, names do not sort like numbers."""
    match = STEP_FOLDER.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not named like a checkpoint, such as {make_checkpoint_name(250)}")
    return int(match[1]), int(match[2] or 1), path.name


def _check_name(path: Path, step: int) -> None:
    """Raises UserError for a folder whose name says another step than its manifest."""
    real = path.resolve()  # a tier's target
    if STEP_FOLDER.fullmatch(real.name) and read_step(real) != step:
        raise UserError(f"checkpoint {path} is misnamed: it was saved at step {step}; rename it")
