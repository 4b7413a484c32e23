"""Writes an export beside its target, and lets it appear complete by a rename. A failure leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk, restore_replaced, stage
from gptmill.runs.checkpoints.disk_space import format_bytes, free_bytes

MARGIN_BYTES = 20_000_000  # for the files beside the weights
# A folder that holds one of these is an earlier export, which --overwrite may replace.
OWN_FILES = ("config.json", "model.onnx")


def check_target(target: Path, *, is_folder: bool, may_overwrite: bool) -> None:
    """Raises UserError unless an export may be written there."""
    if not target.name:
        raise UserError(f"--out {target}: give the path of a new {'folder' if is_folder else '.gguf file'}")
    if not is_folder and target.suffix != ".gguf":
        raise UserError(f"--out {target}: the name of a GGUF file must end in .gguf; use {target}.gguf")
    restore_replaced(target)
    if not os.path.lexists(target):
        return
    if target.is_dir() != is_folder:
        found, wanted = ("folder", "file") if target.is_dir() else ("file", "folder")
        raise UserError(f"--out {target} is a {found}, but this format is a {wanted}; choose another path")
    if not may_overwrite:
        raise UserError(f"{target} exists; add --overwrite to replace it, or choose another --out")
    if is_folder and any(target.iterdir()) and not any((target / name).is_file() for name in OWN_FILES):
        raise UserError(f"{target} holds other files than an export; empty it, or choose another --out")


@contextmanager
def write_beside(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yields the path to write a file or folder to; flushes it and renames it to `target` when the body is done."""
    try:
        with stage(target) as partial:
            free = free_bytes(target.parent)
            if needed_bytes + MARGIN_BYTES > free:
                raise UserError(
                    f"the export takes {format_bytes(needed_bytes + MARGIN_BYTES)}, but only {format_bytes(free)} are "
                    f"free in {target.parent}; free disk space or choose another --out"
                )
            yield partial
            _flush(partial)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}; choose another --out") from error


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Text files by name."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    write_texts(path.parent, {path.name: json.dumps(content, indent=2, ensure_ascii=False) + "\n"})


def _flush(path: Path) -> None:
    for file in [*path.iterdir(), path] if path.is_dir() else [path]:
        if not file.is_dir():
            file.chmod(0o644)  # safetensors leaves its files readable by their owner only
        flush_to_disk(file)
