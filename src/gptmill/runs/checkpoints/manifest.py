"""checkpoint.json: the content of a checkpoint and the checksums of its files. Readers do not trust it.

Whoever made it can have made its checksums match, so every type, name and size is validated before use.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json, replace_non_finite
from gptmill.config.regular_files import open_untrusted
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.tensor_files import FileDigest, write_all
from gptmill.runs.event_json import MAX_TIME

FORMAT = "gptmill-checkpoint"
VERSION = 1
SHARDED = 2  # the version where several ranks have written files of a group: they hold shards of its tensors
MANIFEST = "checkpoint.json"
MAX_BYTES = 64 << 20  # mostly the tokenizer; the largest published ones take a sixth of this
MAX_STEP = 2**63 - 1
FILE_NAME = re.compile(r"([A-Za-z0-9_-]{1,100})(?:\.([0-9]{5}))?\.safetensors")  # the group, and the rank
SHA256 = re.compile(r"[0-9a-f]{64}")
LOSSES = ("train_loss", "val_loss")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Manifest:
    """The validated content of a checkpoint.json."""

    step: int
    saved_at: float
    files: dict[str, FileDigest]
    values: dict[str, Any]

    def list_files(self, group: str) -> list[str]:
        """Returns the files that hold tensors of a group."""
        return list_group_files(self.files, group)

    def hash_group(self, group: str) -> str:
        """Returns a checksum of a group: that of its file or, of several files, that of their checksums."""
        hashes = [self.files[name].sha256 for name in self.list_files(group)]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def make_manifest(checkpoint: Checkpoint[Any], files: dict[str, FileDigest]) -> bytes:
    """Returns the text of a checkpoint.json, with the current time."""
    content = {
        "format": FORMAT,
        "version": SHARDED if any(map(is_of_rank, files)) else VERSION,
        "step": checkpoint.step,
        "saved_at": time.time(),
        "files": make_digests(files),
        "values": replace_non_finite(checkpoint.values),
    }
    text = _dump({**content, "sha256": _hash_content(content)})
    assert len(text) <= MAX_BYTES, "read_manifest would refuse it"
    return text


def name_file(group: str, rank: int | None = None) -> str:
    """Returns the name of a group's file: of its whole tensors or, with a rank, of the shards of that rank."""
    name = f"{group}.safetensors" if rank is None else f"{group}.{rank:05d}.safetensors"
    assert FILE_NAME.fullmatch(name), name
    return name


def is_of_rank(name: str) -> bool:
    """Whether a file holds the shards of one rank."""
    match = FILE_NAME.fullmatch(name)
    return match is not None and match[2] is not None


def find_group(name: str) -> str:
    """Returns the group of a file's tensors."""
    return name.partition(".")[0]


def list_group_files(files: Iterable[str], group: str) -> list[str]:
    """Returns those of a checkpoint's files that hold tensors of a group."""
    return sorted(name for name in files if find_group(name) == group)


def make_digests(files: dict[str, FileDigest]) -> dict[str, Any]:
    """Returns checksums and sizes as a manifest holds them."""
    return {name: {"sha256": file.sha256, "bytes": file.size_bytes} for name, file in files.items()}


def read_digests(files: dict[str, Any]) -> dict[str, FileDigest]:
    """Raises ValueError, KeyError or TypeError for invalid ones."""
    return {name: _check_file(name, file) for name, file in files.items()}


def write_manifest(folder: Path, text: bytes) -> None:
    """Writes and flushes the manifest; the files that it lists must be durable already."""
    with (folder / MANIFEST).open("xb", buffering=0) as file:
        write_all(file, text)
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint; raises UserError unless it is byte for byte as gptmill wrote it."""
    try:
        text = _read_text(path)
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path / MANIFEST}: {error.strerror or error}") from None
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
        if content["format"] != FORMAT or content["version"] not in (VERSION, SHARDED):
            found = f"{content['format']!r:.50} version {content['version']!r:.50}"
            raise UserError(f"{path / MANIFEST} is {found}; this gptmill reads {FORMAT} version {VERSION} or {SHARDED}")
        is_exact = _dump(content) == text
        if content.pop("sha256") != _hash_content(content) or not is_exact:
            raise UserError(f"checkpoint {path} is damaged: the checksum of {MANIFEST} is wrong")
        return _check_content(content)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"checkpoint {path} is damaged: {MANIFEST}: {reason:.200}") from None


def _read_text(path: Path) -> bytes:
    if path.is_file():
        _refuse_pickle(path)
        raise UserError(f"{path} is a file; a gptmill checkpoint is a folder with a {MANIFEST}")
    if path.is_dir() and not os.path.lexists(path / MANIFEST):
        for other in path.iterdir():
            _refuse_pickle(other)
    with open_untrusted(path / MANIFEST) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise UserError(f"{path / MANIFEST} has more than {MAX_BYTES >> 20} MB; use another checkpoint")
    return text


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        raise UserError(f"{path} is a pickle, which can execute code; gptmill does not load pickles")


def _check_content(content: dict[str, Any]) -> Manifest:
    """Raises ValueError for invalid content, and KeyError for missing content."""
    step, saved_at, files, values = (content[name] for name in ("step", "saved_at", "files", "values"))
    if not _is_count(step) or step > MAX_STEP:
        raise ValueError("its step is not a valid step")
    if not _is_number(saved_at) or not 0 <= saved_at < MAX_TIME:
        raise ValueError("its saved_at is not a valid time")
    if not isinstance(files, dict) or not isinstance(values, dict):
        raise ValueError("its files or values are not an object")
    for name in LOSSES:
        if values.get(name) is not None and not _is_number(values[name]):
            raise ValueError(f"its {name} is not a finite number")
    return Manifest(step, saved_at, read_digests(files), values)


def _check_file(name: str, file: Any) -> FileDigest:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is not a plain NAME.safetensors or NAME.RANK.safetensors")
    if not isinstance(file, dict) or not isinstance(file["sha256"], str) or not SHA256.fullmatch(file["sha256"]):
        raise ValueError(f"the sha256 of {name} is invalid")
    if not _is_count(file["bytes"]):
        raise ValueError(f"the bytes of {name} are not a valid size")
    return FileDigest(file["sha256"], file["bytes"])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode()


def _hash_content(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()
