"""Addresses such as s3://, https:// and memory://, through fsspec. Nothing here runs unless a user names one."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from gptmill.config.errors import UserError
from gptmill.data.sources.failures import make_extra_error
from gptmill.data.sources.source import SourceFile

CHANGE_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")


def find_remote(place: str, is_wanted: Callable[[str], bool]) -> list[SourceFile]:
    """The files behind an address; of a folder or a pattern, those whose names inside it are wanted."""
    system, path = _open_file_system(place)
    try:
        if any(sign in path for sign in (("*",) if _is_web(place) else ("*", "?", "["))):
            base = re.split(r"[*?[]", path)[0].rpartition("/")[0]
            return _list_entries(system, system.glob(path, detail=True), base, is_wanted)
        if not place.endswith("/") and (info := system.info(path))["type"] != "directory":
            return [_make_file(system, info, unquote(PurePosixPath(urlsplit(path).path).name))]
        return _list_entries(system, system.find(path, detail=True), path, is_wanted)
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec so calls a server that it could not reach, too
        if cause is None or getattr(cause, "status", None) == HTTPStatus.NOT_FOUND:
            raise UserError(f"{place} does not exist; check the address") from None
        raise make_remote_error(place, cause) from None
    except Exception as error:  # every file system has its own kinds
        raise make_remote_error(place, error) from None


def open_remote(address: str, *, to_jump_in: bool = False) -> Any:
    """The stored bytes; as one long answer where the file system can, unless a reader wants to jump in them."""
    system, path = _open_file_system(address)
    try:
        if _is_web(address) and not to_jump_in:
            return system.open(path, "rb", block_size=0)
        return system.open(path, "rb")
    except Exception as error:
        raise make_remote_error(address, error) from None


def make_remote_error(address: str, error: BaseException) -> UserError:
    reason = str(error) or type(error).__name__
    return UserError(f"cannot read {address}: {reason}; check the address, the network and your access to it")


def _open_file_system(place: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise make_extra_error(f"reading {place}", "cloud") from None
    try:
        system, path = fsspec.core.url_to_fs(place)
    except ImportError as error:
        # s3 and the web come with the extra; of other file systems, fsspec names the package.
        raise UserError(f"{place}: {error}; for s3:// and https:// run: pip install 'gptmill[cloud]'") from None
    except Exception as error:
        raise UserError(f"{place} is no address that can be read: {error}; check how it begins") from None
    return system, str(path)


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
    address = str(system.unstrip_protocol(info["name"]))
    return SourceFile(address, name, int(info.get("size") or 0), _find_change(info))


def _find_change(info: dict[str, Any]) -> int:
    for key in CHANGE_KEYS:
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return int(value.timestamp() * 1_000_000_000)
        if isinstance(value, int | float):
            return int(value * 1_000_000_000)
    return 0


def _is_web(address: str) -> bool:
    return address.startswith(("http://", "https://"))
