"""A folder far away: any fsspec address, read with patience, its errors told as sentences."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gptmill.config.errors import UserError
from gptmill.data.files import hash_file

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 1.0  # doubled after every attempt
DOWNLOADS_IF_DAMAGED = 2  # once more, should the damage have happened on the way
SILENCE_SECONDS = 60.0
# One slash as well: that is what is left of an address that went through Path.
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=\S)", re.IGNORECASE)
LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
T = TypeVar("T")


def is_remote(place: Path | str) -> bool:
    """Whether a place is an address such as s3://bucket/corpus, not a folder of this machine."""
    return ADDRESS.match(str(place)) is not None


def make_address(place: Path | str) -> str:
    """One spelling for an address."""
    return ADDRESS.sub(r"\1://", str(place), count=1).rstrip("/")


class RemoteFolder:
    """Files under an address."""

    def __init__(self, place: Path | str) -> None:
        self.address = make_address(place)
        self._files, self._root = _open_file_system(self.address)

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        return self._retry(lambda: bytes(self._files.cat_file(f"{self._root}/{name}")), name)

    def download(self, name: str, path: Path, sha256: str) -> None:
        """Writes a file to `path`. Raises UserError where it cannot be had, or is not the one with this checksum."""
        for _ in range(DOWNLOADS_IF_DAMAGED):
            self._retry(lambda: self._files.get_file(f"{self._root}/{name}", str(path)), name)
            if hash_file(path) == sha256:
                return
        raise UserError(
            f"{self.address}/{name} is not the file that its manifest describes (by SHA-256); upload the corpus again"
        )

    def _retry(self, action: Callable[[], T], name: str) -> T:
        """Does it again, with longer and longer pauses, unless trying again cannot help."""
        for attempt in range(ATTEMPTS):
            try:
                return action()
            except (FileNotFoundError, PermissionError) as error:
                raise UserError(
                    f"{self.address}/{name} cannot be read ({type(error).__name__}); check the address and your rights"
                ) from None
            except Exception as error:  # every library behind fsspec has its own
                if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
                    raise UserError(
                        f"cannot keep {self.address}/{name} here: {error.strerror}; make room, or set GPTMILL_CACHE to "
                        f"another folder"
                    ) from None
                if attempt == ATTEMPTS - 1:
                    reason = str(error) or type(error).__name__
                    raise UserError(
                        f"{self.address}/{name} could not be fetched in {ATTEMPTS} attempts ({reason}); check the "
                        f"network and start again"
                    ) from None
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _open_file_system(address: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{address} needs fsspec: pip install 'gptmill[cloud]'") from None
    options: dict[str, Any] = {}
    try:
        if address.startswith(("http://", "https://")):
            import aiohttp

            # Its default gives up after five minutes, even while a large shard is arriving.
            silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
            options["client_kwargs"] = {"timeout": silence}
        files, root = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        raise UserError(f"{address} needs more ({error}): pip install 'gptmill[cloud]'") from None
    except ValueError as error:
        raise UserError(f"{address} is no address that fsspec knows ({error}); check its spelling") from None
    return files, root.rstrip("/")
