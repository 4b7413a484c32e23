"""Remote storage (S3, GCS, HTTP, …) through fsspec: URIs, opening a file system, and retrying with backoff."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from gptmill.config.errors import UserError
from gptmill.config.trust import check_address

HTTP_SCHEMES = ("http://", "https://")
HTTP_STALL_SECONDS = 60.0
# A single slash counts too: Path turns s3://bucket into s3:/bucket.
SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=\S)", re.IGNORECASE)
LOCAL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
T = TypeVar("T")


def is_remote(location: Path | str) -> bool:
    """Whether a location is a URI such as s3://bucket/corpus, not a local path."""
    return SCHEME.match(str(location)) is not None


def restore_slashes(location: Path | str) -> str:
    """Restores the double slash after the scheme."""
    return SCHEME.sub(r"\1://", str(location), count=1)


def normalize_uri(location: Path | str) -> str:
    """Restores the double slash after the scheme and drops trailing slashes."""
    return restore_slashes(location).rstrip("/")


def is_http(uri: str) -> bool:
    return uri.startswith(HTTP_SCHEMES)


def open_file_system(uri: str, **options: Any) -> tuple[Any, str]:
    """Returns the fsspec file system of a URI, and the path inside it; `options` go to the file system.

    Raises UserError where a package is missing, fsspec does not accept the URI, or only a run that is not trusted has
    named it.
    """
    check_address(uri)
    try:
        import fsspec

        if is_http(uri):
            import aiohttp

            # aiohttp's default aborts a request after five minutes, even while a large file is arriving.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=HTTP_STALL_SECONDS, sock_read=HTTP_STALL_SECONDS)
            options["client_kwargs"] = {"timeout": timeout}
        files, path = fsspec.core.url_to_fs(uri, **options)
    except ImportError as error:
        # The extra covers S3 and HTTP; for other protocols fsspec's message names the package.
        raise UserError(
            f"{uri} needs a package that is not installed ({error}); for s3:// and https:// run: "
            f"pip install 'gptmill[cloud]'"
        ) from None
    except Exception as error:  # each fsspec backend raises its own types
        raise UserError(f"fsspec cannot open {uri}: {describe_error(error)}; check the URI and its scheme") from None
    return files, str(path)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def retry(
    action: Callable[[], T],
    pauses_seconds: Iterable[float],
    *,
    is_final: Callable[[Exception], bool] = lambda _: False,
    wait: Callable[[float], bool] = _sleep,
) -> T:
    """Calls `action`, and again after each pause until it succeeds; re-raises its last error.

    An error for which `is_final` is True is re-raised at once. `wait` waits for a pause and returns True to give up:
    `threading.Event.wait` makes the pauses interruptible by a stop flag.
    """
    for pause in pauses_seconds:
        try:
            return action()
        except Exception as error:  # each fsspec backend raises its own types
            if is_final(error) or wait(pause):
                raise
    return action()


def is_local_error(error: Exception) -> bool:
    """Whether the disk of this machine, not the remote storage, refused a write."""
    return isinstance(error, OSError) and error.errno in LOCAL_ERRNOS


def is_permanent_error(error: Exception) -> bool:
    """Whether reading remote storage failed in a way that another attempt cannot fix."""
    return isinstance(error, FileNotFoundError | PermissionError) or is_local_error(error)


def describe_error(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
