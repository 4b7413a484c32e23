"""manifest.json: what a folder of shards holds, with a checksum for each file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.data.files import write_durably

FILE_NAME = "manifest.json"
FORMAT = "gptmill-shards"
VERSION = 2
# Beside the shards, under their names:
DOCUMENTS_DIR = "documents"  # where in the shard documents start
ORIGINS_DIR = "origins"  # which file of the source each document came from, by its line in NAMES_NAME
NAMES_NAME = "names.txt"
SCORES_DIR = "scores"  # what documents were scored, by `gptmill data score`
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class Shard:
    """One `.npy` file of tokens, and one of the places in it at which documents start."""

    file: str
    tokens: int
    sha256: str
    documents: int
    documents_sha256: str


@dataclass(frozen=True)
class Split:
    """The shards of training or of validation."""

    documents: int
    tokens: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """Written last: a folder without it is not a corpus."""

    dtype: str
    tokenizer: dict[str, Any]
    fingerprint: str
    source: dict[str, Any]
    cleaning: dict[str, Any]
    train: Split
    val: Split

    @property
    def corpus_sha256(self) -> str:
        """Names the tokens themselves: equal, and every window is the same."""
        hashes = [shard.sha256 for split in (self.train, self.val) for shard in split.shards]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1, ensure_ascii=False)
    write_durably(folder / FILE_NAME, text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError for a manifest that is torn, foreign, or of another version."""
    path = folder / FILE_NAME
    again = "prepare the corpus again with --overwrite"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} is not a manifest of gptmill; point data_dir to a folder that gptmill prepared")
        if (version := content.pop("version")) != VERSION:
            raise UserError(f"{path} has version {version}, this gptmill reads version {VERSION}; {again}")
        train, val = _read_split(content.pop("train")), _read_split(content.pop("val"))
        if content["dtype"] not in DTYPES:
            raise ValueError(f"dtype {content['dtype']!r} is none of {', '.join(DTYPES)}")
        return Manifest(**content, train=train, val=val)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check the folder or prepare the corpus again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {again}") from None


def _read_split(content: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in content["shards"])
    return Split(content["documents"], content["tokens"], shards)
