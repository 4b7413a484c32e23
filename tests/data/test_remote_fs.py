"""Remote file systems: URIs, errors on opening, and retries with pauses that a stop flag can interrupt."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import fsspec
import pytest

from gptmill.config.errors import UserError
from gptmill.data.remote_fs import is_permanent_error, is_remote, normalize_uri, open_file_system, retry

URI = "memory://bucket/corpus"


@pytest.mark.parametrize("location", [URI, URI + "/", Path(URI), "memory:/bucket/corpus"])
def test_every_spelling_of_a_uri_is_normalised(location: Path | str) -> None:
    assert is_remote(location)
    assert normalize_uri(location) == URI


@pytest.mark.parametrize("location", ["corpus", "/data/corpus", Path("data/corpus"), "C:\\corpus", "C:/corpus"])
def test_local_paths_are_not_remote(location: Path | str) -> None:
    assert not is_remote(location)


def test_a_file_system_is_opened_with_the_path_inside_it() -> None:
    files, path = open_file_system(URI)
    assert (type(files), path) == (type(fsspec.filesystem("memory")), "/bucket/corpus")


@pytest.mark.parametrize(("missing", "uri"), [("fsspec", URI), ("aiohttp", "https://example.com/corpus")])
def test_a_missing_package_is_reported_with_the_install_command(
    missing: str, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"{uri} needs a package.*pip install 'gptmill\[cloud\]'"):
        open_file_system(uri)


def test_an_unknown_scheme_is_reported() -> None:
    with pytest.raises(UserError, match="fsspec cannot open nonsense://a"):
        open_file_system("nonsense://a")


class Failing:
    """Raises the given errors one after another, then returns the number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.calls


def test_an_action_is_retried_after_each_pause_until_it_succeeds() -> None:
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    assert retry(Failing(TimeoutError(), RuntimeError()), (1.0, 2.0, 4.0), wait=wait) == 3
    assert pauses == [1.0, 2.0]


def test_the_last_error_is_raised_after_the_last_pause() -> None:
    action = Failing(TimeoutError("first"), TimeoutError("second"), TimeoutError("third"))
    with pytest.raises(TimeoutError, match="third"):
        retry(action, (0.0, 0.0))
    assert action.calls == 3


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), OSError(28, "No space left on device")])
def test_a_final_error_is_not_retried(error: Exception) -> None:
    action = Failing(error)
    with pytest.raises(type(error)):
        retry(action, (60.0,), is_final=is_permanent_error)
    assert action.calls == 1


def test_a_stop_flag_interrupts_the_pauses() -> None:
    stop = threading.Event()
    stop.set()
    action = Failing(TimeoutError())
    with pytest.raises(TimeoutError):
        retry(action, (60.0,), wait=stop.wait)
    assert action.calls == 1
