"""Remote source files (s3://, https://, memory://, …): listing and opening them through fsspec."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from gptmill.config.errors import UserError
from gptmill.data.remote_fs import describe_error, is_http, open_file_system
from gptmill.data.sources.source import SourceFile

MTIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")


def find_remote(uri: str, is_wanted: Callable[[str], bool]) -> list[SourceFile]:
    """Returns the file at a URI, or those of a folder or glob pattern whose relative names are wanted."""
    system, path = open_file_system(uri)
    try:
        if any(sign in path for sign in (("*",) if is_http(uri) else ("*", "?", "["))):
            base = re.split(r"[*?[]", path)[0].rpartition("/")[0]
            return _list_entries(system, system.glob(path, detail=True), base, is_wanted)
        if not uri.endswith("/") and (info := system.info(path))["type"] != "directory":
            return [_make_file(system, info, unquote(PurePosixPath(urlsplit(path).path).name))]
        return _list_entries(system, system.find(path, detail=True), path, is_wanted)
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec raises this for an unreachable server too
        if cause is None or getattr(cause, "status", None) == HTTPStatus.NOT_FOUND:
            raise UserError(f"{uri} does not exist; check the URI") from None
        raise make_remote_error(uri, cause) from None
    except Exception as error:  # each fsspec backend raises its own types
        raise make_remote_error(uri, error) from None


def open_remote(uri: str, *, to_jump_in: bool = False) -> Any:
    """Opens the stored bytes: over HTTP as one streamed response, unless `to_jump_in` asks for a seekable file."""
    system, path = open_file_system(uri)
    try:
        if is_http(uri) and not to_jump_in:
            return system.open(path, "rb", block_size=0)
        return system.open(path, "rb")
    except Exception as error:
        raise make_remote_error(uri, error) from None


def make_remote_error(uri: str, error: BaseException) -> UserError:
    return UserError(f"cannot read {uri}: {describe_error(error)}; check the URI, the network and your access")


def _list_entries(
    system: Any, entries: dict[str, dict[str, Any]], base: str, is_wanted: Callable[[str], bool]
) -> list[SourceFile]:
    files = []
    for path, info in sorted(entries.items(), key=lambda entry: entry[0].split("/")):
        name = path.removeprefix(base).lstrip("/")
        if info["type"] != "directory" and is_wanted(name):
            files.append(_make_file(system, info if info.get("size") is not None else system.info(path), name))
    return files


def _make_file(system: Any, info: dict[str, Any], name: str) -> SourceFile:
    uri = str(system.unstrip_protocol(info["name"]))
    return SourceFile(uri, name, int(info.get("size") or 0), _find_mtime_ns(info))


def _find_mtime_ns(info: dict[str, Any]) -> int:
    """Returns the time of the last change, under whichever key the backend stores it; 0 if unknown."""
    for key in MTIME_KEYS:
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return int(value.timestamp() * 1_000_000_000)
        if isinstance(value, int | float):
            return int(value * 1_000_000_000)
    return 0
