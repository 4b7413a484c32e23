"""What cleaning did to a corpus, for its manifest and for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

MAX_EXAMPLES = 3
EXAMPLE_CHARS = 80


@dataclass
class Dropped:
    """The documents that one filter dropped."""

    documents: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class CleaningReport:
    """Documents dropped by each filter, with a few examples, and how many were repaired."""

    repaired: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def add_dropped(self, reason: str, text_start: str, size_bytes: int) -> None:
        entry = self.dropped.setdefault(reason, Dropped())
        entry.documents += 1
        entry.bytes += size_bytes
        if len(entry.examples) < MAX_EXAMPLES:
            entry.examples.append(make_example(text_start))

    def add_repaired(self, documents: int) -> None:
        self.repaired += documents

    def to_json(self) -> dict[str, Any]:
        """As plain objects that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        dropped = {reason: Dropped(**entry) for reason, entry in record["dropped"].items()}
        return cls(record["repaired"], dropped)

    def describe(self) -> list[str]:
        """Lines for people; none where nothing was changed."""
        lines = [f"repaired {_count(self.repaired)}"] if self.repaired else []
        for reason, entry in self.dropped.items():
            lines.append(f"dropped {_count(entry.documents)}, {entry.bytes:,} bytes, by {reason}; among them:")
            lines += [f"  {example}" for example in entry.examples]
        return lines


def make_example(text: str) -> str:
    """The start of a text on one line, without what a terminal could not show."""
    line = " ".join(text[: 4 * EXAMPLE_CHARS].split())
    return "".join(character if character.isprintable() else "·" for character in line[:EXAMPLE_CHARS])


def _count(documents: int) -> str:
    return f"{documents:,} document{'s' if documents != 1 else ''}"
