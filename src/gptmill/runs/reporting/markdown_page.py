"""A report as Markdown, with the loss curve drawn in characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gptmill.runs.reporting.document import (
    Block,
    Document,
    Folded,
    KeyFigures,
    Legend,
    Paragraph,
    Plot,
    Quote,
    Table,
)
from gptmill.runs.reporting.formatting import clean

MARKER = "<!-- gptmill report -->"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render_markdown(document: Document) -> str:
    """Returns the report. Text from the run cannot become markup."""
    parts = [MARKER, f"# {_escape(document.title)}", f"*{_escape(document.subtitle)}*", *_render_all(document.summary)]
    for section in document.sections:
        blocks = _render_all(section.blocks)
        if blocks:
            parts += [f"## {_escape(section.title)}", *blocks]
    return "\n\n".join([*parts, f"*{_escape(document.footer)}*"]) + "\n"


def _render_all(blocks: Sequence[Block]) -> list[str]:
    rendered = [RENDERERS[type(block)](block) for block in blocks]
    return [text for text in rendered if text]


def _render_figures(block: KeyFigures) -> str:
    lines = [
        f"- **{_escape(value)}** {_escape(label)}" + (f" ({_escape(note)})" if note else "")
        for value, label, note in block.figures
    ]
    return "\n".join(lines)


def _render_table(block: Table) -> str:
    marks = [":--" if number in block.text_columns else "--:" for number in range(len(block.columns))]
    lines = [_make_row(block.columns), _make_row(marks, is_escaped=True)]
    for number, row in enumerate(block.rows):
        cells = [_escape(cell).replace("\n", " ") for cell in row]
        is_strong = number in block.strong_rows
        lines.append(_make_row([f"**{cell}**" if is_strong and cell else cell for cell in cells], is_escaped=True))
    return "\n".join(lines)


def _make_row(cells: Sequence[str], *, is_escaped: bool = False) -> str:
    return "| " + " | ".join(cells if is_escaped else map(_escape, cells)) + " |"


def _render_plot(block: Plot) -> str:
    note = f"\n\n{_escape(block.note)}" if block.note else ""
    return f"{_escape(block.title)}:\n\n{_fence(block.text)}{note}" if block.text else ""


def _render_legend(block: Legend) -> str:
    return "\n".join(f"- **{letter}** {_escape(name)}" for _, letter, name in block.entries)


def _render_quote(block: Quote) -> str:
    return f"{_escape(block.title)}:\n\n{_fence(clean(block.prompt + block.text))}"


def _render_folded(block: Folded) -> str:
    inner = "\n\n".join(_render_all(block.blocks))
    return f"<details><summary>{_escape(block.title)}</summary>\n\n{inner}\n\n</details>" if inner else ""


def _fence(text: str) -> str:
    """Returns a code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _escape(text: str) -> str:
    return SPECIAL.sub(r"\\\1", clean(text))


RENDERERS: dict[type, Callable[[Any], str]] = {
    Paragraph: lambda block: _escape(block.text),
    KeyFigures: _render_figures,
    Table: _render_table,
    Plot: _render_plot,
    Legend: _render_legend,
    Quote: _render_quote,
    Folded: _render_folded,
}
