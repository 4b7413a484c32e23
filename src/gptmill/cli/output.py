"""What verbs print to stdout: lines and tables."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def print_line(text: str) -> None:
    """Prints at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


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
