"""User errors: exceptions whose message is a sentence for the user. Printing them is left to the caller."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from gptmill.config import exit_codes

MAX_SHOWN, MAX_CHARS = 100, 1000  # problems, and characters of each: a damaged file can have thousands


class UserError(Exception):
    """Says what is wrong, where, and what to do. Printed without a traceback; the process exits with code 2."""

    exit_code = exit_codes.USER_ERROR


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration."""

    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fix}"


class ConfigError(UserError):
    """All problems of a configuration at once, so that one edit can fix them."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        lines = [text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…" for text in map(str, problems[:MAX_SHOWN])]
        if len(problems) > MAX_SHOWN:
            lines.append(f"and {len(problems) - MAX_SHOWN:,} more")
        text = lines[0] if len(lines) == 1 else "\n".join([f"{len(problems)} problems:", *(f"  - {x}" for x in lines)])
        super().__init__(text)


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """ " (did you mean X?)" for the closest known name, shown with the prefix; empty if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""
