"""The text of stages: a size that is smaller in the first steps of a run, that of windows or of batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Stage:
    """`size` tokens up to and with step `last_step`."""

    size: int
    last_step: int


Stages = tuple[Stage, ...]


def parse_stages(text: str, example: str) -> Stages:
    """Stages in their order; raises ValueError with what is wrong."""
    stages: list[Stage] = []
    for part in text.split(","):
        size, _, last_step = part.strip().partition(":")
        if not (_is_count(size) and _is_count(last_step)):
            raise ValueError(f"{part[:30]!r} must read TOKENS:STEP, both whole numbers above 0, such as {example}")
        stages.append(Stage(int(size), int(last_step)))
    if any(later.last_step <= earlier.last_step for earlier, later in pairwise(stages)):
        raise ValueError("must have its stages in the order of their steps")
    return tuple(stages)


def find_stage(stages: Stages, step: int) -> int | None:
    """The size at a step, counted from 1; None where it is the full one."""
    return next((stage.size for stage in stages if step <= stage.last_step), None)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0
