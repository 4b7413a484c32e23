"""The text of context stages: how long windows are in the first steps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class ContextStage:
    """Windows of `length` tokens up to and with step `last_step`."""

    length: int
    last_step: int


def parse_context_stages(text: str) -> tuple[ContextStage, ...]:
    """Stages in their order; raises ValueError with what is wrong."""
    stages: list[ContextStage] = []
    for part in text.split(","):
        length, _, last_step = part.strip().partition(":")
        if not (_is_count(length) and _is_count(last_step)):
            raise ValueError(f"{part!r} must read LENGTH:STEP, both whole numbers above 0, such as 256:500,512:1500")
        stages.append(ContextStage(int(length), int(last_step)))
    if any(later.last_step <= earlier.last_step for earlier, later in pairwise(stages)):
        raise ValueError("must have its stages in the order of their steps")
    return tuple(stages)


def find_stage_length(stages: tuple[ContextStage, ...], step: int) -> int | None:
    """The length of the windows of a step, counted from 1; None where they have their full length."""
    return next((stage.length for stage in stages if step <= stage.last_step), None)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0
