"""The text of an HTML page: its main content, or all of it for pages on which a parser takes too long."""

from __future__ import annotations

import html
import re
from collections import Counter

from gptmill.data.sources.failures import make_extra_error

# A parser's time and memory grow with the number of tags times their depth, and its search for the main content with
# the cube of the depth. Browsers stop at a depth of 512.
FEW_TAGS = 1000
MAX_DEPTH = 400
MAX_NODES = 4_000_000
TAG_NAME = re.compile(r"<(/?[a-zA-Z][a-zA-Z0-9]*)")
# Elements without content, and those that end where the next one begins.
FLAT = frozenset(
    "area base br col embed hr img input link meta param source track wbr "
    "p li dt dd option optgroup tr td th thead tbody tfoot colgroup rp rt html head body".split()
)
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
    """Whether the elements are nested as in a page that people read."""
    names = TAG_NAME.findall(page)
    opened: Counter[str] = Counter()
    depth = deepest = 0
    for name in map(str.lower, names):
        if name[0] == "/":
            if opened[name[1:]]:
                opened[name[1:]] -= 1
                depth -= 1
        elif name not in FLAT:
            opened[name] += 1
            depth += 1
            deepest = max(deepest, depth)
    return deepest <= MAX_DEPTH and (deepest + 1) * len(names) <= MAX_NODES


def strip_tags(page: str) -> str:
    """Returns all visible text, one block per line."""
    text = TAG.sub("", BREAK.sub("\n", HIDDEN.sub(" ", page)))
    lines = (" ".join(line.split()) for line in html.unescape(text).split("\n"))
    return "\n".join(line for line in lines if line)
