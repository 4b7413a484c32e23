"""Resolves the inputs that a user names to the files of a corpus.

An input is a path, a folder, a glob pattern, a remote URI, a Hugging Face dataset, a named corpus or standard input.
"""

from __future__ import annotations

import atexit
import functools
import glob
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import unquote, urlsplit

from gptmill.config.errors import UserError, suggest
from gptmill.config.requests import ReadingOptions
from gptmill.data.remote_fs import is_remote, restore_slashes
from gptmill.data.sources.compression import split_compression
from gptmill.data.sources.failures import make_reading_error
from gptmill.data.sources.formats import FORMATS, is_known, is_one_document
from gptmill.data.sources.hub import parse_hub_uri, resolve_hub
from gptmill.data.sources.named_corpora import CORPORA, PYTHON_STDLIB, find_corpus, find_stdlib
from gptmill.data.sources.remote_files import find_remote
from gptmill.data.sources.source import Source, SourceFile, find_own_source, is_on_hub

STANDARD_INPUT = "-"
LOCAL_SCHEME = "file://"
METADATA_SUFFIX = ".wat"  # of Common Crawl


def resolve_source(inputs: list[str], options: ReadingOptions) -> Source:
    """Finds all files of the inputs; raises UserError if there is nothing to read."""
    _check_options(inputs, options)
    files = tuple(file for name in inputs for file in _resolve_input(name, options))
    _check_metadata(files)
    # Relative names and sizes, so that a corpus keeps its identity when its folder is moved.
    listing = "\n".join(f"{file.name} {file.size_bytes}" for file in files)
    size_bytes = sum(file.size_bytes for file in files)
    if size_bytes == 0 and not any(file.is_remote or file.is_streamed for file in files):
        raise UserError(f"the corpus {' '.join(inputs)} is empty; give files that contain text")
    return Source(
        name=make_source_name(inputs),
        files=files,
        size_bytes=size_bytes,
        listing_sha256=hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
        one_document_per_file=all(not file.is_streamed and is_one_document(file.path_name, options) for file in files),
    )


def make_source_name(inputs: list[str]) -> str:
    """Returns a short name for a corpus, usable as a folder name: its first input, without suffixes."""
    first = inputs[0]
    if first == PYTHON_STDLIB or first in CORPORA:
        return first
    if first == STANDARD_INPUT:
        return "stdin"
    if find_own_source(first) is not None:
        return re.sub(r"[^\w.-]+", "-", first).strip("-.")
    if is_on_hub(first):
        return parse_hub_uri(first).name
    if is_remote(first) and not first.startswith(LOCAL_SCHEME):
        parts = urlsplit(first)
        path = PurePath(PurePosixPath("/", parts.netloc, unquote(parts.path).lstrip("/")))
    else:
        path = PurePath(_find_base(first))
        path = Path(path).resolve()
    while glob.has_magic(path.name):
        path = path.parent
    name = PurePath(split_compression(path.name)[0]).stem or "corpus"
    return name.encode("utf-8", errors="replace").decode()


def _check_options(inputs: list[str], options: ReadingOptions) -> None:
    if options.max_expansion is not None and not options.max_expansion >= 1:
        raise UserError(f"--max_expansion {options.max_expansion:g}: must be at least 1, or none for no limit")
    if options.from_file is not None and sum(name in CORPORA for name in inputs) != 1:
        raise UserError(f"--from goes with one named corpus ({', '.join(CORPORA)}); name it as the source")


def _check_metadata(files: tuple[SourceFile, ...]) -> None:
    for file in files:
        if PurePath(split_compression(file.path_name)[0]).suffix.lower() == METADATA_SUFFIX:
            raise UserError(
                f"{file.uri} holds the metadata of a crawl, not its text; give the .wet.gz or .warc.gz file of the "
                f"same crawl"
            )


def _resolve_input(name: str, options: ReadingOptions) -> list[SourceFile]:
    if name in CORPORA:
        return find_corpus(name, options.from_file)
    if name == PYTHON_STDLIB:
        return [_make_file(path, relative_name) for path, relative_name in find_stdlib()]
    if name == STANDARD_INPUT:
        return [_spool_standard_input()]
    if find_own_source(name) is not None:
        return [SourceFile(name, name, 0, 0)]
    if is_on_hub(name):
        return [resolve_hub(name)]
    if is_remote(name) and not name.startswith(LOCAL_SCHEME):
        return _resolve_remote(restore_slashes(name))
    try:
        return _resolve_local(name)
    except OSError as error:
        raise make_reading_error(error.filename or name, error) from None


def _resolve_local(name: str) -> list[SourceFile]:
    path = Path(_strip_scheme(name))
    if path.is_file():
        return [_make_file(path.resolve(), path.name)]
    if path.is_dir() and name:
        return _list_folder(path, name)
    if name and path.exists():
        raise UserError(f"{name} is neither a text file nor a folder; save its text in a file, or pipe it into: -")
    if not glob.has_magic(name):
        corpora = (*CORPORA, PYTHON_STDLIB)
        raise UserError(
            f"{name or 'the empty name'} does not exist{suggest(name, corpora)}; give a file, a folder, a pattern, "
            f"a remote URI (s3://, gs://, https://) or one of {', '.join(corpora)}"
        )
    found = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207, supports "**" in the middle
    root = Path(_find_base(str(path)))
    files = _sort_unique(match for match in found if match.is_file())
    if not files:
        raise UserError(f"no file matches {name}; check the pattern")
    return [_make_file(file.resolve(), file.relative_to(root).as_posix()) for file in files]


def _list_folder(folder: Path, input_name: str) -> list[SourceFile]:
    found: list[Path] = []
    visited: set[Path] = set()  # resolved, because symbolic links may form cycles
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        if (real := Path(parent).resolve()) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".") and is_known(name)]
    files = _sort_unique(file for file in found if file.is_file())
    if not files:
        raise _make_folder_error(input_name)
    return [_make_file(file.resolve(), file.relative_to(folder).as_posix()) for file in files]


def _sort_unique(files: Iterable[Path]) -> list[Path]:
    """Sorts files by path; keeps one of several links to the same file."""
    by_target: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: file.parts):
        by_target.setdefault(file.resolve(), file)
    return list(by_target.values())


def _resolve_remote(uri: str) -> list[SourceFile]:
    is_pattern = "*" in uri

    def is_wanted(name: str) -> bool:
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        return not is_hidden and (is_pattern or is_known(name))

    files = find_remote(uri, is_wanted)
    if not files:
        raise UserError(f"no file matches {uri}; check the pattern") if is_pattern else _make_folder_error(uri)
    return files


@functools.cache
def _spool_standard_input() -> SourceFile:
    """Copies standard input to a temporary file, deleted at exit, so that it can be read more than once."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("nothing is piped in; use it as: cat FILE | gptmill prepare -")
    try:
        with tempfile.NamedTemporaryFile("w+b", prefix="gptmill-stdin-", suffix=".txt", delete=False) as file:
            atexit.register(_remove_in_process, file.name, os.getpid())
            shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
            size_bytes = file.tell()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"cannot copy standard input to a temporary file: {error.strerror or error}; save it in a file first"
        ) from None
    # Standard input has neither a name nor a modification time, so its content identifies it.
    return SourceFile(file.name, f"stdin-{digest[:16]}", size_bytes, 0)


def _remove_in_process(path: str, process_id: int) -> None:
    """Deletes the file unless this is a forked child of the process that made it."""
    if os.getpid() == process_id:
        Path(path).unlink(missing_ok=True)


def _make_file(path: Path, name: str) -> SourceFile:
    stat = path.stat()
    return SourceFile(str(path), name, stat.st_size, stat.st_mtime_ns)


def _make_folder_error(folder: str) -> UserError:
    return UserError(f"folder {folder} has no {', '.join(sorted(FORMATS))} files; name other files one by one")


def _find_base(name: str) -> str:
    """Returns the folder before the first wildcard of a pattern; a path without wildcards, or that exists, itself."""
    name = _strip_scheme(name)
    if not glob.has_magic(name) or Path(name).exists():
        return name
    parts = Path(name).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:fixed]))


def _strip_scheme(name: str) -> str:
    return unquote(urlsplit(name).path) if name.startswith(LOCAL_SCHEME) else name


def _raise(error: OSError) -> None:
    raise error
