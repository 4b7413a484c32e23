"""Text from anywhere on its way to a terminal: the one gate on standard output and standard error.

Behind `guard_output`, what Python code writes there, whether a table, an error, a warning, a library's message or a
traceback, cannot command a terminal. Control characters other than line breaks and tabs, and characters that turn the
direction of text or break its lines, are shown as Python would write them, such as \\x1b. It makes no difference
whether the stream is a terminal: pipes and logs end in one.

What passes by the gate takes the stream from `find_raw`: the displays that gptmill draws, which sanitize the text in
them, and the texts of `gptmill sample` that do not go to a terminal. Native code and other programs write to the file
descriptors themselves, which no gate of Python's sees.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

UNSAFE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"
    "|[\u2028-\u202e\u2066-\u2069]"  # separators of lines, and directions
    "|[\ud800-\udfff]"  # bytes of a name that is not UTF-8
)


def sanitize(text: str) -> str:
    """Returns the text with its control characters escaped; sanitizing again changes nothing."""
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


class GuardedStream:
    """A text stream that sanitizes what is written to it, and is otherwise the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream

    def write(self, text: str) -> int:
        self.raw_stream.write(sanitize(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """False, so that libraries draw and color nothing."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def guard_output() -> None:
    """Puts the gate on both streams, for the rest of the process."""
    os.environ.setdefault("PYTHON_COLORS", "0")  # tracebacks and argparse would ask the file descriptor
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, cast("TextIO", GuardedStream(stream)))


def find_raw(stream: TextIO) -> TextIO:
    """The stream beneath the gate, and beneath a live display of rich."""
    for inner in ("raw_stream", "rich_proxied_file"):
        if (found := getattr(stream, inner, None)) is not None:
            return find_raw(found)
    return stream
