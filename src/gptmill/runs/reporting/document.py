"""A report as blocks, before it becomes a page or Markdown. Texts are plain: whoever writes them out escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class KeyFigures:
    """The few numbers that matter: value, what it is, and a remark."""

    figures: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: frozenset[int] = frozenset({0})
    """Columns of words, aligned to the left; the others hold numbers."""
    strong_rows: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plot:
    """A drawing in two widths, and what stands for it in a text."""

    title: str
    wide: str
    narrow: str
    """For a phone, or beside another plot."""
    text: str = ""
    is_small: bool = False
    """Whether two of them fit side by side."""
    note: str = ""


@dataclass(frozen=True)
class Legend:
    """The lines of plots with several runs: style, letter and name."""

    entries: Sequence[tuple[int, str, str]]


@dataclass(frozen=True)
class Quote:
    """Text that a model wrote."""

    title: str
    prompt: str
    text: str


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown on demand."""

    title: str
    blocks: Sequence[Block]


Block = Paragraph | KeyFigures | Table | Plot | Legend | Quote | Folded


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    summary: Sequence[Block]
    sections: Sequence[Section] = field(default_factory=list)
    footer: str = ""
