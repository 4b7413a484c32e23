"""Options that pack several values into one text: attention windows, data mixtures and warm-up stages.

Parsers raise ValueError with a sentence that continues `FIELD = VALUE: `.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

# No exponents: weights are exact, and 1e999999999 would be an integer that fills the memory.
WEIGHT = re.compile(r"\d{1,12}(\.\d{1,12})?")


def parse_windows(text: str) -> tuple[int | None, ...]:
    """The pattern of sliding windows that layers repeat, as in `256,256,full`; None for full attention."""
    return tuple(_parse_window(part.strip()) for part in text.split(","))


def parse_mixture(text: str) -> dict[str, Fraction]:
    """Sampling weights by folder, in the order given, as in `data/books=0.7,data/code=0.3`."""
    weights: dict[str, Fraction] = {}
    for part in text.split(","):
        folder, _, weight = part.rpartition("=")
        folder, weight = folder.strip(), weight.strip()
        if not folder:
            raise ValueError(f"{part!r} must have the form FOLDER=WEIGHT, e.g. data/books=0.7,data/code=0.3")
        if not WEIGHT.fullmatch(weight) or not Fraction(weight):
            raise ValueError(f"the weight of {folder} must be a positive number such as 0.7, not {weight!r}")
        if folder in weights:
            raise ValueError(f"{folder} is given twice; add up its weights")
        weights[folder] = Fraction(weight)
    return weights


@dataclass(frozen=True)
class Stage:
    """A warm-up stage: `size` tokens per window or per batch until `last_step`, inclusive."""

    size: int
    last_step: int


Stages = tuple[Stage, ...]


def parse_stages(text: str, example: str) -> Stages:
    """Warm-up stages by increasing step, as in `256:500,512:1500`; `example` appears in the error."""
    stages: list[Stage] = []
    for part in text.split(","):
        size, _, last_step = part.strip().partition(":")
        if not (_is_count(size) and _is_count(last_step)):
            raise ValueError(f"{part[:30]!r} must have the form TOKENS:STEP, two positive integers, e.g. {example}")
        stages.append(Stage(int(size), int(last_step)))
    if any(later.last_step <= earlier.last_step for earlier, later in pairwise(stages)):
        raise ValueError("steps must increase from stage to stage; reorder the stages")
    return tuple(stages)


def find_stage(stages: Stages, step: int) -> int | None:
    """The size at a step, counted from 1; None after the last stage."""
    return next((stage.size for stage in stages if step <= stage.last_step), None)


def _parse_window(word: str) -> int | None:
    if word == "full":
        return None
    if _is_count(word):
        return int(word)
    raise ValueError(f"{word[:20]!r} must be a positive number of tokens or full, as in 256,256,full")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0
