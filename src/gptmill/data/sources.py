"""Where text comes from: files, folders, and the standard library of the Python that runs. One file, one document."""

from __future__ import annotations

import hashlib
import io
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
    listing_sha256: str
    newest_change: int

    def read_documents(self) -> Iterator[str]:
        """The text of each file that is not empty."""
        for path in self.files:
            if text := _read_text(path):
                yield text


def open_source(places: list[str]) -> Source:
    """Finds all files behind the given places; raises UserError where there is nothing to read."""
    found = [entry for place in places for entry in _find_files(place)]
    files = tuple(path for path, _ in found)
    stats = [path.stat() for path in files]
    # Names inside their folder and sizes: a corpus that is moved stays the same corpus.
    listing = "\n".join(f"{name} {stat.st_size}" for (_, name), stat in zip(found, stats, strict=True))
    size_bytes = sum(stat.st_size for stat in stats)
    if size_bytes == 0:
        raise UserError(f"the corpus {' '.join(places)} is empty; give files that contain text")
    newest_change = max(stat.st_mtime_ns for stat in stats)
    digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
    return Source(make_source_name(places), files, size_bytes, digest, newest_change)


def make_source_name(places: list[str]) -> str:
    """A short name for a corpus, fit for a folder: the stem of its first place."""
    first = places[0]
    name = first if first == PYTHON_STDLIB else Path(first).resolve().stem
    return name.encode("utf-8", errors="replace").decode()


def _find_files(place: str) -> list[tuple[Path, str]]:
    """Files in a fixed order, each with its name inside the place."""
    if place == PYTHON_STDLIB:
        return _find_stdlib()
    path = Path(place)
    if path.is_file():
        return [(path.resolve(), path.name)]
    if not place or not path.exists():
        raise UserError(
            f"{place or 'the empty name'} does not exist; give a text file, a folder of text files, or {PYTHON_STDLIB}"
        )
    if not path.is_dir():
        raise UserError(f"{place} is neither a text file nor a folder; save its text in a file first")
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise UserError(f"folder {place} has no {', '.join(sorted(TEXT_SUFFIXES))} files; name other files one by one")
    return [(file.resolve(), str(file.relative_to(path))) for file in files]


def _find_stdlib() -> list[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(file.relative_to(root).parts))
    if not files:
        raise UserError(f"this Python keeps no source of its standard library in {root}; prepare a text file instead")
    return [(file, str(file.relative_to(root))) for file in files]


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return content.decode(_find_encoding(content) if path.suffix == ".py" else "utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check its permissions or leave it out"
        ) from None
    except LookupError as error:
        raise UserError(f"{path} declares an encoding that is none for text ({error}); leave it out") from None
    except UnicodeDecodeError as error:
        byte, place = error.object[error.start], error.start
        raise UserError(
            f"{path} is not {error.encoding} text: byte 0x{byte:02x} at offset {place}; "
            f"convert the file (iconv -t utf-8) or leave it out"
        ) from None


def _find_encoding(content: bytes) -> str:
    """The encoding that a Python file declares in its first lines."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError:
        return "utf-8"
    return encoding
