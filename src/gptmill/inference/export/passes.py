"""Progress of an export: passes over the model's parameters, which convert, write, round or read them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Report = Callable[[int, int], None]
"""Is told how many parameters are done, and of how many."""
Stage = Callable[[str], AbstractContextManager[Report]]
"""Begins what a text says; the context gets the progress of it."""
Advance = Callable[[int], None]
"""Is told of so many parameters that a pass is done with."""


def stay_silent(_stage: str) -> AbstractContextManager[Report]:
    """The stages of an export that shows no progress."""
    return nullcontext(lambda _done, _total: None)


def count_passes(report: Report, parameters: int, passes: int) -> Advance:
    """Reports several passes over a model as one. A pass may leave out some parameters, such as padding."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(min(done // passes, parameters), parameters)

    return advance
