"""Downloads one file over HTTP: resumes with range requests, verifies the checksum, renames only when complete."""

from __future__ import annotations

import hashlib
import http.client
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import IO, Any

from gptmill import __version__
from gptmill.config.errors import UserError
from gptmill.config.text import find_raw, sanitize
from gptmill.data.files import flush_to_disk

BLOCK_BYTES = 2**18
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
LINE_SECONDS = 10.0
# The header in which the Hugging Face Hub sends the SHA-256 of an LFS file; it is part of the redirect response.
LINKED_CHECKSUM = "X-Linked-ETag"


class DownloadError(Exception):
    """The download failed; the partial file is kept, so that a later attempt resumes it."""


def download_file(url: str, path: Path, checksum: str | None = None) -> None:
    """Downloads to `path` and verifies `checksum`, such as sha256:86c4…, or the server's own if none is given."""
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        from_server = _fetch_all(url, partial)
        expected = checksum or from_server
        if expected is not None:
            found = hash_content(partial, expected)
            if found != expected:
                partial.unlink()
                raise UserError(
                    f"the download of {url} has the wrong checksum: {found}, not {expected}; try again later, "
                    f"or get the file elsewhere and use --from FILE"
                )
        flush_to_disk(partial)
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free disk space there or set GPTMILL_CACHE to another "
            f"folder"
        ) from None


def hash_content(path: Path, like: str) -> str:
    """Returns the checksum of a file, by the algorithm that `like` names before its colon."""
    algorithm = like.partition(":")[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _fetch_all(url: str, partial: Path) -> str | None:
    """Fetches the whole file, retrying with exponential backoff; returns the server's checksum."""
    progress = DownloadProgress(partial.name.removesuffix(".part"))
    failures = 0
    while True:
        before = _get_size(partial)
        try:
            return _fetch(url, partial, progress)
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"HTTP {error.code} {error.reason}"
            is_permanent = error.code < 500 and error.code not in (408, 429)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = str(getattr(error, "reason", None) or error) or type(error).__name__
            # If the server was never reached, there is no network, and waiting does not help.
            is_permanent = isinstance(error, urllib.error.URLError) and not progress.bytes_new
        finally:
            progress.end_line()
        failures = 1 if _get_size(partial) > before else failures + 1
        if is_permanent or failures >= ATTEMPTS:
            raise DownloadError(reason)
        time.sleep(2.0 ** (failures - 1))


def _fetch(url: str, partial: Path, progress: DownloadProgress) -> str | None:
    """Fetches as much as one connection delivers; returns the server's checksum."""
    start = _get_size(partial)
    headers = {"User-Agent": f"gptmill/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    redirects = ChecksumRedirects()
    opener = urllib.request.build_opener(redirects)
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
        error.close()
        if error.headers.get("Content-Range") != f"bytes */{start}":
            partial.unlink()  # the file on the server has changed
            return _fetch(url, partial, progress)
        return redirects.checksum or find_linked_checksum(error.headers)
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server does not support range requests
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        check_disk_space(partial.parent, total - start if total else 0)
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            _copy(response, file, progress, start, total)
        if total is not None and _get_size(partial) < total:
            raise http.client.IncompleteRead(b"")
        return redirects.checksum or find_linked_checksum(response.headers)


def _copy(response: Any, file: IO[bytes], progress: DownloadProgress, start: int, total: int | None) -> None:
    done = start
    while block := response.read(BLOCK_BYTES):
        file.write(block)
        done += len(block)
        progress.update(done, total, len(block))


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raises UserError if the disk of `folder`, which need not exist yet, has too little free space."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB of free disk space and needs {needed_bytes / 1e9:.1f}; "
            f"free some or set GPTMILL_CACHE to another folder"
        )


def _get_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def find_linked_checksum(headers: Message) -> str | None:
    digest = (headers.get(LINKED_CHECKSUM) or "").strip('"')
    return f"sha256:{digest}" if re.fullmatch(r"[0-9a-f]{64}", digest) else None


class ChecksumRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects and keeps the checksum that one of them carries."""

    checksum: str | None = None

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self.checksum = self.checksum or find_linked_checksum(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class DownloadProgress:
    """One line on standard error: updated in place in a terminal, repeated every few seconds elsewhere."""

    def __init__(self, name: str) -> None:
        self.bytes_new = 0
        self._name = name
        self._started = time.monotonic()
        self._stream = find_raw(sys.stderr)
        self._is_terminal = self._stream.isatty()
        self._shown = self._started
        self._is_open = False

    def update(self, done: int, total: int | None, count: int) -> None:
        self.bytes_new += count
        now = time.monotonic()
        if now - self._shown < (0.2 if self._is_terminal else LINE_SECONDS):
            return
        self._shown = now
        speed = self.bytes_new / max(now - self._started, 1e-9)
        size = f"{done / 1e6:,.0f}" + (f" of {total / 1e6:,.0f}" if total else "") + " MB"
        left = f", {(total - done) / speed:,.0f} s left" if total else ""
        line = f"downloading {self._name}: {size}, {speed / 1e6:.1f} MB/s{left}"
        self._stream.write(f"\r\x1b[K{sanitize(line)}" if self._is_terminal else f"{sanitize(line)}\n")
        self._stream.flush()
        self._is_open = self._is_terminal

    def end_line(self) -> None:
        if self._is_open:
            self._stream.write("\r\x1b[K")
            self._is_open = False
