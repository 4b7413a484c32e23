"""Text that a model wrote, made fit to be shown: every tracker, browser and terminal gets it right.

For eyes only. What a run keeps, its events and samples, and what it trains on are never changed.
"""

from __future__ import annotations

import unicodedata

MARK = "·"  # in the place of what would move a terminal's cursor, or could not be read
PLAIN = {
    **dict.fromkeys("‘’‚‛′‹›", "'"),
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("‐‑‒–−", "-"),
    **dict.fromkeys("—―", "--"),
    **dict.fromkeys("•‣⁃∙◦●▪", "*"),
    **dict.fromkeys("⁄∕", "/"),
    "…": "...",
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),  # have no width
}
# Letters that are not an ASCII letter and an accent to Unicode, and the signs that gptmill draws with.
ASCII = {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d"}
ASCII |= {MARK: ".", "─": "-"}


def make_plain(text: str, encoding: str = "utf-8") -> str:
    """The text with plain quotes, dashes and spaces, and nothing invisible; letters stay if `encoding` has them."""
    plain = text.replace("\r\n", "\n").translate(_CHARACTERS)
    if can_hold(plain, encoding):
        return plain
    return "".join(_spell(character, encoding) for character in plain)


def make_writable(text: str, encoding: str | None) -> str:
    """The text as it is wherever `encoding` can hold it, else plain; a stream without encoding takes anything."""
    return text if encoding is None or can_hold(text, encoding) else make_plain(text, encoding)


def can_hold(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


class _Characters(dict[int, str]):
    """What stands for each code point; filled as they come."""

    def __missing__(self, code: int) -> str:
        self[code] = shown = _show(chr(code))
        return shown


_CHARACTERS = _Characters()


def _show(character: str) -> str:
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
    """A character without its accents if that is what the encoding lacks, else a question mark."""
    if can_hold(character, encoding):
        return character
    parts = ASCII.get(character) or unicodedata.normalize("NFKD", character)
    letters = "".join(part for part in parts if not unicodedata.combining(part)).translate(_CHARACTERS)
    return letters if can_hold(letters, encoding) else "?"
