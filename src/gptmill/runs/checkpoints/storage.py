"""Checkpoints: safetensors and JSON in a folder that appears by one rename. No pickle is ever read.

`step_000250/` holds model.safetensors, optimizer.safetensors and checkpoint.json; the JSON is written last and
bears the checksums of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk, hash_file
from gptmill.runs.finite import replace_non_finite

FORMAT = "gptmill-checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """A run's state at a step: groups of named tensors, and the rest as JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]


@dataclass(frozen=True)
class CheckpointInfo:
    """What can be told of a checkpoint without loading it."""

    path: Path
    step: int
    size_bytes: int
    saved_at: float
    val_loss: float | None


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> CheckpointInfo:
    """Writes beside, flushes, and renames: a reader sees the whole checkpoint or none."""
    final = folder / make_checkpoint_name(checkpoint.step)
    partial = folder / f".{final.name}.partial"
    try:
        for leftover in folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_files(partial, checkpoint)
        if final.exists():
            _delete(final)
        partial.rename(final)
        flush_to_disk(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot save checkpoint {final}: {error}; make room there, then go on with --resume latest"
        ) from None
    return read_info(final)


def load_checkpoint(path: Path, groups: tuple[str, ...]) -> Checkpoint:
    """Reads a checkpoint and the tensor groups asked for; raises UserError unless every byte is as it was saved."""
    content = _read_manifest(path)
    tensors = {}
    for group in groups:
        file = path / f"{group}.safetensors"
        expected = content["files"].get(file.name)
        if expected is None or not file.is_file():
            raise UserError(f"checkpoint {path} is incomplete: it has no {file.name}")
        if hash_file(file) != expected["sha256"]:
            raise UserError(f"checkpoint {path} is damaged: the checksum of {file.name} is wrong")
        try:
            tensors[group] = load_file(file)
        except SafetensorError as error:
            raise UserError(f"checkpoint {path} is damaged: {file.name}: {error}") from None
    return Checkpoint(content["step"], tensors, content["values"])


def load_newest_checkpoint(folder: Path, groups: tuple[str, ...]) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is sound, and what is wrong with those that are newer."""
    complaints: list[str] = []
    for path in reversed(_list_paths(folder)):
        try:
            return load_checkpoint(path, groups), complaints
        except UserError as error:
            complaints.append(str(error))
    raise UserError("; ".join([*complaints, f"{folder} holds no checkpoint to go on from; start a new run"]))


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """A run's checkpoints, oldest first; one whose description cannot be read is left out."""
    infos = []
    for path in _list_paths(folder):
        try:
            infos.append(read_info(path))
        except UserError:
            continue
    return infos


def find_latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise UserError(f"{folder.parent} has no checkpoint yet; let it train until its first one is saved")
    return checkpoints[-1].path


def prune_checkpoints(folder: Path, keep: int, newest: int) -> None:
    """Deletes all but `keep` up to step `newest`, which is durable.

    Later steps are of a past that was given up: a damaged checkpoint, say, that the run had to go back behind.
    """
    paths = _list_paths(folder)
    later = [path for path in paths if _read_step(path) > newest]
    for path in [*later, *paths[: len(paths) - len(later)][:-keep]]:
        _delete(path)


def make_checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def read_info(path: Path) -> CheckpointInfo:
    content = _read_manifest(path)
    size_bytes = sum(file["bytes"] for file in content["files"].values())
    return CheckpointInfo(path, content["step"], size_bytes, content["saved_at"], content["values"].get("val_loss"))


def _list_paths(folder: Path) -> list[Path]:
    """Folders named like checkpoints, by step: from the millionth on, names no longer sort like numbers."""
    return sorted((path for path in folder.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)), key=_read_step)


def _read_step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _delete(path: Path) -> None:
    """Out of sight first: a kill in the middle must not leave half a checkpoint that looks whole."""
    hidden = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # what a reader still holds open goes with the next save


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    files: dict[str, dict[str, Any]] = {}
    for group, tensors in checkpoint.tensors.items():
        path = folder / f"{group}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(0o666 & ~_read_umask())  # safetensors makes its files private to the user
        flush_to_disk(path)
        files[path.name] = {"sha256": hash_file(path), "bytes": path.stat().st_size}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": checkpoint.step,
        "saved_at": time.time(),
        "files": files,
        "values": replace_non_finite(checkpoint.values),
    }
    text = json.dumps({**content, "sha256": _hash_content(content)}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    flush_to_disk(folder / MANIFEST)
    flush_to_disk(folder)


def _read_umask() -> int:
    """What the user wants kept from others; the system only tells it to who sets it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            found = f"{content['format']} version {content['version']}"
            raise UserError(f"{file} is {found}; this gptmill reads {FORMAT} version {VERSION}")
        if content.pop("sha256") != _hash_content(content):
            raise UserError(f"checkpoint {path} is damaged: the checksum of {MANIFEST} is wrong")
    except OSError as error:
        raise UserError(f"cannot read checkpoint {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"checkpoint {path} is damaged: {MANIFEST}: {type(error).__name__}: {error}") from None
    return content


def _hash_content(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()
