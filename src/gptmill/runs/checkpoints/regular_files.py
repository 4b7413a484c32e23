"""Opens files of untrusted checkpoints: regular files only, and never through a link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.data import regular_files
from gptmill.data.regular_files import IrregularFileError


def measure_regular(path: Path) -> int:
    """Returns the size of a regular file in bytes; raises UserError for anything else."""
    with _report_errors(path):
        return regular_files.measure_regular(path, follow_links=False)


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file; raises UserError for anything else."""
    with _report_errors(path):
        return regular_files.open_regular(path, follow_links=False)


@contextmanager
def _report_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except IrregularFileError as error:
        raise UserError(
            f"{path} is {error.kind}, where a checkpoint has regular files; use another checkpoint"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
