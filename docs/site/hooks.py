"""What makes GitHub's Markdown a site: files from outside docs/, and the links to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the repository's root, and the examples that the docs link to."""
    from mkdocs.structure.files import File

    examples = (path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    for path in [*(ROOT / name for name in PAGES), *examples]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links to where a file lies on the site, and takes the backslash from `a\\|b` in tables, as GitHub does."""
    if page.file.src_uri in PAGES:
        markdown = markdown.replace("](docs/", "](")
    markdown = markdown.replace("](../", "](")
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", _unescape, row[0]), markdown, flags=re.MULTILINE)


def _unescape(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
