"""A report as one self-contained HTML page: no scripts, nothing to load, all text escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
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
from gptmill.runs.reporting.style import STYLES, make_style_sheet

MARKER = '<meta name="generator" content="gptmill report">'
# Whatever a text smuggled in, the page may run nothing and load nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LONG_CELL = 40


def render_html(document: Document) -> str:
    """Returns the page. `MARKER` near its start says whose it is."""
    title = _escape(document.title)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        MARKER,
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title} – training report</title>",
        f"<style>{make_style_sheet()}</style>",
        "</head>",
        "<body>",
        "<main>",
        f'<header><p class="kind">Training report</p><h1>{title}</h1>',
        f'<p class="subtitle">{_escape(document.subtitle)}</p></header>',
        *_render_all(document.summary),
    ]
    for section in document.sections:
        parts += [f"<section><h2>{_escape(section.title)}</h2>", *_render_all(section.blocks), "</section>"]
    parts += [f"<footer>{_escape(document.footer)}</footer>", "</main>", "</body>", "</html>", ""]
    return "\n".join(parts)


def _render_all(blocks: Sequence[Block]) -> list[str]:
    """Small plots that follow each other stand side by side."""
    parts: list[str] = []
    for is_small, group in groupby(blocks, lambda block: isinstance(block, Plot) and block.is_small):
        rendered = [RENDERERS[type(block)](block) for block in group]
        parts += ['<div class="pair">', *rendered, "</div>"] if is_small else rendered
    return parts


def _render_paragraph(block: Paragraph) -> str:
    return f"<p>{_escape(block.text)}</p>"


def _render_figures(block: KeyFigures) -> str:
    cells = [
        f"<div><b>{_escape(value)}</b><span>{_escape(label)}</span><small>{_escape(note)}</small></div>"
        for value, label, note in block.figures
    ]
    return '<div class="figures">' + "\n".join(cells) + "</div>"


def _render_table(block: Table) -> str:
    def make_class(column: int, cell: str = "") -> str:
        if column not in block.text_columns:
            return ""
        return ' class="words long"' if len(cell) > LONG_CELL else ' class="words"'

    head = "".join(f"<th{make_class(number)}>{_escape(name)}</th>" for number, name in enumerate(block.columns))
    lines = [f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>']
    for number, row in enumerate(block.rows):
        cells = "".join(f"<td{make_class(column, cell)}>{_escape(cell)}</td>" for column, cell in enumerate(row))
        strong = ' class="strong"' if number in block.strong_rows else ""
        lines.append(f"<tr{strong}>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _render_plot(block: Plot) -> str:
    note = f" {_escape(block.note)}" if block.note else ""
    caption = f"<figcaption>{_escape(block.title)}{'.' if note else ''}{note}</figcaption>"
    if block.is_small:
        return f"<figure>{caption}{block.wide}</figure>"
    return f'<figure>{caption}<div class="wide">{block.wide}</div><div class="narrow">{block.narrow}</div></figure>'


def _render_legend(block: Legend) -> str:
    lines = [
        f'<li><svg viewBox="0 0 48 12" aria-hidden="true"><path class="line s{style % STYLES}" d="M0,6L48,6"/></svg>'
        f"<b>{_escape(letter)}</b> {_escape(name)}</li>"
        for style, letter, name in block.entries
    ]
    return '<ul class="legend">' + "".join(lines) + "</ul>"


def _render_quote(block: Quote) -> str:
    prompt, text = _escape(block.prompt), _escape(block.text)
    # The line break after <pre> is not part of the text; a first one of the text would vanish without it.
    return f'<div class="quote"><h3>{_escape(block.title)}</h3><pre dir="auto">\n<i>{prompt}</i>{text}</pre></div>'


def _render_folded(block: Folded) -> str:
    inner = "\n".join(_render_all(block.blocks))
    return f"<details><summary>{_escape(block.title)}</summary>{inner}</details>"


def _escape(text: str) -> str:
    return escape(clean(text), quote=True)


RENDERERS: dict[type, Callable[[Any], str]] = {
    Paragraph: _render_paragraph,
    KeyFigures: _render_figures,
    Table: _render_table,
    Plot: _render_plot,
    Legend: _render_legend,
    Quote: _render_quote,
    Folded: _render_folded,
}
