"""Small tasks in the formats of the published ones; the texts are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def make_text(generator: random.Random, shortest: int, longest: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(shortest, longest)))


def write_tasks(folder: Path, count: int = 12) -> Path:
    """A folder with the files of hellaswag and lambada."""
    generator = random.Random(3)
    write_lines(
        folder / "hellaswag_val.jsonl",
        (
            {
                "activity_label": "Rain",
                "ctx_a": make_text(generator, 1, 9),
                "ctx_b": generator.choice(WORDS),
                "ctx": make_text(generator, 1, 9),
                "endings": [make_text(generator, 1, 6) for _ in range(4)],
                "label": number % 4,
            }
            for number in range(count)
        ),
    )
    write_lines(folder / "lambada_test.jsonl", ({"text": make_text(generator, 3, 9)} for _ in range(count)))
    return folder
