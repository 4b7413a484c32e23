"""Finding: what one check found, what that means, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. Only `failed` means that training will not work."""

    group: str
    name: str
    state: State
    what: str
    """What was found."""
    meaning: str = ""
    """What follows from it; empty where there is nothing to say."""
    fix: str = ""
    """The command or the change that repairs it; empty where there is nothing to repair."""


def can_train(findings: Iterable[Finding]) -> bool:
    """Whether none of the findings stands in the way of training."""
    return all(finding.state != "failed" for finding in findings)


def run_check(group: str, name: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """Runs a check of this process; one that raises is a finding, not the end of the others."""
    try:
        found = check()
    except Exception as error:  # whatever it is, the other checks go on
        what = f"the check itself failed: {type(error).__name__}: {error}"
        return [Finding(group, name, "warning", what, "nothing is known about this")]
    return [found] if isinstance(found, Finding) else found
