"""Defects of a source: what could not be read, and what was empty. Counted by kind, with a few examples."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from gptmill.config.errors import UserError
from gptmill.config.text import sanitize
from gptmill.data.sources.failures import ErrorKind

MAX_EXAMPLES = 3
EXAMPLE_CHARS = 300
EMPTY_FILE, EMPTY_DOCUMENT = "empty_file", "empty_document"
NOT_ERRORS = (EMPTY_FILE, EMPTY_DOCUMENT)
ERRORS: dict[ErrorKind, str] = {
    "undecodable": "skipped {count} undecodable document(s)",
    "replaced": "replaced undecodable bytes by U+FFFD in {count} document(s)",
    "malformed": "skipped {count} malformed record(s)",
    "no_text": "skipped {count} record(s) or file(s) without a text field",
    "damaged": "skipped the rest of {count} damaged file(s)",
    "unreadable": "skipped {count} unreadable file(s)",
}


@dataclass(frozen=True)
class Defect:
    """Stands in a stream of documents where something is missing. The message names the file and the position."""

    kind: str
    message: str


@dataclass
class Entry:
    """The defects of one kind."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class DefectReport:
    """The defects of a source by kind."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, defect: Defect) -> None:
        entry = self.entries.setdefault(defect.kind, Entry())
        entry.count += 1
        if len(entry.examples) < MAX_EXAMPLES and defect.message not in entry.examples:
            entry.examples.append(sanitize(" ".join(defect.message[:EXAMPLE_CHARS].split())))

    @property
    def num_errors(self) -> int:
        return sum(entry.count for kind, entry in self.entries.items() if kind not in NOT_ERRORS)

    def check_limit(self, max_errors: int) -> None:
        """Raises UserError if there are more errors than allowed."""
        if self.num_errors > max_errors:
            raise UserError(
                "\n  ".join(
                    [
                        f"more than {max_errors:,} errors in the source; fix it, or allow more with --max_errors",
                        *self.describe(),
                    ]
                )
            )

    def to_json(self) -> dict[str, Any]:
        return {kind: asdict(entry) for kind, entry in self.entries.items()}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls({kind: Entry(**entry) for kind, entry in record.items()})

    def describe(self) -> list[str]:
        """Returns lines for the console; none if there is nothing to report."""
        lines = []
        for kind, name in ((EMPTY_FILE, "empty file"), (EMPTY_DOCUMENT, "empty document")):
            if entry := self.entries.get(kind):
                plural, more = "s" if entry.count != 1 else "", ", ..." if entry.count > len(entry.examples) else ""
                where = "in " if kind == EMPTY_DOCUMENT else ""
                lines.append(f"{entry.count:,} {name}{plural}: {where}{', '.join(entry.examples)}{more}")
        for kind, sentence in ERRORS.items():
            if entry := self.entries.get(kind):
                lines.append(sentence.format(count=f"{entry.count:,}") + "; among them:")
                lines += [f"  {example}" for example in entry.examples]
        return lines
