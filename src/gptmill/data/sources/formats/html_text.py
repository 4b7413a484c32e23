"""The text of an HTML page: its main content, or all of it for pages on which a parser takes too long."""

from __future__ import annotations

import html
import re
from collections import Counter

from gptmill.data.sources.failures import make_extra_error

# A parser copies open formatting elements into every block, and searches the main content in cubic time of the depth.
FEW_TAGS = 2000  # which a parser handles in seconds however they are nested
MAX_TAGS = 1_000_000
MAX_DEPTH = 400  # browsers stop at 512
MAX_COPIES = 2_000_000
COUNTED_TAGS = 64
TAG_NAME = re.compile(r"<(/?[a-z][a-z0-9]*)")
# Elements without content, and those that end where the next one begins.
FLAT = frozenset(
    "area base br col embed hr img input link meta param source track wbr "
    "p li dt dd option optgroup tr td th thead tbody tfoot colgroup rp rt html head body".split()
)
FORMATTING = frozenset("a b big code em font i nobr s small strike strong tt u".split())
HIDDEN = re.compile(
    r"<(script|style|noscript|template|title)\b.*?(?:</\1\b[^<>]*>?|\Z)|<!--.*?(?:-->|\Z)", re.IGNORECASE | re.DOTALL
)
BREAK = re.compile(r"<(?:/(?:p|div|li|tr|h[1-6]|table|ul|ol|blockquote|pre)|br|hr|p)\b[^<>]*>?", re.IGNORECASE)
TAG = re.compile(r"<[a-zA-Z/!?][^<>]*>?")


def extract_main_text(page: str) -> str:
    """Extracts the main content as plain text, in linear time whatever the page."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError:
        raise make_extra_error("reading HTML", "data") from None
    if page.count("<") > FEW_TAGS and not is_parsable(page):
        return strip_tags(page)
    return str(extract_plain_text(page, main_content=True, links=False))


def is_parsable(page: str) -> bool:
    """Whether the elements are nested as in a page that people read; overestimates their depth by COUNTED_TAGS."""
    if page.count("<") > MAX_TAGS:
        return False
    names = TAG_NAME.findall(page.lower())
    opened: dict[str, int] = {}
    for start in range(0, len(names), COUNTED_TAGS):
        counts = Counter(names[start : start + COUNTED_TAGS])  # at once, which is much faster than one by one
        for name, count in counts.items():
            if name[0] == "/" and opened.get(name[1:]):
                opened[name[1:]] = max(0, opened[name[1:]] - count)
        for name, count in counts.items():
            if name[0] != "/" and name not in FLAT:
                opened[name] = opened.get(name, 0) + count
        formats = sum(count for name, count in opened.items() if name in FORMATTING)
        if sum(opened.values()) > MAX_DEPTH or formats * len(names) > MAX_COPIES:
            return False
    return True


def strip_tags(page: str) -> str:
    """Returns all visible text, one block per line."""
    text = TAG.sub("", BREAK.sub("\n", HIDDEN.sub(" ", page)))
    lines = (" ".join(line.split()) for line in html.unescape(text).split("\n"))
    return "\n".join(line for line in lines if line)
