"""What verbs print to stdout: lines, tables, and text that is safe for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from gptmill.runs.display import make_plain


def print_line(text: str) -> None:
    """Prints at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def make_printable(text: str) -> str:
    """The text without control characters, in the encoding of stdout."""
    return make_plain(text, sys.stdout.encoding or "utf-8")


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> list[str]:
    """The lines of a table with a header; columns are right-aligned unless listed."""
    table = [columns, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if name in left_aligned else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]
