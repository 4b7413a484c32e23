"""Where text comes from: files, folders, and the standard library of the Python that runs. One file, one document."""

from __future__ import annotations

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import UserError

PYTHON_STDLIB = "python-stdlib"
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".py"})
# Not what people mean by the library's source: its tests, installed packages, and modules that are only tables.
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"})


@dataclass(frozen=True)
class Source:
    """The files of a corpus in a fixed order."""

    name: str
    files: tuple[Path, ...]
    size_bytes: int
    digest: str

    def read_documents(self) -> Iterator[str]:
        """The text of each file that is not empty."""
        for path in self.files:
            if text := _read_text(path):
                yield text


def open_source(places: list[str]) -> Source:
    """Finds all files behind the given places; raises UserError where there is nothing to read."""
    files = [path for place in places for path in _find_files(place)]
    stats = [path.stat() for path in files]
    listing = "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in zip(files, stats, strict=True))
    size_bytes = sum(stat.st_size for stat in stats)
    if size_bytes == 0:
        raise UserError(f"the corpus {' '.join(places)} is empty; give files that contain text")
    digest = hashlib.sha256(listing.encode()).hexdigest()
    return Source(make_source_name(places), tuple(files), size_bytes, digest)


def make_source_name(places: list[str]) -> str:
    """A short name for a corpus, fit for a folder: the stem of its first place."""
    first = places[0]
    return first if first == PYTHON_STDLIB else Path(first).resolve().stem


def _find_files(place: str) -> list[Path]:
    if place == PYTHON_STDLIB:
        return _find_stdlib()
    path = Path(place)
    if path.is_file():
        return [path.resolve()]
    if not path.exists():
        raise UserError(f"{place} does not exist; give a text file, a folder of text files, or {PYTHON_STDLIB}")
    files = sorted(file.resolve() for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise UserError(f"folder {place} has no {', '.join(sorted(TEXT_SUFFIXES))} files; name other files one by one")
    return files


def _find_stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(file.relative_to(root).parts))
    if not files:
        raise UserError(f"this Python keeps no source of its standard library in {root}; prepare a text file instead")
    return files


def _read_text(path: Path) -> str:
    try:
        if path.suffix == ".py":
            with tokenize.open(path) as file:  # honours the encoding that a Python file declares
                return file.read()
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions or leave it out") from None
    except UnicodeDecodeError as error:
        byte, place = error.object[error.start], error.start
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {place}; "
            f"convert the file (iconv -t utf-8) or leave it out"
        ) from None
    except SyntaxError as error:
        raise UserError(f"{path} declares an encoding that cannot be read: {error.msg}; leave it out") from None
