"""One file from the web to the disk: resumed where it stopped, verified, and under its name only when whole."""

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
from gptmill.data.files import flush_to_disk

BLOCK_BYTES = 2**18
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
LINE_SECONDS = 10.0
# The hub's name for the SHA-256 of a file in its large file storage; it stands in the answer that redirects.
LINKED_CHECKSUM = "X-Linked-ETag"


class DownloadError(Exception):
    """The file cannot be had from the web now; what is there of it already is kept."""


def download_file(url: str, path: Path, checksum: str | None = None) -> None:
    """Downloads to `path`. The checksum, such as sha256:86c4…, is the server's own where none is given."""
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
                    f"{url} gave other bytes than it should: {found}, not {expected}; try again later, "
                    f"or get the file elsewhere and use --from FILE"
                )
        flush_to_disk(partial)
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; make room there or set GPTMILL_CACHE to another folder"
        ) from None


def hash_content(path: Path, like: str) -> str:
    """The file's checksum, by the algorithm that `like` names before its colon."""
    algorithm = like.partition(":")[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _fetch_all(url: str, partial: Path) -> str | None:
    """Fetches until all is there, over as many connections as it takes; returns the server's checksum."""
    show = DownloadProgress(partial.name.removesuffix(".part"))
    failures = 0
    while True:
        before = _measure(partial)
        try:
            return _fetch(url, partial, show)
        except urllib.error.HTTPError as error:
            error.close()
            reason, is_hopeless = f"HTTP {error.code} {error.reason}", error.code < 500 and error.code not in (408, 429)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = str(getattr(error, "reason", None) or error) or type(error).__name__
            # A server that was never reached is a network that is not there: no use in waiting for it.
            is_hopeless = isinstance(error, urllib.error.URLError) and not show.bytes_new
        finally:
            show.end_line()
        failures = 1 if _measure(partial) > before else failures + 1
        if is_hopeless or failures >= ATTEMPTS:
            raise DownloadError(reason)
        time.sleep(2.0 ** (failures - 1))


def _fetch(url: str, partial: Path, show: DownloadProgress) -> str | None:
    """One connection's worth."""
    start = _measure(partial)
    headers = {"User-Agent": f"gptmill/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    redirects = NotingRedirects()
    opener = urllib.request.build_opener(redirects)
    try:
        answer = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
        error.close()
        if error.headers.get("Content-Range") != f"bytes */{start}":
            partial.unlink()  # the file there is another one by now
            return _fetch(url, partial, show)
        return redirects.checksum or find_linked_checksum(error.headers)
    with answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server cannot resume
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        check_disk_space(partial.parent, total - start if total else 0)
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            _copy(answer, file, show, start, total)
        if total is not None and _measure(partial) < total:
            raise http.client.IncompleteRead(b"")
        return redirects.checksum or find_linked_checksum(answer.headers)


def _copy(answer: Any, file: IO[bytes], show: DownloadProgress, start: int, total: int | None) -> None:
    done = start
    while block := answer.read(BLOCK_BYTES):
        file.write(block)
        done += len(block)
        show.update(done, total, len(block))


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raises UserError where the disk of the folder, which need not exist yet, is too full for a download."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise UserError(
            f"{folder} has room for {free / 1e9:.1f} GB and needs {needed_bytes / 1e9:.1f}; "
            f"make room there or set GPTMILL_CACHE to another folder"
        )


def _measure(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def find_linked_checksum(headers: Message) -> str | None:
    digest = (headers.get(LINKED_CHECKSUM) or "").strip('"')
    return f"sha256:{digest}" if re.fullmatch(r"[0-9a-f]{64}", digest) else None


class NotingRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections and keeps the checksum that one of them told."""

    checksum: str | None = None

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self.checksum = self.checksum or find_linked_checksum(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class DownloadProgress:
    """One line on standard error, renewed in a terminal and repeated now and then elsewhere."""

    def __init__(self, name: str) -> None:
        self.bytes_new = 0
        self._name = name
        self._started = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
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
        sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()
        self._is_open = self._is_terminal

    def end_line(self) -> None:
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            self._is_open = False
