"""Checkpoints: safetensors and JSON in a folder that appears by one rename. No pickle is ever read.

`step_000250/` holds model.safetensors, optimizer.safetensors and checkpoint.json; the JSON is written last and
bears the checksums of the others.
"""

from __future__ import annotations

import json
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

FORMAT = "gptmill-checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
READABLE = 0o644  # safetensors makes its files private to the user


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
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for group, tensors in checkpoint.tensors.items():
        path = partial / f"{group}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(READABLE)
        flush_to_disk(path)
        files[path.name] = {"sha256": hash_file(path), "bytes": path.stat().st_size}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": checkpoint.step,
        "saved_at": time.time(),
        "files": files,
    }
    (partial / MANIFEST).write_text(json.dumps({**content, "values": checkpoint.values}, indent=1), encoding="utf-8")
    flush_to_disk(partial / MANIFEST)
    flush_to_disk(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    flush_to_disk(folder)
    return read_info(final)


def load_checkpoint(path: Path, groups: tuple[str, ...]) -> Checkpoint:
    """Reads a checkpoint and the tensor groups asked for; raises UserError unless every byte is as it was saved."""
    content = _read_manifest(path)
    tensors = {}
    for group in groups:
        file = path / f"{group}.safetensors"
        expected = content["files"].get(file.name)
        if expected is None or not file.is_file():
            raise UserError(f"checkpoint {path} has no {file.name}; resume from another one")
        if hash_file(file) != expected["sha256"]:
            raise UserError(
                f"checkpoint {path} is damaged: the checksum of {file.name} is wrong; resume from another one"
            )
        try:
            tensors[group] = load_file(file)
        except SafetensorError as error:
            raise UserError(f"checkpoint {path} is damaged: {file.name}: {error}; resume from another one") from None
    return Checkpoint(content["step"], tensors, content["values"])


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """A run's complete checkpoints, oldest first."""
    return [read_info(path) for path in sorted(folder.glob("step_*")) if (path / MANIFEST).is_file()]


def find_latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise UserError(f"{folder.parent} has no checkpoint yet; let it train until its first one is saved")
    return checkpoints[-1].path


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Deletes all but the newest; called only once a new one is durable."""
    for info in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(info.path)


def make_checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def read_info(path: Path) -> CheckpointInfo:
    content = _read_manifest(path)
    size_bytes = sum(file["bytes"] for file in content["files"].values())
    return CheckpointInfo(path, content["step"], size_bytes, content["saved_at"], content["values"].get("val_loss"))


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            found = f"{content['format']} version {content['version']}"
            raise UserError(f"{file} is {found}; this gptmill reads {FORMAT} version {VERSION}")
    except OSError as error:
        raise UserError(f"cannot read checkpoint {file}: {error.strerror}; resume from another one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint {path} is damaged ({type(error).__name__}: {error}); resume from another one"
        ) from None
    assert isinstance(content, dict)
    return content
