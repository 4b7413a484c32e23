"""manifest.json: what a folder of shards holds, with a checksum for each file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json, read_json
from gptmill.config.regular_files import read_regular
from gptmill.config.validation import is_folder_name
from gptmill.data.files import write_durably

FILE_NAME = "manifest.json"
FORMAT = "gptmill-shards"
VERSION = 3
READABLE = (2, VERSION)  # version 2 has no checksums of origins
# Folders next to the shards, with files of the same names:
DOCUMENTS_DIR = "documents"  # positions in the shard where documents start
ORIGINS_DIR = "origins"  # the source file of each document, as its number in NAMES_NAME
NAMES_NAME = "names.json"
OLD_NAMES_NAME = "names.txt"  # of earlier versions: a line for each name, escaped as in JSON
SCORES_DIR = "scores"  # document scores of `gptmill data score`
DTYPES = ("uint16", "uint32")
MAX_COUNT = 2**53  # a larger one overflows sums of counts


@dataclass(frozen=True)
class Shard:
    """One `.npy` file of tokens, and one of the positions in it where documents start."""

    file: str
    tokens: int
    sha256: str
    documents: int
    documents_sha256: str
    origins_sha256: str = ""
    """Of its file in ORIGINS_DIR; empty in corpora of older versions."""


@dataclass(frozen=True)
class Split:
    """The shards of the training or the validation split."""

    documents: int
    tokens: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a corpus. It is written last: a folder without it is not a corpus."""

    dtype: str
    tokenizer: dict[str, Any]
    fingerprint: str
    source: dict[str, Any]
    cleaning: dict[str, Any]
    train: Split
    val: Split
    defects: dict[str, Any] = field(default_factory=dict)
    """What could not be read and what was empty, by kind."""
    names_sha256: str = ""
    """Of NAMES_NAME; empty in corpora of older versions."""

    @property
    def corpus_sha256(self) -> str:
        """Identifies the tokens: where it is equal, so is every window."""
        hashes = [shard.sha256 for split in (self.train, self.val) for shard in split.shards]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    @property
    def has_origin_checksums(self) -> bool:
        shards = (*self.train.shards, *self.val.shards)
        return bool(self.names_sha256) and all(shard.origins_sha256 for shard in shards)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1, ensure_ascii=False)
    write_durably(folder / FILE_NAME, text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError if the manifest is missing, damaged, of another format or of another version."""
    path = folder / FILE_NAME
    advice = "prepare the corpus again with --overwrite"
    try:
        content: dict[str, Any] = read_json(path)
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} is not a gptmill manifest; point --data_dir to a folder that gptmill prepared")
        if (version := content.pop("version")) not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise UserError(f"{path} has version {version}, but this gptmill reads versions {readable}; {advice}")
        train, val = _read_split(content.pop("train")), _read_split(content.pop("val"))
        if content["dtype"] not in DTYPES:
            raise ValueError(f"dtype {content['dtype']!r} is not one of {', '.join(DTYPES)}")
        for name in ("tokenizer", "source", "cleaning"):
            if not isinstance(content[name], dict):
                raise ValueError(f"its {name} is not an object")
        for name in ("fingerprint", "names_sha256"):
            if not isinstance(content.get(name, ""), str):
                raise ValueError(f"its {name} is not text")
        return Manifest(**content, train=train, val=val)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check the folder or prepare the corpus again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {advice}") from None


def write_names(folder: Path, names: Sequence[str]) -> str:
    """Returns the SHA-256. Any name of a file survives: also one with line breaks, or with bytes that are not UTF-8."""
    text = json.dumps(names, indent=0) + "\n"
    write_durably(folder / ORIGINS_DIR / NAMES_NAME, text)
    return hashlib.sha256(text.encode()).hexdigest()


def read_names(folder: Path, sha256: str) -> list[str]:
    """The names of the source files; empty if they were not recorded. Raises UserError for a damaged list."""
    path, old = folder / ORIGINS_DIR / NAMES_NAME, folder / ORIGINS_DIR / OLD_NAMES_NAME
    if not path.exists() and not old.exists():
        return []
    try:
        if path.exists():
            content = read_regular(path)
            if sha256 and hashlib.sha256(content).hexdigest() != sha256:
                raise ValueError("its SHA-256 differs from the manifest's")
            names = parse_json(content)
        else:
            path, lines = old, read_regular(old).decode("utf-8").split("\n")[:-1]
            names = [parse_json(f'"{line}"') for line in lines]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of names")
        return names
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the corpus again with --overwrite") from None


def _read_split(content: dict[str, Any]) -> Split:
    shards = tuple(_read_shard(shard) for shard in content["shards"])
    return Split(_read_count(content, "documents"), _read_count(content, "tokens"), shards)


def _read_shard(content: dict[str, Any]) -> Shard:
    for name in ("file", "sha256", "documents_sha256", "origins_sha256"):
        if not isinstance(content.get(name, ""), str):
            raise ValueError(f"the {name} of a shard is not text")
    if not is_folder_name(content["file"]):
        raise ValueError(f"{content['file'][:100]!r} is not the plain name of a file")
    _read_count(content, "tokens")
    _read_count(content, "documents")
    return Shard(**content)


def _read_count(content: dict[str, Any], name: str) -> int:
    count = content[name]
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        raise ValueError(f"its number of {name} is {count!r:.50}, not a count")
    return count
