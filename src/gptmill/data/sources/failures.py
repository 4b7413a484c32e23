"""Errors of text that cannot be read: their kinds and their messages."""

from __future__ import annotations

import errno
from typing import Literal

from gptmill.config.errors import UserError

ErrorKind = Literal["undecodable", "replaced", "malformed", "no_text", "damaged", "unreadable"]
LASTING = (errno.EACCES, errno.EPERM, errno.EIO)  # errors of a file itself, which occur whenever it is read


class ReadingError(UserError):
    """A defect of the data, which --on_error may skip. Other errors, as of the network, always stop the reading.

    A format reader yields it in place of a record that it cannot read, and raises it if it cannot read on.
    """

    def __init__(self, message: str, kind: ErrorKind = "damaged") -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


Record = str | ReadingError
"""The text of a record, or why it has none."""


def make_extra_error(what: str, extra: str) -> UserError:
    return UserError(f"{what} needs packages that are not installed; install them with: pip install 'gptmill[{extra}]'")


def make_reading_error(uri: str, error: OSError) -> UserError:
    message = f"cannot read {uri}: {error.strerror or error}; check its permissions or leave it out"
    return ReadingError(message, "unreadable") if error.errno in LASTING else UserError(message)


def make_decoding_error(uri: str, error: UnicodeDecodeError, offset: int, *, is_replaced: bool = False) -> ReadingError:
    """For text whose byte at `offset`, counted from the start of the decompressed file, cannot be decoded."""
    return ReadingError(
        f"{uri} is not {error.encoding} text: byte 0x{error.object[error.start]:02x} at offset {offset}; convert the "
        f"file (iconv -f ENCODING -t utf-8, with the encoding that it has) or leave it out",
        "replaced" if is_replaced else "undecodable",
    )


def make_field_error(where: str, kind: str, field: str, present: list[str]) -> ReadingError:
    """For a record or a table without the text field."""
    names = ", ".join(present[:20]) or "nothing"
    message = f"{where} has no {kind} {field!r}; name the one with the text by --text_field ({names})"
    return ReadingError(message, "no_text")


def make_type_error(where: str, field: str, value: str) -> ReadingError:
    message = f"{where} has {value} in {field!r}, not text; name another field by --text_field or fix it"
    return ReadingError(message, "no_text")
