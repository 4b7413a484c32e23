"""Sanitises generated text for display, so that every terminal, tracker and browser renders it correctly.

For display only: events, samples on disk and training data are never changed.
"""

from __future__ import annotations

import re
import unicodedata

MARK = "·"  # replaces control characters and undecodable bytes
PLAIN = {
    **dict.fromkeys("‘’‚‛′‹›", "'"),
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("‐‑‒–−", "-"),
    **dict.fromkeys("—―", "--"),
    **dict.fromkeys("•‣⁃∙◦●▪", "*"),
    **dict.fromkeys("⁄∕", "/"),
    "…": "...",
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),  # zero width
}
# Letters that Unicode does not decompose into an ASCII letter and an accent, and what gptmill draws with.
ASCII = {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d"}
ASCII |= {MARK: ".", "─": "-", "→": "->"}


def make_plain(text: str, encoding: str = "utf-8") -> str:
    """Returns the text with ASCII quotes, dashes and spaces, nothing invisible, and only characters of `encoding`."""
    plain = text.replace("\r\n", "\n").translate(_CHARACTERS)
    if can_hold(plain, encoding):
        return plain
    return "".join(_spell(character, encoding) for character in plain)


def make_writable(text: str, encoding: str | None) -> str:
    """Returns the text unchanged if `encoding` can hold it or is None, else made plain."""
    return text if encoding is None or can_hold(text, encoding) else make_plain(text, encoding)


def shorten_checksum(source: str) -> str:
    """Returns a recorded source of weights, PATH#sha256=CHECKSUM, with the beginning of its checksum only."""
    return re.sub(r"(#sha256=[0-9a-f]{8})[0-9a-f]*$", r"\1", source)


def can_hold(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


class _Characters(dict[int, str]):
    """Maps each code point to its replacement; filled on demand."""

    def __missing__(self, code: int) -> str:
        self[code] = replacement = _replace(chr(code))
        return replacement


_CHARACTERS = _Characters()


def _replace(character: str) -> str:
    if character in PLAIN:
        return PLAIN[character]
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Zs":
        return " "
    if category in ("Cc", "Cf", "Cs", "Zl", "Zp") or character == "\ufffd":
        return MARK
    if "\ufb00" <= character <= "\ufb06":  # ligatures such as ﬁ
        return unicodedata.normalize("NFKD", character)
    return character


def _spell(character: str, encoding: str) -> str:
    """Returns the character without its accents if the encoding can hold that, else a question mark."""
    if can_hold(character, encoding):
        return character
    parts = ASCII.get(character) or unicodedata.normalize("NFKD", character)
    letters = "".join(part for part in parts if not unicodedata.combining(part)).translate(_CHARACTERS)
    return letters if can_hold(letters, encoding) else "?"
