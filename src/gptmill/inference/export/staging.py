"""Writes an export beside its target, flushes it, and lets it appear by one rename. A failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk
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
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        free = free_bytes(target.parent)
        if needed_bytes + MARGIN_BYTES > free:
            raise UserError(
                f"the export takes {format_bytes(needed_bytes + MARGIN_BYTES)}, but only {format_bytes(free)} are "
                f"free in {target.parent}; free disk space or choose another --out"
            )
        yield partial
        _flush(partial)
        _replace(partial, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}; choose another --out") from error
    finally:
        _remove(partial)


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


def _replace(partial: Path, target: Path) -> None:
    if target.is_dir():  # a rename does not replace a folder that holds files
        old = target.with_name(f".{target.name}.old")
        _remove(old)
        target.rename(old)
        partial.rename(target)
        _remove(old)
    else:
        partial.replace(target)
    flush_to_disk(target.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
