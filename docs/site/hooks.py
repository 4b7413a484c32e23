"""What makes GitHub's Markdown a site: files from outside docs/ and the links to them, blank lines, unbroken flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
ITEM_OR_ROW = re.compile(r"- |\d+\. |\|")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the repository's root, and the examples that the docs link to."""
    from mkdocs.structure.files import File

    examples = (path for path in sorted((ROOT / "examples").rglob("*.*")) if "__pycache__" not in path.parts)
    for path in [*(ROOT / name for name in PAGES), *examples]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Writes for Python-Markdown what is written for GitHub."""
    if page.file.src_uri in PAGES:
        markdown = markdown.replace("](docs/", "](")
    return separate_blocks(markdown.replace("](../", "]("))


def on_page_content(html: str, **_: Any) -> str:
    """Marks the words of inline code, which extra.css keeps in one piece: a browser would break --flag after --."""
    return re.sub(r"(?<!<pre>)(?<!</span>)<code>([^<]+)</code>", mark_words, html)


def separate_blocks(markdown: str) -> str:
    """Adds the blank line before a list or a table, and takes the backslash from `a\\|b` in a table."""
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        before = lines[-1] if lines else ""
        if not is_code and ITEM_OR_ROW.match(line):
            if before and not ITEM_OR_ROW.match(before) and not before.startswith("  "):
                lines.append("")
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
        is_code ^= line.startswith("```")
        lines.append(line)
    return "\n".join(lines)


def mark_words(code: re.Match[str]) -> str:
    return f"<code>{' '.join(f'<span>{word}</span>' for word in code[1].split())}</code>"
