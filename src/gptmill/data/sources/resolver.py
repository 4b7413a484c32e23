"""From what a user names to the files of a corpus: files, folders, patterns, addresses, names, standard input."""

from __future__ import annotations

import atexit
import functools
import glob
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import unquote, urlsplit

from gptmill.config.errors import UserError, suggest
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.compression import split_compression
from gptmill.data.sources.failures import make_reading_error
from gptmill.data.sources.formats import FORMATS, is_known, is_one_document
from gptmill.data.sources.hub import find_hub, parse_hub_address
from gptmill.data.sources.named_corpora import CORPORA, PYTHON_STDLIB, find_corpus, find_stdlib
from gptmill.data.sources.remote_files import find_remote
from gptmill.data.sources.source import HUB_PREFIX, Source, SourceFile, is_url

STANDARD_INPUT = "-"
LOCAL_SCHEME = "file://"


def open_source(places: list[str], options: ReadingOptions) -> Source:
    """Finds all files behind the given places; raises UserError where there is nothing to read."""
    _check_from(places, options)
    files = tuple(file for place in places for file in _find_files(place, options))
    # Names inside their folder and sizes: a corpus that is moved stays the same corpus.
    listing = "\n".join(f"{file.name} {file.size_bytes}" for file in files)
    size_bytes = sum(file.size_bytes for file in files)
    if size_bytes == 0 and not any(file.is_remote or file.is_on_hub for file in files):
        raise UserError(f"the corpus {' '.join(places)} is empty; give files that contain text")
    return Source(
        name=make_source_name(places),
        files=files,
        size_bytes=size_bytes,
        listing_sha256=hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
        one_document_per_file=all(not file.is_on_hub and is_one_document(file.path_name, options) for file in files),
    )


def make_source_name(places: list[str]) -> str:
    """A short name for a corpus, fit for a folder: that of its first place, without suffixes."""
    first = places[0]
    if first == PYTHON_STDLIB or first in CORPORA:
        return first
    if first == STANDARD_INPUT:
        return "stdin"
    if _is_on_hub(first):
        return parse_hub_address(first).name
    if is_url(first) and not first.startswith(LOCAL_SCHEME):
        parts = urlsplit(first)
        path = PurePath(PurePosixPath("/", parts.netloc, unquote(parts.path).lstrip("/")))
    else:
        path = PurePath(_find_fixed_part(first))
        path = Path(path).resolve()
    while glob.has_magic(path.name):
        path = path.parent
    name = PurePath(split_compression(path.name)[0]).stem or "corpus"
    return name.encode("utf-8", errors="replace").decode()


def _check_from(places: list[str], options: ReadingOptions) -> None:
    if options.from_file is not None and sum(place in CORPORA for place in places) != 1:
        raise UserError(f"--from goes with one named corpus ({', '.join(CORPORA)}); name it as the source")


def _find_files(place: str, options: ReadingOptions) -> list[SourceFile]:
    if place in CORPORA:
        return find_corpus(place, options.from_file)
    if place == PYTHON_STDLIB:
        return [_make_file(path, name) for path, name in find_stdlib()]
    if place == STANDARD_INPUT:
        return [_spool_standard_input()]
    if _is_on_hub(place):
        return [find_hub(place)]
    if is_url(place) and not place.startswith(LOCAL_SCHEME):
        return _find_remote(place)
    try:
        return _find_local(place)
    except OSError as error:
        raise make_reading_error(error.filename or place, error) from None


def _find_local(place: str) -> list[SourceFile]:
    path = Path(_strip_scheme(place))
    if path.is_file():
        return [_make_file(path.resolve(), path.name)]
    if path.is_dir() and place:
        return _list_folder(path, place)
    if place and path.exists():
        raise UserError(f"{place} is neither a text file nor a folder; save its text in a file, or pipe it into: -")
    if not glob.has_magic(place):
        names = (*CORPORA, PYTHON_STDLIB)
        raise UserError(
            f"{place or 'the empty name'} does not exist{suggest(place, names)}; give a file, a folder, a pattern, "
            f"an address or one of {', '.join(names)}"
        )
    found = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207, it knows "**" in the middle
    root = Path(_find_fixed_part(str(path)))
    files = _keep_one_of_each(match for match in found if match.is_file())
    if not files:
        raise UserError(f"no file matches {place}; check the pattern")
    return [_make_file(file.resolve(), file.relative_to(root).as_posix()) for file in files]


def _list_folder(folder: Path, place: str) -> list[SourceFile]:
    found: list[Path] = []
    visited: set[Path] = set()  # by their real names, for links may lead in circles
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        if (real := Path(parent).resolve()) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".") and is_known(name)]
    files = _keep_one_of_each(file for file in found if file.is_file())
    if not files:
        raise _make_folder_error(place)
    return [_make_file(file.resolve(), file.relative_to(folder).as_posix()) for file in files]


def _keep_one_of_each(files: Iterable[Path]) -> list[Path]:
    """In order; a file that links lead to as well is taken once."""
    by_place: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: file.parts):
        by_place.setdefault(file.resolve(), file)
    return list(by_place.values())


def _find_remote(place: str) -> list[SourceFile]:
    is_pattern = "*" in place

    def is_wanted(name: str) -> bool:
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        return not is_hidden and (is_pattern or is_known(name))

    files = find_remote(place, is_wanted)
    if not files:
        raise UserError(f"no file matches {place}; check the pattern") if is_pattern else _make_folder_error(place)
    return files


@functools.cache
def _spool_standard_input() -> SourceFile:
    """What is piped in, in a file that lives as long as this process, so that it can be read more than once."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("nothing is piped in; use it as: cat FILE | gptmill prepare -")
    try:
        with tempfile.NamedTemporaryFile("w+b", prefix="gptmill-stdin-", suffix=".txt", delete=False) as file:
            atexit.register(_remove_own, file.name, os.getpid())
            shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
            size_bytes = file.tell()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot keep what is piped in: {error.strerror or error}; save it in a file first") from None
    # It has no name and no time by which another text would be told apart; its content does that.
    return SourceFile(file.name, f"stdin-{digest[:16]}", size_bytes, 0)


def _remove_own(name: str, process: int) -> None:
    if os.getpid() == process:
        Path(name).unlink(missing_ok=True)


def _make_file(path: Path, name: str) -> SourceFile:
    stat = path.stat()
    return SourceFile(str(path), name, stat.st_size, stat.st_mtime_ns)


def _make_folder_error(place: str) -> UserError:
    return UserError(f"folder {place} has no {', '.join(sorted(FORMATS))} files; name other files one by one")


def _find_fixed_part(place: str) -> str:
    """The folder that a pattern begins with; what is no pattern, or exists as it is, is fixed whole."""
    place = _strip_scheme(place)
    if not glob.has_magic(place) or Path(place).exists():
        return place
    parts = Path(place).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:fixed]))


def _strip_scheme(place: str) -> str:
    return unquote(urlsplit(place).path) if place.startswith(LOCAL_SCHEME) else place


def _is_on_hub(place: str) -> bool:
    return place.startswith(HUB_PREFIX) and not is_url(place)


def _raise(error: OSError) -> None:
    raise error
