"""A remote folder: reads and verified downloads through fsspec, retried, with errors as one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gptmill.config.errors import UserError
from gptmill.data.files import hash_file
from gptmill.data.remote_fs import (
    describe_error,
    is_local_error,
    is_permanent_error,
    normalize_uri,
    open_file_system,
    retry,
)

PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)
MAX_DOWNLOADS = 2  # of a file whose checksum is wrong: it may have been corrupted in transit
T = TypeVar("T")


class RemoteFolder:
    """The files under a URI."""

    def __init__(self, location: Path | str) -> None:
        self.uri = normalize_uri(location)
        self._files, root = open_file_system(self.uri)
        self._root = root.rstrip("/")

    def read(self, name: str) -> bytes:
        """Returns the content of a small file."""
        return self._retry(lambda: bytes(self._files.cat_file(f"{self._root}/{name}")), name)

    def download(self, name: str, path: Path, sha256: str) -> None:
        """Downloads a file to `path`. Raises UserError where it cannot be read or its checksum is wrong."""
        for _ in range(MAX_DOWNLOADS):
            self._retry(lambda: self._files.get_file(f"{self._root}/{name}", str(path)), name)
            if hash_file(path) == sha256:
                return
        raise UserError(f"{self.uri}/{name} does not have the SHA-256 that its manifest gives; upload the corpus again")

    def _retry(self, action: Callable[[], T], name: str) -> T:
        uri = f"{self.uri}/{name}"
        try:
            return retry(action, PAUSES_SECONDS, is_final=is_permanent_error)
        except (FileNotFoundError, PermissionError) as error:
            raise UserError(f"cannot read {uri} ({type(error).__name__}); check the URI and your access") from None
        except Exception as error:
            reason = describe_error(error)
            if is_local_error(error):
                raise UserError(
                    f"cannot write {uri} to the cache: {reason}; free disk space or set GPTMILL_CACHE to another folder"
                ) from None
            raise UserError(
                f"cannot fetch {uri} in {len(PAUSES_SECONDS) + 1} attempts ({reason}); check the network and restart"
            ) from None
