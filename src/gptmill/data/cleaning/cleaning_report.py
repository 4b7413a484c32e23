"""What cleaning did to a corpus, for the manifest and the console."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from gptmill.config.text import sanitize
from gptmill.data.cleaning.cleaner import Drop

MAX_EXAMPLES = 3
EXAMPLE_CHARS = 80
MAX_FINDINGS = 10


@dataclass
class Dropped:
    """The documents that one filter dropped."""

    documents: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)
    findings: dict[str, int] = field(default_factory=dict)
    """What the filter found, with the number of documents: languages."""

    def describe_findings(self) -> str:
        """Returns "de 5, fr 2", the most frequent first; empty if the filter tells nothing."""
        ordered = sorted(self.findings.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{finding} {count:,}" for finding, count in ordered[:MAX_FINDINGS])


@dataclass
class CleaningReport:
    """The documents that each filter dropped, with a few examples, and the number of repaired ones."""

    repaired: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def add_dropped(self, drop: Drop, text_start: str, size_bytes: int) -> None:
        entry = self.dropped.setdefault(drop.option, Dropped())
        entry.documents += 1
        entry.bytes += size_bytes
        if drop.finding:
            entry.findings[drop.finding] = entry.findings.get(drop.finding, 0) + 1
        if len(entry.examples) < MAX_EXAMPLES:
            entry.examples.append(make_example(text_start))

    def add_repaired(self, documents: int) -> None:
        self.repaired += documents

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        dropped = {reason: Dropped(**entry) for reason, entry in record["dropped"].items()}
        return cls(record["repaired"], dropped)

    def describe(self) -> list[str]:
        """Returns lines for the console; none if nothing was changed."""
        lines = [f"repaired {_count(self.repaired)}"] if self.repaired else []
        for reason, entry in self.dropped.items():
            findings = f" ({found})" if (found := entry.describe_findings()) else ""
            lines.append(
                f"dropped {_count(entry.documents)}, {entry.bytes:,} bytes, by {reason}{findings}; among them:"
            )
            lines += [f"  {example}" for example in entry.examples]
        return lines


def make_example(text: str) -> str:
    """Returns the start of a text on one line, in characters that a file and a terminal can hold."""
    return sanitize(" ".join(text[: 4 * EXAMPLE_CHARS].split()))[:EXAMPLE_CHARS]


def _count(documents: int) -> str:
    return f"{documents:,} document{'s' if documents != 1 else ''}"
